"""The TPU attention kernel compiles for every generation, and copies no page."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxgen.plan import parse_topology
from pallas_kernels.pages import KVPages, RaggedRows, abstract_kv_pages
from pallas_kernels.ragged_attention import tpu

ROWS, BLOCKS, PAGES = 8, 32, 64
OPTIONS = {"window": 100, "soft_cap": 30.0}


def compiled(topology, tokens, heads, kv_heads, head, options):
    """The program for one device of the machine, and the bytes of its pages."""
    mesh = Mesh(np.array(parse_topology(topology).devices[:1]), ("x",))
    one = NamedSharding(mesh, PartitionSpec())

    def shape(*sizes, dtype=jnp.int32):
        return jax.ShapeDtypeStruct(sizes, dtype, sharding=one)

    pages = abstract_kv_pages(
        PAGES,
        page_size=64,
        kv_heads=kv_heads,
        head_dim=head,
        dtype="bfloat16",
        sharding=KVPages(keys=one, values=one),
    )
    q = shape(tokens, heads, head, dtype=jnp.bfloat16)
    new = shape(tokens, kv_heads, head, dtype=jnp.bfloat16)
    rows = RaggedRows(*[shape(ROWS)] * 3, shape(ROWS, BLOCKS), shape())
    per_head = shape(heads, dtype=jnp.float32) if options else None

    def attend(q, k, v, pages, rows, sinks):
        given = {"window": None, "soft_cap": None, **options}
        return tpu.run(q, k, v, pages, rows, scale=0.1, sinks=sinks, alibi=sinks, **given)

    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        lowered = jax.jit(attend, donate_argnums=3).lower(q, new, new, pages, rows, per_head)
    return lowered.compile(), sum(p.size * p.dtype.itemsize for p in jax.tree.leaves(pages))


@pytest.mark.parametrize(
    ("topology", "tokens", "heads", "options"),
    [
        ("v5e:2x2", 8, (32, 8, 128), {}),
        ("tpu7x:2x2x1", 256, (7, 1, 128), OPTIONS),
        pytest.param("v6e:2x4", 2048, (32, 8, 128), {}, marks=pytest.mark.slow),
        pytest.param("v5p:4x4x4", 512, (8, 4, 256), OPTIONS, marks=pytest.mark.slow),
        pytest.param("v6e:2x4", 2048, (16, 16, 128), OPTIONS, marks=pytest.mark.slow),
    ],
)
def test_compiles_and_updates_pages_in_place(topology, tokens, heads, options):
    program, page_bytes = compiled(topology, tokens, *heads, options)
    memory = program.memory_analysis()
    assert memory.alias_size_in_bytes == page_bytes
    assert memory.temp_size_in_bytes < page_bytes
    assert "tpu_custom_call" in program.as_text()
