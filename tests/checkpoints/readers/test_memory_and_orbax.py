"""Trees that never were a checkpoint file: arrays in memory, NNX states, Orbax folders."""

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from flax import nnx
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from jaxgen_checkpoints.errors import CheckpointError
from jaxgen_checkpoints.readers.memory import MemorySource
from jaxgen_checkpoints.readers.orbax_source import OrbaxSource

ROWS = np.arange(64, dtype=np.float32).reshape(16, 4)


def sharded() -> jax.Array:
    mesh = jax.make_mesh((4,), ("x",), devices=jax.devices()[:4], axis_types=(AxisType.Auto,))
    return jax.device_put(ROWS, NamedSharding(mesh, PartitionSpec("x")))


class Block(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.layers = nnx.List([nnx.Linear(3, 4, rngs=rngs)])
        self.dropout = nnx.Dropout(0.1, rngs=rngs)


def test_nested_tree_is_named_by_its_paths():
    source = MemorySource(
        {"model": {"layers": [{"w": ROWS}], "e": sharded()}, "lm_head.weight": ROWS}
    )
    assert set(source.tensors()) == {"model.layers.0.w", "model.e", "lm_head.weight"}
    for name in source.tensors():
        part = source.read(name, (slice(3, 9), slice(1, 2)))
        np.testing.assert_array_equal(part, ROWS[3:9, 1:2])
        assert part.flags.writeable


def test_nnx_state_has_variables_and_no_generator_keys():
    state = nnx.state(Block(nnx.Rngs(0)))
    source = MemorySource(state)
    assert {"layers.0.kernel", "layers.0.bias"} <= source.tensors().keys()
    assert not any(name.endswith((".value", ".key")) for name in source.tensors())
    assert MemorySource(nnx.to_pure_dict(state)).tensors().keys() == source.tensors().keys()


def test_bfloat16_stays_bfloat16():
    source = MemorySource({"w": jnp.ones((2, 2), jnp.bfloat16)})
    assert source.tensors()["w"].dtype_name == "BF16"
    assert source.read("w", (slice(0, 1), slice(None))).dtype == jnp.bfloat16


def test_what_is_not_an_array_is_refused_by_name():
    with pytest.raises(CheckpointError, match=r"a\.b: expected a numpy or JAX array, got str"):
        MemorySource({"a": {"b": "text"}})
    with pytest.raises(CheckpointError, match=r"two arrays are named a\.b"):
        MemorySource({"a": {"b": ROWS}, "a.b": ROWS})


def test_orbax_folder_is_read_by_slices(tmp_path):
    tree = {
        "model": {"e": jnp.asarray(ROWS, jnp.bfloat16), "layers": [{"w": sharded()}, {"w": ROWS}]},
        "step": 3,
    }
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "step", tree)
    source = OrbaxSource(tmp_path / "step")
    assert set(source.tensors()) == {"model.e", "model.layers.0.w", "model.layers.1.w"}
    assert source.tensors()["model.e"].dtype_name == "BF16"
    for name, info in source.tensors().items():
        assert info.shape == ROWS.shape
        part = source.read(name, (slice(3, 9), slice(1, 2)))
        assert part.dtype == info.dtype
        np.testing.assert_array_equal(part.astype(np.float32), ROWS[3:9, 1:2])


def test_orbax_folder_of_an_nnx_state(tmp_path):
    state = nnx.state(Block(nnx.Rngs(0)), nnx.Param)
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "step", state)
    assert set(OrbaxSource(tmp_path / "step").tensors()) == {"layers.0.kernel", "layers.0.bias"}


def test_folder_that_is_no_orbax_checkpoint(tmp_path):
    with pytest.raises(CheckpointError, match="expected an Orbax checkpoint"):
        OrbaxSource(tmp_path)
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "0" / "default", {"w": ROWS})
    with pytest.raises(CheckpointError, match=r"there is one in .*default"):
        OrbaxSource(tmp_path)


def test_damaged_orbax_checkpoint(tmp_path):
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "step", {"w": ROWS})
    metadata = tmp_path / "step" / "_METADATA"
    text = metadata.read_text()
    metadata.write_text(text.replace("('w',)", "('v',)"))
    with pytest.raises(CheckpointError, match="array v cannot be opened"):
        OrbaxSource(tmp_path / "step")
    metadata.write_text(text.replace("('w',)", "w("))
    with pytest.raises(CheckpointError, match="not the description of a pytree"):
        OrbaxSource(tmp_path / "step")


def test_what_is_gone_or_cut_is_never_read_as_zeros(tmp_path):
    folder, whole = tmp_path / "step", (slice(None), slice(None))
    tree = {name: np.random.default_rng(1).normal(size=(16, 16)) for name in ("v", "w")}
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(folder, tree)
    refused = set()
    for file in folder.rglob("d/*"):
        stored = file.read_bytes()
        for left in (None, len(stored) // 2, len(stored) - 1):
            file.unlink() if left is None else file.write_bytes(stored[:left])
            try:
                source = OrbaxSource(folder)
                for name, values in tree.items():
                    np.testing.assert_array_equal(source.read(name, whole), values)
            except CheckpointError as error:
                refused.add(str(error).partition(" (")[0].removeprefix(f"{folder}: array "))
        file.write_bytes(stored)
    opened = "v cannot be opened; the checkpoint may be incomplete"
    assert refused >= {opened, "v cannot be read"}
