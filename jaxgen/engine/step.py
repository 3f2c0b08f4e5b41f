"""The step, two programs on every shard alike: (weights, pages, batch) becomes (pages, logits), and
(sampler, logits) becomes (sampler, tokens).

The first is compiled once for each bucket, with its attention kernels; the second once for each
number of rows and each demand, which takes no time. Everything runs inside one shard_map over the
mesh, so that every collective is written down where it happens.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jax.stages import Wrapped
from jaxtyping import Array, Bool, Float, Int

from jaxgen.engine.compiler_options import compiler_options
from jaxgen.engine.eager import on_one_device
from jaxgen.engine.model import Model
from jaxgen.engine.pages import Pages, page_specs
from jaxgen.ragged.batch import StepBatch, unpack
from jaxgen.ragged.buckets import Bucket
from jaxgen.sampling import (
    Demand,
    Sampled,
    SamplerState,
    TokenLogprobs,
    sample,
    token_logprobs,
)
from jaxgen_models.decoder import Decoder

_REPLICATED = PartitionSpec()

_SCORED_AT_ONCE = 128
"""Tokens of a prompt whose logits are computed together: 64 MB of them at 128k of vocabulary."""

_NEVER = -(2**31)
"""No part of a batch holds it."""

_DONATED = (1, 2)
"""Which arguments of a forward are donated: pages and spent logits."""

type Logits = Float[Array, "rows padded_vocab"]
type Tokens = Int[Array, " slots"]
"""What each slot sampled last: the batch's tokens that the host does not know yet."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True, slots=True)
class Drawing:
    """What a forward hands to the draw. Columns past the vocabulary are the mesh's padding."""

    logits: Float[Array, "rows padded_vocab"]
    slots: Int[Array, " rows"]
    emit: Bool[Array, " rows"]


def forward_step(model: Model, bucket: Bucket, *, eager: bool = False) -> Wrapped:
    """Jitted (leaves, pages, spent, last tokens, packed) -> (pages, Drawing).

    packed: the int32 vector of `jaxgen.ragged.batch.pack`. Donated are the pages, and spent, logits
    of an earlier step of as many rows, whose memory this step's take: command buffers are
    recorded with addresses, and most of a step's are within or beside that memory.
    """

    def local(
        leaves: tuple[Array, ...],
        pages: Pages,
        _spent: Logits,
        last: Tokens,
        packed: Int[Array, " words"],
    ) -> tuple[Pages, Drawing]:
        decoder, batch, hidden, pages = _run(model, bucket, leaves, pages, last, packed)
        return pages, _drawing(decoder, batch, hidden)

    return _jit_on_pages(model, local, outputs=1, eager=eager)


def scoring_step(model: Model, bucket: Bucket, *, eager: bool = False) -> Wrapped:
    """Jitted (leaves, pages, spent, last, packed, targets) -> (pages, Drawing, TokenLogprobs).

    As `forward_step`, and the log-probabilities of targets [tokens], the token that follows each
    one. Their logits are never there all at once.
    """

    def local(
        leaves: tuple[Array, ...],
        pages: Pages,
        _spent: Logits,
        last: Tokens,
        packed: Int[Array, " words"],
        targets: Int[Array, " tokens"],
    ) -> tuple[Pages, Drawing, TokenLogprobs]:
        decoder, batch, hidden, pages = _run(model, bucket, leaves, pages, last, packed)

        def score(block: tuple[Array, Array]) -> TokenLogprobs:
            states, following = block
            return token_logprobs(decoder.logits(states)[:, : model.config.vocab_size], following)

        size = math.gcd(bucket.tokens, _SCORED_AT_ONCE)
        blocks = (hidden.reshape(-1, size, hidden.shape[-1]), targets.reshape(-1, size))
        scores = jax.tree.map(
            lambda leaf: leaf.reshape(bucket.tokens, *leaf.shape[2:]), jax.lax.map(score, blocks)
        )
        return pages, _drawing(decoder, batch, hidden), scores

    return _jit_on_pages(model, local, inputs=4, outputs=2, eager=eager)


def all_logits_step(model: Model, bucket: Bucket, *, eager: bool = False) -> Wrapped:
    """Jitted (leaves, pages, (), last tokens, packed) -> (pages, logits [tokens, padded vocab]).

    Pages are donated. Logits are float32.
    """

    def local(
        leaves: tuple[Array, ...],
        pages: Pages,
        _nothing: tuple[()],
        last: Tokens,
        packed: Int[Array, " words"],
    ) -> tuple[Pages, Float[Array, "tokens padded_vocab"]]:
        decoder, _, hidden, pages = _run(model, bucket, leaves, pages, last, packed)
        return pages, decoder.logits(hidden)

    return _jit_on_pages(model, local, outputs=1, eager=eager)


