"""Weights reach the devices shard by shard, from their own byte ranges, checked as they pass."""

import io
import math
import os
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxgen_checkpoints.container import LayerContainer
from jaxgen_checkpoints.container_map import ContainerMap
from jaxgen_checkpoints.errors import CheckpointWarning
from jaxgen_checkpoints.load import abstract, bytes_to_load, load
from jaxgen_checkpoints.load_progress import loading_bar
from jaxgen_checkpoints.mesh_layout import MeshLayout, make_mesh
from jaxgen_checkpoints.parameters.attention_output import AttentionOutput
from jaxgen_checkpoints.parameters.embedding import Embedding
from jaxgen_checkpoints.parameters.mlp import GatedMLP
from jaxgen_checkpoints.parameters.norm import Norm
from jaxgen_checkpoints.parameters.qkv import UnfusedQKV


class Layer(LayerContainer):
    norm: Norm
    qkv: UnfusedQKV
    out: AttentionOutput
    gate_up: GatedMLP

    PARAM_MAPPING = {
        "norm.weight": "norm.weight",
        "q.weight": "qkv.q",
        "k.weight": "qkv.k",
        "v.weight": "qkv.v",
        "o.weight": "out.weight",
        "gate.weight": "gate_up.gate",
        "up.weight": "gate_up.up",
    }


class Ends(LayerContainer):
    embed: Embedding
    PARAM_MAPPING = {"embed.weight": "embed.weight"}


@pytest.fixture
def containers(make_model):
    model = make_model(num_layers=2, heads=9, kv_heads=3, head_dim=4, ffn_dim=10, vocab_size=13)
    containers = ContainerMap()
    containers.set_transformer_params(["h"], [Layer(model), Layer(model)])
    containers.set_non_transformer_params(Ends(model))
    return containers


@pytest.fixture
def source(containers, random_arrays, counting_source):
    return counting_source(random_arrays(containers.expected_tensors()))


MESHES = [{}, {"tensor": 8}, {"tensor": 4, "data": 2}, {"tensor": 2, "expert": 2, "data": 2}]


@pytest.mark.parametrize("sizes", MESHES)
def test_every_device_holds_what_is_described(containers, source, sizes):
    layout = MeshLayout(make_mesh(**sizes))
    described = containers.describe(source, layout)
    shapes = abstract(described, layout, jnp.bfloat16)
    placed: list[int] = []
    arrays = load(described, layout, jnp.bfloat16, placed.append)
    is_weight = lambda node: hasattr(node, "placed")
    for weight, shape, array in zip(
        jax.tree.leaves(described, is_leaf=is_weight),
        jax.tree.leaves(shapes),
        jax.tree.leaves(arrays),
        strict=True,
    ):
        assert (array.shape, array.dtype, array.sharding) == (
            shape.shape,
            shape.dtype,
            shape.sharding,
        )
        expected = weight.placed().read_all().astype(jnp.bfloat16)
        for shard in array.addressable_shards:
            np.testing.assert_array_equal(np.asarray(shard.data), expected[shard.index])
    assert sum(placed) == bytes_to_load(described, layout, jnp.bfloat16)


def test_a_shard_is_read_once_and_nothing_else_with_it(containers, source):
    layout = MeshLayout(make_mesh(tensor=2, data=4))
    described = containers.describe(source, layout)
    load(described, layout, np.float32)
    read = {}
    for name, index in source.reads:
        count = math.prod(part.stop - part.start for part in index)
        read[name] = read.get(name, 0) + count
    assert read == {name: array.size for name, array in source.arrays.items()}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_values_that_are_not_finite_are_reported_by_tensor(containers, source, dtype):
    source.arrays["h.1.k.weight"][3, 2] = np.nan
    source.arrays["embed.weight"][12, :2] = -np.inf
    layout = MeshLayout(make_mesh(tensor=4))
    described = containers.describe(source, layout)
    with pytest.warns(CheckpointWarning) as caught:
        load(described, layout, dtype)
    (message,) = [str(warning.message) for warning in caught]
    assert "h.1.k.weight (memory) holds 1 NaN in 72 values" in message
    assert "embed.weight (memory) holds 2 infinite values in 78 values" in message
    assert message.count("holds") == 2
    load(described, layout, dtype, check=False)


def test_values_too_large_for_the_type_are_reported(containers, source):
    source.arrays["h.0.norm.weight"][:] = 1e5
    layout = MeshLayout(make_mesh())
    described = containers.describe(source, layout)
    load(described, layout, np.float32)
    with pytest.warns(CheckpointWarning, match=r"h.0.norm.weight .* holds 6 beyond float16"):
        load(described, layout, np.float16)


def test_the_bar_is_drawn_on_terminals_only(monkeypatch):
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    for stream, show, drawn in (
        (io.StringIO(), True, ""),
        (Terminal(), False, ""),
        (Terminal(), True, "B/s"),
    ):
        monkeypatch.setattr(sys, "stderr", stream)
        with loading_bar(2 * 10**9, show=show) as progress:
            progress(10**9)
        assert (drawn in stream.getvalue()) if drawn else not stream.getvalue()


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="measures with /proc")
@pytest.mark.newest
def test_the_host_never_holds_a_copy_of_the_model(tmp_path):
    script = Path(__file__).with_name("load_memory.py")
    environment = {
        **os.environ,
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": "--xla_force_host_platform_device_count=8",
        "PYTHONPATH": str(Path(__file__).resolve().parents[3] / "checkpoints"),
    }
    done = subprocess.run(
        [sys.executable, script, tmp_path],
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    model, largest, transient = (int(word) for word in done.stdout.split())
    assert model > 300 << 20
    # The arrays of CPU devices are host memory too: what is counted is what came on top of them.
    assert transient < largest + (40 << 20), (model, largest, transient)
