"""The public face changes on purpose: names and signatures are kept in tests/public_api.txt."""

import subprocess
import sys
from pathlib import Path


def test_public_face_is_the_recorded_one(repo_root: Path) -> None:
    script = repo_root / "scripts" / "public_api.py"
    done = subprocess.run(
        [sys.executable, script], capture_output=True, text=True, timeout=120, check=True
    )
    recorded = (repo_root / "tests" / "public_api.txt").read_text()
    assert done.stdout == recorded, "run `make api`, and tell users in CHANGELOG.md what changed"
