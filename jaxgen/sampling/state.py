"""The sampler's memory on the device: one row per slot, written at admission, donated by each step.

A request's settings travel as one packed vector, so that admission costs one small transfer; the
token history follows only where a penalty reads it.
"""

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import ArrayLike, DTypeLike
from jaxtyping import Array, Bool, Float, Int, UInt

from jaxgen.sampling.invalid import InvalidParameter
from jaxgen.sampling.params import MAX_BIASED_IDS, SamplingParams

ALWAYS = 2**31 - 1
MOST_COUNTED = 2**15 - 1


@jax.tree_util.register_dataclass
@dataclass(frozen=True, slots=True)
class TokenBias:
    """Per slot a short list of token ids, and what is added to their logits.

    An entry holds while fewer than `until` tokens are generated; unused entries have 0. Where
    `only_listed` is 1, every id that is not in the list is forbidden.
    """

    ids: Int[Array, "slots biased"]
    values: Float[Array, "slots biased"]
    until: Int[Array, "slots biased"]
    only_listed: Int[Array, " slots"]


@jax.tree_util.register_dataclass
@dataclass(frozen=True, slots=True)
class SlotSettings:
    """What the request in each slot asked for.

    `temperature` 0 is greedy, `top_k` 0 is off, `num_logprobs` -1 is none. `masked` 1: only what
    the slot's mask allows is drawn.
    """

    temperature: Float[Array, " slots"]
    top_k: Int[Array, " slots"]
    top_p: Float[Array, " slots"]
    min_p: Float[Array, " slots"]
    presence_penalty: Float[Array, " slots"]
    frequency_penalty: Float[Array, " slots"]
    repetition_penalty: Float[Array, " slots"]
    seed: UInt[Array, "slots 2"]
    num_logprobs: Int[Array, " slots"]
    masked: Int[Array, " slots"]
    bias: TokenBias


@jax.tree_util.register_dataclass
@dataclass(frozen=True, slots=True)
class SamplerState:
    """Settings and history of every slot. `output_counts` is int16 and stops at 32767.

    `masks`: bit i % 32 of word i // 32 says whether token i may come next, where a slot is masked.
    """

    settings: SlotSettings
    generated: Int[Array, " slots"]
    last_token: Int[Array, " slots"]
    prompt_mask: Bool[Array, "slots vocab"]
    output_counts: Int[Array, "slots vocab"]
    masks: UInt[Array, "slots words"]


@dataclass(frozen=True, slots=True)
class SlotRow:
    """One request as `admit` writes it: packed settings (int32) and, if penalised, its history.

    The history is the prompt's ids as packed bits (uint8) and the output's counts (int16).
    """

    packed: np.ndarray
    history: tuple[np.ndarray, np.ndarray] | None


def init(slots: int, vocab: int, sharding: jax.sharding.Sharding | None = None) -> SamplerState:
    """A state with nothing admitted. `vocab` is the true vocabulary, without padding."""

    def leaf(dtype: DTypeLike, *more: int) -> Array:
        return jnp.zeros((slots, *more), dtype, device=sharding)

    bias = TokenBias(
        ids=leaf(jnp.int32, MAX_BIASED_IDS),
        values=leaf(jnp.float32, MAX_BIASED_IDS),
        until=leaf(jnp.int32, MAX_BIASED_IDS),
        only_listed=leaf(jnp.int32),
    )
    settings = SlotSettings(
        temperature=leaf(jnp.float32),
        top_k=leaf(jnp.int32),
        top_p=leaf(jnp.float32),
        min_p=leaf(jnp.float32),
        presence_penalty=leaf(jnp.float32),
        frequency_penalty=leaf(jnp.float32),
        repetition_penalty=leaf(jnp.float32),
        seed=leaf(jnp.uint32, 2),
        num_logprobs=leaf(jnp.int32),
        masked=leaf(jnp.int32),
        bias=bias,
    )
    return SamplerState(
        settings=settings,
        generated=leaf(jnp.int32),
        last_token=leaf(jnp.int32),
        prompt_mask=leaf(jnp.bool_, vocab),
        output_counts=leaf(jnp.int16, vocab),
        masks=leaf(jnp.uint32, -(-vocab // 32)),
    )


def abstract_state(
    slots: int, vocab: int, sharding: jax.sharding.Sharding | None = None
) -> SamplerState:
    """The jax.ShapeDtypeStructs of `init(slots, vocab, sharding)`, for compiling ahead of time."""
    return jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding),
        jax.eval_shape(lambda: init(slots, vocab)),
    )


