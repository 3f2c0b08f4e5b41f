"""The TPU kernel of the experts' blocks compiles for every generation, and copies no weight."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxgen.plan import parse_topology
from jaxgen_models.layers.gating import ActivatedGate
from pallas_kernels.expert_mlp import tpu

GATE = ActivatedGate("silu")


def compiled(topology, tokens, top_k, experts, model, ffn):
    """The program for one device of the machine, and the bytes of the second products' weights."""
    machine = parse_topology(topology)
    mesh = Mesh(np.array(machine.devices[:1]), ("x",))
    one = NamedSharding(mesh, PartitionSpec())

    def shape(*sizes, dtype=jnp.bfloat16):
        return jax.ShapeDtypeStruct(sizes, dtype, sharding=one)

    down = shape(experts, model, ffn)
    arguments = (
        shape(tokens, model),
        shape(tokens, top_k, dtype=jnp.int32),
        shape(tokens, top_k, dtype=jnp.float32),
        shape(experts, 2, ffn, model),
        down,
    )

    def serve(*arrays):
        return tpu.run(*arrays, gate=GATE, bias=None)

    with machine.compiling(), jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        return jax.jit(serve).lower(*arguments).compile(), down.size * down.dtype.itemsize


@pytest.mark.parametrize(
    ("topology", "tokens", "shape"),
    [
        ("v5e:2x2", 64, (2, 8, 4096, 3584)),
        ("tpu7x:2x2x1", 64, (6, 64, 2048, 352)),  # rows that XLA lays out the other way
        ("v6e:2x4", 64, (2, 1, 4096, 14336)),  # one expert, whole, of eight
        pytest.param("v5p:4x4x4", 2048, (8, 4, 7168, 2048), marks=pytest.mark.slow),
        pytest.param("v6e:2x4", 2048, (2, 8, 4096, 3584), marks=pytest.mark.slow),
        pytest.param("v5p:4x4x4", 2048, (8, 32, 7168, 256), marks=pytest.mark.slow),
        pytest.param("v5p:4x4x4", 1, (8, 32, 7168, 256), marks=pytest.mark.slow),
    ],
)
def test_compiles_and_copies_no_weight(topology, tokens, shape):
    program, weight_bytes = compiled(topology, tokens, *shape)
    assert "tpu_custom_call" in program.as_text()
    if tokens <= 64:
        assert program.memory_analysis().temp_size_in_bytes < weight_bytes // 8
    copies = [line for line in program.as_text().splitlines() if " copy(" in line]
    assert not [line for line in copies if f"[{shape[1]},{shape[2]},{shape[3]}]" in line]
