"""Cases of attention over pages: of keys and values, and of latents (MLA)."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from jaxgen.bench.kernels.case import Case, Inputs
from jaxgen.bench.kernels.rows import shuffled_rows
from pallas_kernels.latent_attention import latent_attention
from pallas_kernels.latent_pages import latent_pages
from pallas_kernels.pages import kv_pages
from pallas_kernels.ragged_attention import ragged_attention

type Lengths = Sequence[tuple[int, int]]

_DTYPE = jnp.bfloat16


@dataclass(frozen=True, slots=True)
class Heads:
    """One layer's attention; page: tokens of one."""

    heads: int
    kv_heads: int
    dim: int
    page: int


@dataclass(frozen=True, slots=True)
class LatentHeads:
    """One layer's latent attention in its absorbed form."""

    heads: int
    latent: int
    width: int
    page: int
    scale: float


def attention_case(
    name: str, shape: Heads, lengths: Lengths, checked: Lengths, *, calls: int
) -> Case:
    """Writes keys and values of the step, then attends. lengths: (query, kv) of each row."""
    scale = shape.dim**-0.5

    def operation(given: Any, pages: Any, implementation: str | None) -> tuple[Any, Any]:  # noqa: ANN401
        q, k, v, rows = given
        return ragged_attention(q, k, v, pages, rows, scale=scale, implementation=implementation)

    def inputs(key: jax.Array, lengths: Lengths, calls: int) -> Inputs:
        rows, pages = shuffled_rows(lengths, shape.page)
        tokens = sum(query for query, _ in lengths)
        q, k, v, pool = jax.random.split(key, 4)
        given = (
            _normal(q, (tokens, shape.heads, shape.dim)),
            *(_normal(each, (tokens, shape.kv_heads, shape.dim)) for each in (k, v)),
            rows,
        )
        empty = kv_pages(
            pages,
            page_size=shape.page,
            kv_heads=shape.kv_heads,
            head_dim=shape.dim,
            dtype=_DTYPE,
        )
        return [given] * calls, _filled(pool, empty)

    pairs = sum(query * kv - query * (query - 1) / 2 for query, kv in lengths)
    return Case(
        "attention",
        name,
        operation,
        checked=lambda key: inputs(key, checked, 1),
        timed=lambda key: inputs(key, lengths, calls),
        bytes_read=sum(kv for _, kv in lengths) * shape.kv_heads * shape.dim * 2 * 2,
        flops=4 * shape.heads * shape.dim * pairs,
    )


def latent_case(
    name: str, shape: LatentHeads, lengths: Lengths, checked: Lengths, *, calls: int
) -> Case:
    """Writes the latents of the step, then attends. lengths: (query, kv) of each row."""

    def operation(given: Any, pages: Any, implementation: str | None) -> tuple[Any, Any]:  # noqa: ANN401
        q, new, rows = given
        return latent_attention(
            q, new, pages, rows,
            latent=shape.latent, scale=shape.scale, implementation=implementation,
        )  # fmt: skip

    def inputs(key: jax.Array, lengths: Lengths, calls: int) -> Inputs:
        rows, pages = shuffled_rows(lengths, shape.page)
        tokens = sum(query for query, _ in lengths)
        q, new, pool = jax.random.split(key, 3)
        given = _normal(q, (tokens, shape.heads, shape.width)), _normal(new, (tokens, shape.width))
        empty = latent_pages(pages, page_size=shape.page, width=shape.width, dtype=_DTYPE)
        return [(*given, rows)] * calls, _filled(pool, empty)

    pairs = sum(query * kv - query * (query - 1) / 2 for query, kv in lengths)
    return Case(
        "latent attention",
        name,
        operation,
        checked=lambda key: inputs(key, checked, 1),
        timed=lambda key: inputs(key, lengths, calls),
        bytes_read=sum(kv for _, kv in lengths) * shape.width * 2,
        flops=2 * shape.heads * (shape.width + shape.latent) * pairs,
    )


def _normal(key: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    return jax.random.normal(key, shape, _DTYPE)


def _filled[Pages](key: jax.Array, empty: Pages) -> Pages:
    leaves, tree = jax.tree.flatten(empty)
    keys = jax.random.split(key, len(leaves))
    return jax.tree.unflatten(
        tree, [_normal(k, leaf.shape) for k, leaf in zip(keys, leaves, strict=True)]
    )