def slot_row(
    params: SamplingParams,
    *,
    vocab_size: int,
    seed: int,
    eos_ids: Sequence[int] = (),
    prompt_ids: Sequence[int] = (),
    output_ids: Sequence[int] = (),
) -> SlotRow:
    """What `admit` writes for a request whose prompt and output so far are given.

    `seed` is used as it is: the caller chooses one where params.seed is None, and varies it over n.
    A preempted request comes back with its `output_ids` and goes on exactly where it was.
    """
    params.validate(vocab_size)
    settings: dict[str, ArrayLike] = {
        "temperature": np.float32(params.temperature),
        "top_k": np.int32(params.top_k),
        "top_p": np.float32(params.top_p),
        "min_p": np.float32(params.min_p),
        "presence_penalty": np.float32(params.presence_penalty),
        "frequency_penalty": np.float32(params.frequency_penalty),
        "repetition_penalty": np.float32(params.repetition_penalty),
        "seed": np.array([(seed >> 32) & 0xFFFFFFFF, seed & 0xFFFFFFFF], np.uint32),
        "num_logprobs": np.int32(-1 if params.logprobs is None else params.logprobs),
        "masked": np.int32(params.masked),
    }
    settings |= _token_bias(params, eos_ids, vocab_size)
    order = [entry.name for entry in (*fields(SlotSettings)[:-1], *fields(TokenBias))]
    words = [np.atleast_1d(settings[name]).view(np.int32) for name in order]
    packed = np.concatenate([*words, np.array([len(output_ids)], np.int32)])
    if not params.penalised:
        return SlotRow(packed, None)
    seen = np.zeros(vocab_size, np.bool_)
    seen[np.asarray(prompt_ids, np.int64)] = True
    counts = np.bincount(np.asarray(output_ids, np.int64), minlength=vocab_size)
    return SlotRow(packed, (np.packbits(seen), counts.clip(max=MOST_COUNTED).astype(np.int16)))


def admit(state: SamplerState, slot: int, row: SlotRow) -> SamplerState:
    """Write `row` into `slot`; `state` is donated. Plain and penalised rows compile once each."""
    if not 0 <= slot < state.generated.shape[0]:
        raise IndexError(f"slot {slot} is outside the sampler's {state.generated.shape[0]} slots")
    return _admission(state.generated.sharding)(state, np.int32(slot), row.packed, row.history)


@functools.cache
def _admission(sharding: jax.sharding.Sharding) -> Callable[..., SamplerState]:
    return jax.jit(_admit, donate_argnums=0, out_shardings=sharding)


def _admit(
    state: SamplerState,
    slot: Int[Array, ""],
    packed: Int[Array, " words"],
    history: tuple[UInt[Array, " bytes"], Int[Array, " vocab"]] | None,
) -> SamplerState:
    leaves, tree = jax.tree.flatten(state.settings)
    written, start = [], 0
    for leaf in leaves:
        size = math.prod(leaf.shape[1:])
        words = packed[start : start + size].reshape(leaf.shape[1:])
        written.append(leaf.at[slot].set(lax.bitcast_convert_type(words, leaf.dtype)))
        start += size
    prompt_mask, output_counts = state.prompt_mask, state.output_counts
    if history is not None:
        bits, counts = history
        seen = jnp.unpackbits(bits, count=prompt_mask.shape[1]).astype(jnp.bool_)
        prompt_mask = prompt_mask.at[slot].set(seen)
        output_counts = output_counts.at[slot].set(counts)
    return replace(
        state,
        settings=jax.tree.unflatten(tree, written),
        generated=state.generated.at[slot].set(packed[start]),
        prompt_mask=prompt_mask,
        output_counts=output_counts,
    )


def _token_bias(
    params: SamplingParams, eos_ids: Sequence[int], vocab_size: int
) -> dict[str, ArrayLike]:
    """The TokenBias of one slot, by field name."""
    entries = [(token, bias, ALWAYS) for token, bias in params.logit_bias.items()]
    if params.min_tokens:
        held_back = dict.fromkeys(params.stop_token_ids)
        held_back |= {} if params.ignore_eos else dict.fromkeys(eos_ids)
        within = [token for token in held_back if 0 <= token < vocab_size]
        entries += [(token, -np.inf, params.min_tokens) for token in within]
    listed = params.allowed_token_ids is not None and not params.many_allowed
    if params.allowed_token_ids is not None and listed:
        allowed = set(params.allowed_token_ids)
        entries = [entry for entry in entries if entry[0] in allowed]
        if allowed <= {token for token, _, until in entries if until != ALWAYS}:
            message = "leaves nothing to sample before min_tokens: all of them end the request"
            raise InvalidParameter("allowed_token_ids", message)
        entries += [(token, 0.0, ALWAYS) for token in params.allowed_token_ids]
    if len(entries) > MAX_BIASED_IDS:
        message = (
            f"with allowed_token_ids and min_tokens' end tokens makes {len(entries)} entries; "
            f"at most {MAX_BIASED_IDS} fit"
        )
        raise InvalidParameter("logit_bias", message)
    ids, until = np.zeros((2, MAX_BIASED_IDS), np.int32)
    values = np.zeros(MAX_BIASED_IDS, np.float32)
    for place, entry in enumerate(entries):
        ids[place], values[place], until[place] = entry
    only_listed = np.int32(listed)
    return {"ids": ids, "values": values, "until": until, "only_listed": only_listed}
