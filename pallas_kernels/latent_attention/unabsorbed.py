"""Latent attention from plain queries: absorbed where few of them meet a latent, else expanded.

Absorbed, a query meets a key of 576 channels and a value of 512. Expanded, a key of 192 and a value
of 128, but these must first be made of each latent, for every head. From about 170 query tokens
that meet the same latents on, that is less work: a third, for a prompt in one piece.
"""

import importlib
from functools import partial
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from pallas_kernels.dispatch import target_platform
from pallas_kernels.latent_attention.checks import LatentProblem
from pallas_kernels.latent_pages import LatentPages
from pallas_kernels.pages import KVPages, RaggedRows
from pallas_kernels.per_head import per_head

_HEAD_DIMS = (192, 256)  # of ragged attention, that a plain and a rotated key may come to
_LEAST = 160  # query tokens of a row that is expanded
_ROOM = 8192  # latents that can be expanded in a step of fewer tokens
_FEWEST = 1024  # tokens of a step for which expanding so many latents pays
_NO_OPTIONS: dict[str, Any] = {"window": None, "soft_cap": None, "sinks": None, "alibi": None}


def can_expand(
    q: Float[Array, "tokens heads key"], pages: LatentPages, rows: RaggedRows, *, latent: int
) -> bool:
    """Whether a step of this shape may hold long prompts, and kernels serve it either way."""
    tokens, heads, key = q.shape
    if target_platform() != "cuda" or tokens < _FEWEST or tokens <= rows.starts.shape[0]:
        return False
    problem = LatentProblem(
        tokens=tokens,
        rows=rows.starts.shape[0],
        blocks=rows.block_table.shape[1],
        heads=heads,
        latent=latent,
        width=pages.width,
        page_size=pages.page_size,
        dtype=jnp.dtype(q.dtype),
        page_dtype=jnp.dtype(pages.latents.dtype),
    )
    return key in _HEAD_DIMS and _kernels("latent_attention").unsupported(problem) is None


def _kernels(operation: str) -> ModuleType:
    # Imported on first use: the GPU side of Pallas takes most of a second to import.
    name = "gpu" if target_platform() == "cuda" else "portable"
    return importlib.import_module(f"pallas_kernels.{operation}.{name}")


def attend_unabsorbed(
    q: Float[Array, "tokens heads key"],
    new: Float[Array, "tokens width"],
    pages: LatentPages,
    rows: RaggedRows,
    up: Float[Array, "heads plain_and_value latent"],
    *,
    scale: float,
) -> tuple[Float[Array, "tokens heads value"], LatentPages]:
    """Write the step's tokens into the pages, then attend causally, as latent_attention does.

    For steps of which `can_expand` is true; it is right for all others, and slower.

    q: of each head its plain channels, then the rotated ones that meet the end of a latent. up: of
    each head what makes the plain channels of its key of a latent, then what makes its value.
    """
    pages = pages.write(new, rows)
    room = _room(q.shape[0], pages, rows)
    expands = _expands(rows, pages.page_size, room)
    # Both, whichever rows there are, each with zeros for the other's tokens: at a branch the host
    # would wait for the device in each layer, and what layers have in common compile in each.
    absorbed = _absorbed(q, pages, _only(rows, ~expands), up, scale=scale)
    expanded = _expanded(q, pages, _only(rows, expands), up, scale=scale, room=room)
    return absorbed + expanded, pages


def _room(tokens: int, pages: LatentPages, rows: RaggedRows) -> int:
    """Latents that can be expanded in one step, all of them whether there is use for them or not:
    whole prompts of the step's tokens.
    """
    table = rows.block_table.shape[0] * rows.block_table.shape[1] * pages.page_size
    return min(-(-max(tokens, _ROOM) // pages.page_size) * pages.page_size, table)


def _expands(rows: RaggedRows, page_size: int, room: int) -> Bool[Array, " rows"]:
    """Which rows are expanded: all that have enough query tokens, while there is room."""
    long = rows.live_lengths() >= _LEAST
    needed = jnp.where(long, -(-rows.kv_lengths // page_size) * page_size, 0)
    return long & (jnp.cumsum(needed) <= room)


def _only(rows: RaggedRows, chosen: Bool[Array, " rows"]) -> RaggedRows:
    """The rows with query tokens for the chosen ones alone."""
    return RaggedRows(
        starts=rows.starts,
        query_lengths=jnp.where(chosen, rows.live_lengths(), 0),
        kv_lengths=rows.kv_lengths - jnp.where(chosen, 0, rows.live_lengths()),
        block_table=rows.block_table,
        num_rows=rows.num_rows,
    )


# Jitted, as is the other, so that the layers of a model share one trace.
@partial(jax.jit, static_argnames=("scale",))
def _absorbed(
    q: Float[Array, "tokens heads key"],
    pages: LatentPages,
    rows: RaggedRows,
    up: Float[Array, "heads plain_and_value latent"],
    *,
    scale: float,
) -> Float[Array, "tokens heads value"]:
    plain = q.shape[2] - (pages.width - up.shape[2])
    wide = per_head("thn,hnl->thl", q[..., :plain], up[:, :plain])
    wide = jnp.concatenate([wide, q[..., plain:]], axis=-1)
    out = _kernels("latent_attention").attend(wide, pages, rows, latent=up.shape[2], scale=scale)
    return per_head("thl,hvl->thv", out, up[:, plain:])


@partial(jax.jit, static_argnames=("scale", "room"))
def _expanded(
    q: Float[Array, "tokens heads key"],
    pages: LatentPages,
    rows: RaggedRows,
    up: Float[Array, "heads plain_and_value latent"],
    *,
    scale: float,
    room: int,
) -> Float[Array, "tokens heads value"]:
    latent, page, key = up.shape[2], pages.page_size, q.shape[2]
    plain = key - (pages.width - latent)
    value = up.shape[1] - plain
    blocks = jnp.where(rows.query_lengths > 0, -(-rows.kv_lengths // page), 0)
    ends = jnp.cumsum(blocks)
    place = jnp.arange(room // page, dtype=jnp.int32)
    row = (place[:, None] >= ends).sum(axis=1, dtype=jnp.int32)
    row = jnp.minimum(row, blocks.shape[0] - 1)
    source = rows.block_table.at[row, place - (ends - blocks)[row]].get(mode="clip")
    latents = pages.latents.at[source].get(mode="clip")
    made = per_head("psl,hol->phso", latents[..., :latent], up)
    rotated = latents[:, None, :, latent:]
    rotated = jnp.broadcast_to(rotated, (*made.shape[:3], pages.width - latent))
    # Values as wide as keys: ragged attention knows one width.
    there = KVPages(
        keys=jnp.concatenate([made[..., :plain], rotated], axis=-1),
        values=jnp.pad(made[..., plain:], ((0, 0),) * 3 + ((0, key - value),)),
    )
    table = (ends - blocks)[:, None] + jnp.arange(rows.block_table.shape[1], dtype=jnp.int32)
    found = RaggedRows(
        starts=rows.starts,
        query_lengths=rows.query_lengths,
        kv_lengths=rows.kv_lengths,
        block_table=table,
        num_rows=rows.num_rows,
    )
    ragged_attention, options = _kernels("ragged_attention"), dict(_NO_OPTIONS)
    if target_platform() == "cuda":
        options["plans"] = ragged_attention.long_rows_plans(key)
    return ragged_attention.attend(q, there, found, scale=scale, **options)[..., :value]
