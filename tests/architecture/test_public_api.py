"""The public face changes on purpose: names and signatures are kept in tests/public_api.txt."""

import runpy
from pathlib import Path

import pytest


def test_public_face_is_the_recorded_one(
    repo_root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    runpy.run_path(str(repo_root / "scripts" / "public_api.py"), run_name="__main__")
    recorded = (repo_root / "tests" / "public_api.txt").read_text()
    told = capsys.readouterr().out
    assert told == recorded, "run `make api`, and tell users in CHANGELOG.md what changed"
