"""One token per row, in the jitted step: bias, penalties, mask, temperature, cuts, draw.

What a batch does not use costs one predicate. A row's draw depends on its logits, its seed and how
many tokens it has generated: not on batch mates, slot, padding of the vocabulary, or a preemption.
(Where top-p falls between two tokens to the last bit, the number of rows may round it either way.)
"""

import dataclasses
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jaxgen.sampling.branch import when
from jaxgen.sampling.demand import COMPILED_APART, Demand
from jaxgen.sampling.gumbel_max import draw, largest_of
from jaxgen.sampling.logprobs import wanted_logprobs
from jaxgen.sampling.masks import keep_allowed
from jaxgen.sampling.state import MOST_COUNTED, SamplerState, SlotSettings, TokenBias
from jaxgen.sampling.truncate import keep_min_p, keep_top_k, keep_top_p


@jax.tree_util.register_dataclass
@dataclass(frozen=True, slots=True)
class Sampled:
    """What each row drew; rows that do not emit hold values of no meaning.

    Logprobs are of the raw distribution, zeros unless some row asked for them. `bad` marks rows
    whose logits were not finite: their token means nothing and the request must end with an error.
    """

    tokens: Int[Array, " rows"]
    logprobs: Float[Array, " rows"]
    top_ids: Int[Array, "rows top"]
    top_logprobs: Float[Array, "rows top"]
    bad: Bool[Array, " rows"]


@dataclass(frozen=True, slots=True)
class _Needs:
    """Which parts of sampling some row needs; None: to be seen on the device."""

    draw: bool | None = None
    cut: bool | None = None
    adjust: bool | None = None
    report: bool | None = None

    @classmethod
    def of(cls, demand: Demand) -> "_Needs":
        if demand is Demand.ANY:
            return cls()
        includes = COMPILED_APART[: COMPILED_APART.index(demand) + 1]
        return cls(*(each in includes for each in COMPILED_APART[1:]))


def sample(
    logits: Float[Array, "rows padded_vocab"],
    state: SamplerState,
    slots: Int[Array, " rows"],
    emit: Bool[Array, " rows"],
    demand: Demand = Demand.ANY,
) -> tuple[SamplerState, Sampled]:
    """Draw a token for every row that emits and remember it in the row's slot.

    demand (static): the most that any emitting row asks for; ANY looks at the rows by branches.

    `logits` are float32; ids beyond the state's vocabulary are never drawn. `slots` of rows that do
    not emit may be anything; the slots of rows that emit must differ.
    """
    num_slots, vocab = state.prompt_mask.shape
    raw = logits[:, :vocab]
    places = jnp.where(emit, slots, 0)
    asked = jax.tree.map(lambda leaf: leaf[places], state.settings)
    generated = state.generated[places]

    needs = _Needs.of(demand)
    adjusted = _biased(raw, asked.bias, generated, emit, needs.adjust)
    adjusted = _penalised(adjusted, state, asked, places, emit, needs.adjust)
    masked = emit & (asked.masked == 1)
    adjusted = keep_allowed(adjusted, state.masks[places], masked, needs.adjust)
    tokens = _drawn(adjusted, asked, generated, emit, needs)
    reported = wanted_logprobs(raw, tokens, emit & (asked.num_logprobs >= 0), needs.report)

    finite = jnp.isfinite(jnp.max(adjusted, axis=-1)) & ~jnp.any(jnp.isnan(raw), axis=-1)
    target = jnp.where(emit, slots, num_slots)
    counted = jnp.minimum(state.output_counts[places, tokens], MOST_COUNTED - 1) + jnp.int16(1)
    state = dataclasses.replace(
        state,
        generated=state.generated.at[target].set(generated + 1, mode="drop"),
        last_token=state.last_token.at[target].set(tokens, mode="drop"),
        output_counts=state.output_counts.at[target, tokens].set(counted, mode="drop"),
    )
    return state, Sampled(
        tokens, reported.chosen, reported.top_ids, reported.top_logprobs, emit & ~finite
    )


def _biased(
    logits: Float[Array, "rows vocab"],
    bias: TokenBias,
    generated: Int[Array, " rows"],
    emit: Bool[Array, " rows"],
    known: bool | None,
) -> Float[Array, "rows vocab"]:
    """Add what still holds of each row's list; where only listed ids may come, forbid the rest."""
    active = bias.until > generated[:, None]
    rows = jnp.arange(logits.shape[0])[:, None]

    def add() -> Float[Array, "rows vocab"]:
        added = logits.at[rows, bias.ids].add(jnp.where(active, bias.values, 0.0))
        listed = jnp.zeros(logits.shape, jnp.bool_).at[rows, bias.ids].max(active)
        return jnp.where((bias.only_listed[:, None] == 1) & ~listed, -jnp.inf, added)

    return when(known, jnp.any(active & emit[:, None]), add, lambda: logits)


def _penalised(
    logits: Float[Array, "rows vocab"],
    state: SamplerState,
    asked: SlotSettings,
    places: Int[Array, " rows"],
    emit: Bool[Array, " rows"],
    known: bool | None,
) -> Float[Array, "rows vocab"]:
    """Repetition over prompt and output, then frequency and presence over the output alone."""
    repetition, frequency, presence = (
        asked.repetition_penalty,
        asked.frequency_penalty,
        asked.presence_penalty,
    )
    used = emit & ((repetition != 1.0) | (frequency != 0.0) | (presence != 0.0))

    def penalise() -> Float[Array, "rows vocab"]:
        counts = jnp.where(used[:, None], state.output_counts[places], 0).astype(jnp.float32)
        seen = (state.prompt_mask[places] & used[:, None]) | (counts > 0)
        factor = repetition[:, None]
        lowered = jnp.where(logits > 0, logits / factor, logits * factor)
        repeated = jnp.where(seen, lowered, logits)
        return repeated - frequency[:, None] * counts - presence[:, None] * (counts > 0)

    return when(known, jnp.any(used), penalise, lambda: logits)


def _drawn(
    logits: Float[Array, "rows vocab"],
    asked: SlotSettings,
    generated: Int[Array, " rows"],
    emit: Bool[Array, " rows"],
    needs: _Needs,
) -> Int[Array, " rows"]:
    """The largest logit in greedy rows (the lowest id of equal ones), a random draw elsewhere."""
    best = largest_of(logits)
    random = emit & (asked.temperature > 0.0)

    def drawn() -> Int[Array, " rows"]:
        tempered = logits / jnp.where(random, asked.temperature, 1.0)[:, None]
        likely = keep_min_p(tempered, asked.min_p)
        k = jnp.where(random, asked.top_k, 0)
        first = when(needs.cut, jnp.any(k > 0), lambda: keep_top_k(likely, k), lambda: likely)
        p = jnp.where(random, asked.top_p, 1.0)
        kept = when(needs.cut, jnp.any(p < 1.0), lambda: keep_top_p(first, p), lambda: first)
        return jnp.where(random, draw(kept, asked.seed, generated), best)

    return when(needs.draw, jnp.any(random), drawn, lambda: best)
