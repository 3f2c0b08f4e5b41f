"""docs/models.md says what the registry and the fixtures say."""

import runpy
from pathlib import Path

import pytest


def test_models_page_is_what_the_registry_says(
    repo_root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    runpy.run_path(str(repo_root / "scripts" / "models_table.py"), run_name="__main__")
    page = (repo_root / "docs" / "models.md").read_text()
    assert page == capsys.readouterr().out, "run `make models`"
