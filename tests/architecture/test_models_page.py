"""docs/models.md says what the registry and the fixtures say."""

import subprocess
import sys
from pathlib import Path


def test_models_page_is_what_the_registry_says(repo_root: Path) -> None:
    script = repo_root / "scripts" / "models_table.py"
    done = subprocess.run(
        [sys.executable, script], capture_output=True, text=True, timeout=120, check=True
    )
    assert (repo_root / "docs" / "models.md").read_text() == done.stdout, "run `make models`"
