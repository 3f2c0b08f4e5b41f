"""The step: (weights, pages, batch) becomes (pages, tokens) in one program, on every shard alike.

One forward, two ends: logits for `put`, sampled tokens for generation. Everything runs inside one
shard_map over the mesh, so that every collective is written down where it happens.
"""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jax.stages import Wrapped
from jaxtyping import Array, Float, Int

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

_REPLICATED = PartitionSpec()

_SCORED_AT_ONCE = 128
"""Tokens of a prompt whose logits are computed together: 64 MB of them at 128k of vocabulary."""


def sampling_step(
    model: Model, bucket: Bucket, demand: Demand = Demand.ANY, *, eager: bool = False
) -> Wrapped:
    """Jitted (leaves, pages, sampler, packed) -> (pages, sampler, Sampled).

    pages and sampler are donated. packed: the int32 vector of `jaxgen.ragged.batch.pack`. demand:
    the most that any row of its batches asks of the sampler.
    """

    def local(
        leaves: tuple[Array, ...], pages: Pages, sampler: SamplerState, packed: Int[Array, " words"]
    ) -> tuple[Pages, SamplerState, Sampled]:
        batch = _unpack(model, bucket, packed)
        decoder = model.merge(leaves)
        hidden, pages = decoder(_fed(batch, sampler, bucket), pages, batch.rows, batch.anchors)
        logits = decoder.logits(hidden[batch.last_index])
        sampler, sampled = sample(logits, sampler, batch.slots, batch.emit, demand)
        return pages, sampler, sampled

    pages = page_specs(model)
    mapped = _on_mesh(
        model,
        local,
        in_specs=(model.leaf_specs, pages, _REPLICATED, _REPLICATED),
        out_specs=(pages, _REPLICATED, _REPLICATED),
        eager=eager,
    )
    return jax.jit(mapped, donate_argnums=(1, 2))


def scoring_step(
    model: Model, bucket: Bucket, demand: Demand = Demand.ANY, *, eager: bool = False
) -> Wrapped:
    """Jitted (leaves, pages, sampler, packed, targets) -> (pages, sampler, Sampled, TokenLogprobs).

    As `sampling_step`, and beside what it samples the log-probabilities of targets [tokens], the
    token that follows each one. Their logits are never there all at once.
    """

    def local(
        leaves: tuple[Array, ...],
        pages: Pages,
        sampler: SamplerState,
        packed: Int[Array, " words"],
        targets: Int[Array, " tokens"],
    ) -> tuple[Pages, SamplerState, Sampled, TokenLogprobs]:
        batch = _unpack(model, bucket, packed)
        decoder = model.merge(leaves)
        hidden, pages = decoder(_fed(batch, sampler, bucket), pages, batch.rows, batch.anchors)
        logits = decoder.logits(hidden[batch.last_index])
        sampler, sampled = sample(logits, sampler, batch.slots, batch.emit, demand)

        def score(block: tuple[Array, Array]) -> TokenLogprobs:
            states, following = block
            return token_logprobs(decoder.logits(states)[:, : model.config.vocab_size], following)

        size = math.gcd(bucket.tokens, _SCORED_AT_ONCE)
        blocks = (hidden.reshape(-1, size, hidden.shape[-1]), targets.reshape(-1, size))
        scores = jax.tree.map(
            lambda leaf: leaf.reshape(bucket.tokens, *leaf.shape[2:]), jax.lax.map(score, blocks)
        )
        return pages, sampler, sampled, scores

    pages = page_specs(model)
    mapped = _on_mesh(
        model,
        local,
        in_specs=(model.leaf_specs, pages, _REPLICATED, _REPLICATED, _REPLICATED),
        out_specs=(pages, _REPLICATED, _REPLICATED, _REPLICATED),
        eager=eager,
    )
    return jax.jit(mapped, donate_argnums=(1, 2))


def logits_step(model: Model, bucket: Bucket, *, all_logits: bool, eager: bool = False) -> Wrapped:
    """Jitted (leaves, pages, packed) -> (pages, float32 logits); pages are donated.

    Logits are [rows, vocab] of each row's last token, or [tokens, vocab] of every token.
    """

    def local(
        leaves: tuple[Array, ...], pages: Pages, packed: Int[Array, " words"]
    ) -> tuple[Pages, Float[Array, "out vocab"]]:
        batch = _unpack(model, bucket, packed)
        decoder = model.merge(leaves)
        hidden, pages = decoder(batch.token_ids, pages, batch.rows, batch.anchors)
        chosen = hidden if all_logits else hidden[batch.last_index]
        return pages, decoder.logits(chosen)[:, : model.config.vocab_size]

    return _jit_reading(model, local, eager)


def hidden_step(model: Model, bucket: Bucket, *, eager: bool = False) -> Wrapped:
    """Jitted (leaves, pages, packed) -> (pages, [layers + 1, tokens, model]); pages are donated.

    The embedding's output and each block's: what `jaxgen verify` compares to find the first layer
    that diverges.
    """

    def local(
        leaves: tuple[Array, ...], pages: Pages, packed: Int[Array, " words"]
    ) -> tuple[Pages, Float[Array, "states tokens model"]]:
        batch = _unpack(model, bucket, packed)
        states: list[Array] = []
        _, pages = model.merge(leaves)(
            batch.token_ids, pages, batch.rows, batch.anchors, watch=states
        )
        return pages, jnp.stack(states)

    return _jit_reading(model, local, eager)


def _fed(batch: StepBatch, sampler: SamplerState, bucket: Bucket) -> Int[Array, " tokens"]:
    """The batch's tokens; what only the device knows is what the row's slot sampled last."""
    last = sampler.last_token[batch.slots[batch.rows[0].token_places(bucket.tokens).row]]
    return jnp.where(batch.token_ids < 0, last, batch.token_ids)


def _jit_reading(model: Model, local: Callable[..., Any], eager: bool) -> Wrapped:
    pages = page_specs(model)
    mapped = _on_mesh(
        model,
        local,
        in_specs=(model.leaf_specs, pages, _REPLICATED),
        out_specs=(pages, _REPLICATED),
        eager=eager,
    )
    return jax.jit(mapped, donate_argnums=1)


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
    return unpack(packed, bucket, len(model.policy.cache_windows))
