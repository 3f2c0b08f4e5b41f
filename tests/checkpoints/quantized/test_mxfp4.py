"""MXFP4 checkpoints read as the wide weights that they stand for."""

import numpy as np
import pytest

from jaxgen_checkpoints.errors import CheckpointError
from jaxgen_checkpoints.quantized.mxfp4 import Mxfp4Source
from jaxgen_checkpoints.readers.memory import MemorySource


def make(experts: int = 2, outputs: int = 6, groups: int = 3) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    return {
        "e.down_proj_blocks": rng.integers(0, 256, (experts, outputs, groups, 16), np.uint8),
        "e.down_proj_scales": rng.integers(120, 134, (experts, outputs, groups), np.uint8),
        "e.down_proj_bias": rng.standard_normal((experts, outputs)),
    }


def test_numbers_are_spelled_low_half_first() -> None:
    tensors = make(1, 1, 1)
    tensors["e.down_proj_blocks"][:] = 0
    tensors["e.down_proj_blocks"][0, 0, 0, :3] = [0x21, 0x7F, 0x8A]
    tensors["e.down_proj_scales"][:] = 127 + 3
    source = Mxfp4Source(MemorySource(tensors))
    assert source.tensors()["e.down_proj"].shape == (1, 32, 1)
    got = source.read("e.down_proj", (slice(None),) * 3)[0, :6, 0]
    np.testing.assert_array_equal(got, np.array([0.5, 1, -6, 6, -1, -0.0]) * 8)


def test_a_slice_is_what_it_is_in_the_whole() -> None:
    source = Mxfp4Source(MemorySource(make()))
    assert set(source.tensors()) == {"e.down_proj", "e.down_proj_bias"}
    whole = source.read("e.down_proj", (slice(None),) * 3)
    assert whole.shape == (2, 96, 6)
    for inputs in ((0, 96), (5, 40), (32, 64), (95, 96), (7, 7)):
        index = (slice(1, 2), slice(*inputs), slice(2, 5))
        np.testing.assert_array_equal(source.read("e.down_proj", index), whole[index])


def test_scales_that_do_not_fit_are_refused() -> None:
    tensors = make()
    missing = {name: each for name, each in tensors.items() if not name.endswith("_scales")}
    with pytest.raises(CheckpointError, match="_scales is missing"):
        Mxfp4Source(MemorySource(missing))
    short = {**tensors, "e.down_proj_scales": tensors["e.down_proj_scales"][:, :, :2]}
    with pytest.raises(CheckpointError, match=r"expected U8 \[2, 6, 3\]"):
        Mxfp4Source(MemorySource(short))
    narrow = {**tensors, "e.down_proj_blocks": tensors["e.down_proj_blocks"][..., :8]}
    with pytest.raises(CheckpointError, match=r"expected \[experts, out, groups, 16\]"):
        Mxfp4Source(MemorySource(narrow))
