"""Model shapes whose sizes carry config fields, and sources that count what is read from them."""

from types import SimpleNamespace

import numpy as np
import pytest

from jaxgen_checkpoints.dim import Dim
from jaxgen_checkpoints.source import TensorInfo

FIELDS = {
    "num_layers": "num_hidden_layers",
    "model_dim": "hidden_size",
    "heads": "num_attention_heads",
    "kv_heads": "num_key_value_heads",
    "head_dim": "head_dim",
    "ffn_dim": "intermediate_size",
    "vocab_size": "vocab_size",
    "num_experts": "num_local_experts",
    "expert_ffn_dim": "moe_intermediate_size",
}
SIZES = {
    "num_layers": 2,
    "model_dim": 6,
    "heads": 4,
    "kv_heads": 2,
    "head_dim": 2,
    "ffn_dim": 10,
    "vocab_size": 13,
    "num_experts": 3,
    "expert_ffn_dim": 5,
}


class CountingSource:
    """Arrays in memory by name; `reads` holds every (name, index) that was asked for."""

    def __init__(self, arrays):
        self.arrays = arrays
        self.reads = []
        self.description = f"{len(arrays)} arrays"

    def tensors(self):
        return {
            name: TensorInfo(name, value.shape, value.dtype, "memory")
            for name, value in self.arrays.items()
        }

    def read(self, name, index):
        self.reads.append((name, index))
        return self.arrays[name][index].copy()


@pytest.fixture(scope="session")
def counting_source():
    return CountingSource


@pytest.fixture
def make_model():
    """Make a model shape; sizes by name replace the tiny defaults, other names are added."""

    def make(**changes):
        sizes = {name: changes.pop(name, size) for name, size in SIZES.items()}
        dims = {name: Dim(size, FIELDS[name]) for name, size in sizes.items()}
        return SimpleNamespace(**dims, **changes)

    return make


@pytest.fixture
def random_arrays():
    """Distinct random float32 arrays by name and shape."""

    def make(shapes):
        rng = np.random.default_rng(0)
        return {n: rng.standard_normal(s).astype(np.float32) for n, s in shapes.items()}

    return make