def hidden_step(model: Model, bucket: Bucket, *, eager: bool = False) -> Wrapped:
    """Jitted (leaves, pages, (), last tokens, packed) -> (pages, [layers + 1, tokens, model]).

    The embedding's output and each block's: what `jaxgen verify` compares to find the first layer
    that diverges. Pages are donated.
    """

    def local(
        leaves: tuple[Array, ...],
        pages: Pages,
        _nothing: tuple[()],
        last: Tokens,
        packed: Int[Array, " words"],
    ) -> tuple[Pages, Float[Array, "states tokens model"]]:
        batch = _unpack(model, bucket, packed)
        states: list[Array] = []
        fed = _fed(batch, last, bucket)
        _, pages = model.merge(leaves)(fed, pages, batch.rows, batch.anchors, watch=states)
        return pages, jnp.stack(states)

    return _jit_on_pages(model, local, outputs=1, eager=eager)


def draw_step(model: Model, demand: Demand, *, eager: bool = False) -> Wrapped:
    """Jitted (sampler, Drawing) -> (sampler, Sampled); the sampler's state is donated.

    demand: the most that any row asks of it.
    """

    def local(sampler: SamplerState, drawing: Drawing) -> tuple[SamplerState, Sampled]:
        return sample(drawing.logits, sampler, drawing.slots, drawing.emit, demand)

    mapped = _on_mesh(
        model,
        local,
        in_specs=(_REPLICATED, _REPLICATED),
        out_specs=(_REPLICATED, _REPLICATED),
        eager=eager,
    )
    return jax.jit(mapped, donate_argnums=0, compiler_options=compiler_options(model.mesh))


def _run(
    model: Model,
    bucket: Bucket,
    leaves: tuple[Array, ...],
    pages: Pages,
    last: Tokens,
    packed: Int[Array, " words"],
) -> tuple[Decoder, StepBatch, Float[Array, "tokens model"], Pages]:
    """The decoder, the batch, the tokens' states behind the final norm, and the pages."""
    batch = _unpack(model, bucket, packed)
    decoder = model.merge(leaves)
    hidden, pages = decoder(_fed(batch, last, bucket), pages, batch.rows, batch.anchors)
    return decoder, batch, hidden, pages


def _drawing(decoder: Decoder, batch: StepBatch, hidden: Float[Array, "tokens model"]) -> Drawing:
    return Drawing(decoder.logits(hidden[batch.last_index]), batch.slots, batch.emit)


def _fed(batch: StepBatch, last: Tokens, bucket: Bucket) -> Int[Array, " tokens"]:
    """The batch's tokens; what only the device knows is what the row's slot sampled last."""
    known = last[batch.slots[batch.rows[0].token_places(bucket.tokens).row]]
    return jnp.where(batch.token_ids < 0, known, batch.token_ids)


def _jit_on_pages(
    model: Model, local: Callable[..., Any], *, outputs: int, eager: bool, inputs: int = 3
) -> Wrapped:
    """Pages and spent logits are donated. inputs: beside leaves and pages; outputs likewise."""
    pages = page_specs(model)
    mapped = _on_mesh(
        model,
        local,
        in_specs=(model.leaf_specs, pages, *[_REPLICATED] * inputs),
        out_specs=(pages, *[_REPLICATED] * outputs),
        eager=eager,
    )
    return jax.jit(
        mapped,
        donate_argnums=_DONATED,
        keep_unused=True,  # spent logits are only memory
        compiler_options=compiler_options(model.mesh),
    )


def _on_mesh(
    model: Model,
    local: Callable[..., Any],
    *,
    in_specs: tuple[Any, ...],
    out_specs: tuple[Any, ...],
    eager: bool,
) -> Callable[..., Any]:
    """`local` over the mesh's shards; eager: where only `jax.disable_jit` will see it."""
    if eager:
        return on_one_device(local, model.mesh.axis_names)
    return jax.shard_map(
        local, mesh=model.mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False
    )


def _unpack(model: Model, bucket: Bucket, packed: Int[Array, " words"]) -> StepBatch:
    """The batch, in the step's own memory.

    The packed vector is somewhere else in each step, and whatever a command buffer reads there has
    to be recorded again: for a kernel of Pallas or a product that takes the host 30 us.
    """
    batch = unpack(packed, bucket, len(model.policy.cache_windows))
    return jax.tree.map(_owned, batch)


def _owned(part: Array) -> Array:
    """A copy that XLA does not see through."""
    return part if part.dtype == bool else jnp.where(part == _NEVER, 0, part)
