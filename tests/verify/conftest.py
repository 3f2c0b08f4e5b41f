"""Checkpoints that are wrong on purpose: a copy of a fixture with one weight changed."""

import json
import shutil
from collections.abc import Callable, Generator
from pathlib import Path

import numpy as np
import pytest


def change_weight(folder: Path, name: str, change: Callable[[np.ndarray], np.ndarray]) -> None:
    """Rewrites a tensor of `folder`'s float16 model.safetensors in place."""
    path = folder / "model.safetensors"
    data = bytearray(path.read_bytes())
    length = int.from_bytes(data[:8], "little")
    entry = json.loads(data[8 : 8 + length])[name]
    assert entry["dtype"] == "F16"
    start, stop = (8 + length + offset for offset in entry["data_offsets"])
    values = np.frombuffer(bytes(data[start:stop]), np.float16)
    data[start:stop] = change(values).astype(np.float16).tobytes()
    path.write_bytes(data)


@pytest.fixture(scope="session", autouse=True)
def own_compile_cache(tmp_path_factory) -> Generator[None]:
    """Compiled steps do not go to the user's own cache folder."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture
def wrong_llama(golden_dir, tmp_path) -> Callable[[str], Path]:
    """`wrong_llama(tensor)` is llama_plain with that tensor's values rolled by one."""

    def make(name: str) -> Path:
        folder = tmp_path / "wrong"
        shutil.copytree(golden_dir("llama_plain"), folder)
        change_weight(folder, name, lambda values: np.roll(values, 1))
        return folder

    return make
