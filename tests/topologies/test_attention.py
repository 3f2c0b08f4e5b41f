"""The TPU kernels of attention compile for every generation, and copy no page."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxgen.plan import parse_topology
from pallas_kernels.latent_attention import latent_attention
from pallas_kernels.latent_pages import abstract_latent_pages
from pallas_kernels.pages import RaggedRows, abstract_kv_pages
from pallas_kernels.ragged_attention import ragged_attention
from pallas_kernels.ragged_attention.tpu_chip import table_too_large

ROWS, BLOCKS, PAGES = 8, 32, 8192
OPTIONS = {"window": 100, "soft_cap": 30.0}


def check_program(topology, step, pages, *arguments, rows=ROWS, blocks=BLOCKS):
    """One device's program of step(pages, rows, *arguments) is in place and copies no pages."""
    machine = parse_topology(topology)
    mesh = Mesh(np.array(machine.devices[:1]), ("x",))
    one = NamedSharding(mesh, PartitionSpec())
    ragged = RaggedRows(*[ints(rows)] * 3, ints(rows, blocks), ints())
    placed = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=one),
        (pages, ragged, *arguments),
    )
    with machine.compiling(), jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        program = jax.jit(step, donate_argnums=0).lower(*placed).compile()
    page_bytes = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(pages))
    memory, hlo = program.memory_analysis(), program.as_text()
    assert memory.alias_size_in_bytes == page_bytes
    given = sum(leaf.size * leaf.dtype.itemsize for leaf in arguments)
    # Items are padded to whole blocks, so that queries and outputs of many rows grow.
    assert memory.temp_size_in_bytes < max(page_bytes, 16 * given)
    assert "tpu_custom_call" in hlo
    assert not re.findall(rf"= \S+\[{PAGES},\S* copy(?:-start)?\(", hlo)


def ints(*shape):
    return jax.ShapeDtypeStruct(shape, jnp.int32)


def halves(*shape):
    return jax.ShapeDtypeStruct(shape, jnp.bfloat16)


@pytest.mark.parametrize(
    ("topology", "tokens", "heads", "options"),
    [
        ("v5e:2x2", 8, (32, 8, 64), {}),
        ("tpu7x:2x2x1", 256, (7, 1, 128), OPTIONS),
        pytest.param("v5e:2x2", 8, (32, 8, 128), {}, marks=pytest.mark.slow),
        pytest.param("v6e:2x4", 2048, (32, 8, 128), {}, marks=pytest.mark.slow),
        pytest.param("v5p:4x4x4", 512, (8, 4, 256), OPTIONS, marks=pytest.mark.slow),
        pytest.param("v6e:2x4", 2048, (16, 16, 128), OPTIONS, marks=pytest.mark.slow),
        pytest.param("v6e:2x4", 512, (64, 8, 64), OPTIONS, marks=pytest.mark.slow),
        pytest.param("v5p:4x4x4", 512, (32, 32, 80), {}, marks=pytest.mark.slow),
        pytest.param("v5e:2x2", 512, (71, 1, 64), {}, marks=pytest.mark.slow),
        pytest.param("v5e:2x2", 256, (32, 32, 96), {}, marks=pytest.mark.slow),
        pytest.param("tpu7x:2x2x1", 512, (16, 4, 192), OPTIONS, marks=pytest.mark.slow),
    ],
)
def test_ragged_attention_compiles_and_updates_pages_in_place(topology, tokens, heads, options):
    count, kv_heads, head = heads
    pages = abstract_kv_pages(
        PAGES,
        page_size=64,
        kv_heads=kv_heads,
        head_dim=head,
        dtype="bfloat16",
        platform="tpu",
    )

    def step(pages, rows, q, k, v, per_head):
        more = {**options, "sinks": per_head, "alibi": per_head} if options else {}
        return ragged_attention(q, k, v, pages, rows, scale=0.1, implementation="tpu", **more)

    new = halves(tokens, kv_heads, head)
    per_head = jax.ShapeDtypeStruct((count,), jnp.float32)
    check_program(topology, step, pages, halves(tokens, count, head), new, new, per_head)


@pytest.mark.parametrize(
    ("topology", "tokens", "heads"),
    [
        ("v5e:2x2", 8, 16),
        ("v6e:2x4", 256, 4),
        pytest.param("v5e:2x2", 2048, 16, marks=pytest.mark.slow),
        pytest.param("v6e:2x4", 2048, 128, marks=pytest.mark.slow),
        pytest.param("v5p:4x4x4", 8, 128, marks=pytest.mark.slow),
        pytest.param("v5p:4x4x4", 512, 16, marks=pytest.mark.slow),
        pytest.param("tpu7x:2x2x1", 8, 16, marks=pytest.mark.slow),
        pytest.param("tpu7x:2x2x1", 2048, 16, marks=pytest.mark.slow),
    ],
)
def test_latent_attention_compiles_and_updates_pages_in_place(topology, tokens, heads):
    check_latent(topology, tokens, heads)


@pytest.mark.parametrize(
    ("topology", "tokens", "rows", "blocks"),
    [
        ("v5e:2x2", 2048, 2048, 64),  # each row half as wide as scalar memory's
        pytest.param("v5e:2x2", 2048, 8, 16384, marks=pytest.mark.slow),
        pytest.param("v6e:2x4", 2048, 2048, 64, marks=pytest.mark.slow),
        pytest.param("v6e:2x4", 131072, 1024, 128, marks=pytest.mark.slow),
        pytest.param("v5p:4x4x4", 2, 2, 65536, marks=pytest.mark.slow),
        pytest.param("v5p:4x4x4", 4096, 2048, 64, marks=pytest.mark.slow),
        pytest.param("tpu7x:2x2x1", 2048, 2048, 64, marks=pytest.mark.slow),
    ],
)
def test_the_largest_tables_that_are_let_through_compile(topology, tokens, rows, blocks):
    """Of 512 KiB; the other half of scalar memory is for the work lists."""
    assert table_too_large(rows, blocks) is None
    assert table_too_large(rows + 1, blocks) is not None
    check_latent(topology, tokens, 16, rows=rows, blocks=blocks)


def check_latent(topology, tokens, heads, **sizes):
    pages = abstract_latent_pages(PAGES, page_size=64, width=576, dtype="bfloat16", platform="tpu")

    def step(pages, rows, q, new):
        options = {"latent": 512, "scale": 0.1, "implementation": "tpu"}
        return latent_attention(q, new, pages, rows, **options)

    shapes = halves(tokens, heads, 576), halves(tokens, 576)
    check_program(topology, step, pages, *shapes, **sizes)
