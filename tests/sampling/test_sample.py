"""What is drawn: the exact distribution in vLLM's order, in any batch and after preemption."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxgen.sampling import (
    COMPILED_APART,
    Demand,
    InvalidParameter,
    SamplingParams,
    admit,
    demand_of,
    init,
    largest,
    sample,
    slot_row,
)

VOCAB = 24
PADDING = 8
SLOTS = 4
DRAWS = 8192
step = jax.jit(sample)


def softmax(logits):
    weights = np.exp(logits - logits.max())
    return weights / weights.sum()


def expected(logits, params, prompt, output):
    """The distribution that the parameters mean, the simple way, in float64."""
    logits = np.array(logits, np.float64)
    for token, bias in params.logit_bias.items():
        logits[token] += bias
    for token in set(prompt) | set(output):
        positive = logits[token] > 0
        factor = 1 / params.repetition_penalty if positive else params.repetition_penalty
        logits[token] *= factor
    for token in set(output):
        logits[token] -= params.frequency_penalty * output.count(token) + params.presence_penalty
    logits /= params.temperature
    chances = softmax(logits)
    logits[chances < params.min_p * chances.max()] = -np.inf
    if params.top_k:
        logits[logits < np.sort(logits)[-params.top_k :][0]] = -np.inf
    chances = softmax(logits)
    best_first = np.argsort(-chances, kind="stable")
    before = np.cumsum(chances[best_first]) - chances[best_first]
    logits[best_first[before >= params.top_p]] = -np.inf
    return softmax(logits)


def admitted(*requests):
    """A state whose slot i holds the i-th (params, seed, prompt, output)."""
    state = init(SLOTS, VOCAB)
    for slot, (params, seed, prompt, output) in enumerate(requests):
        row = slot_row(
            params, vocab_size=VOCAB, seed=seed, prompt_ids=prompt, output_ids=output, eos_ids=[2]
        )
        state = admit(state, slot, row)
    return state


def draw(logits, state, slots, emit=None, padding=PADDING):
    """One step whose further rows are padding: NaN, not emitting, in a slot that does not exist."""
    logits, used = np.asarray(logits, np.float32), len(slots)
    rows = max(used, SLOTS)
    padded = np.full((rows, VOCAB + padding), np.inf, np.float32)
    padded[:used, :VOCAB], padded[used:] = logits, np.nan
    places, emits = np.full(rows, -1, np.int32), np.zeros(rows, bool)
    places[:used], emits[:used] = slots, True if emit is None else emit
    state, drawn = step(padded, state, places, emits)
    assert not drawn.bad[used:].any()
    return state, jax.tree.map(lambda leaf: np.asarray(leaf)[:used], drawn)


CASES = {
    "plain": {},
    "hot": {"temperature": 1.7},
    "top_k": {"top_k": 5, "temperature": 1.5},
    "top_p": {"top_p": 0.7},
    "min_p": {"min_p": 0.08},
    "bias": {"logit_bias": {3: 2.5, 4: -100.0}},
    "repetition": {"repetition_penalty": 1.8},
    "presence_frequency": {"presence_penalty": 0.7, "frequency_penalty": -0.4},
    "everything": {
        "temperature": 1.4,
        "top_k": 9,
        "top_p": 0.9,
        "min_p": 0.02,
        "repetition_penalty": 1.3,
        "presence_penalty": -0.5,
        "frequency_penalty": 0.6,
        "logit_bias": {1: 1.5, 20: -1.0},
    },
}


@pytest.mark.parametrize("case", CASES)
def test_distribution(case):
    params = SamplingParams(**CASES[case])
    prompt, output = [1, 5, 5, 7], [3, 7, 7, 7, 11]
    logits = np.random.default_rng(8).normal(0, 1.5, VOCAB).astype(np.float32)
    one = admitted((params, 0, prompt, output))
    state = jax.tree.map(lambda leaf: jnp.repeat(leaf[:1], DRAWS, axis=0), one)
    seeds = np.stack([np.zeros(DRAWS), np.arange(DRAWS)], axis=1).astype(np.uint32)
    state = dataclasses.replace(
        state, settings=dataclasses.replace(state.settings, seed=jnp.asarray(seeds))
    )

    _, drawn = draw(np.tile(logits, (DRAWS, 1)), state, np.arange(DRAWS))

    chances = expected(logits, params, prompt, output)
    counts = np.bincount(drawn.tokens, minlength=VOCAB)
    assert not counts[chances == 0].any()
    assert counts[chances > 2e-3].all()
    spread = np.sqrt(chances * (1 - chances) / DRAWS)
    assert np.all(np.abs(counts / DRAWS - chances) <= 4 * spread + 1e-9)


def test_batch_mates_slots_and_padding_change_nothing():
    rng = np.random.default_rng(3)
    mine, other = rng.normal(0, 1, (2, VOCAB))
    request = (SamplingParams(top_p=0.95, temperature=1.2), 77, [1], [])
    strangers = (SamplingParams(temperature=0), 0, [1], []), (SamplingParams(top_k=3), 77, [1], [])

    alone = admitted(request)
    crowded = admitted(*strangers, request)
    for _ in range(12):
        alone, first = draw([mine], alone, [0], padding=0)
        crowded, second = draw([other, mine, other], crowded, [0, 2, 1])
        assert first.tokens[0] == second.tokens[1]


def test_a_preempted_request_goes_on_where_it_was():
    params = SamplingParams(
        temperature=1.3, repetition_penalty=1.2, frequency_penalty=0.5, min_tokens=9, max_tokens=20
    )
    logits = np.random.default_rng(5).normal(0, 1, (20, 1, VOCAB))
    whole, tokens = admitted((params, -5, [4, 9], [])), []
    for row in logits:
        whole, drawn = draw(row, whole, [0])
        tokens.append(int(drawn.tokens[0]))
    assert 2 not in tokens[:9]

    back = admitted((SamplingParams(), 1, [], []), (params, -5, [4, 9], tokens[:7]))
    resumed = []
    for row in logits[7:]:
        back, drawn = draw(row, back, [1])
        resumed.append(int(drawn.tokens[0]))
    assert resumed == tokens[7:]


def test_greedy_takes_the_lowest_of_equal_ids_and_min_tokens_holds_the_end_back():
    params = SamplingParams(temperature=0, min_tokens=2, stop_token_ids=[6])
    state = admitted((params, 0, [], []))
    logits = np.zeros((1, VOCAB))
    logits[0, [2, 6, 9, 12]] = [5, 4, 3, 3]
    tokens = []
    for _ in range(3):
        state, drawn = draw(logits, state, [0])
        tokens.append(int(drawn.tokens[0]))
    assert tokens == [9, 9, 2]
    assert int(state.last_token[0]) == 2
    assert int(state.generated[0]) == 3


def test_allowed_ids():
    params = SamplingParams(allowed_token_ids=[4, 8], logit_bias={8: -100}, temperature=0)
    state = admitted((params, 0, [], []), (SamplingParams(temperature=0), 0, [], []))
    logits = np.zeros((2, VOCAB))
    logits[:, 8], logits[:, 17] = 5, 9
    _, drawn = draw(logits, state, [0, 1])
    np.testing.assert_array_equal(drawn.tokens, [4, 17])
    with pytest.raises(InvalidParameter, match="leaves nothing to sample"):
        admitted((SamplingParams(allowed_token_ids=[2], min_tokens=1), 0, [], []))


def test_rows_that_do_not_emit_leave_no_trace():
    state = admitted((SamplingParams(repetition_penalty=1.5), 0, [3], [4]))
    after, drawn = draw(np.full((2, VOCAB), np.nan), state, [0, -7], emit=[False, False])
    assert jax.tree.all(jax.tree.map(lambda a, b: bool((a == b).all()), state, after))
    assert not drawn.bad.any()


def test_logprobs_are_raw_and_ranked():
    params = SamplingParams(temperature=0, logit_bias={5: 50}, logprobs=3)
    logits = np.random.default_rng(1).normal(0, 2, (1, VOCAB)).astype(np.float32)
    logits[0, 9] = logits[0, 7] = 6.0
    _, drawn = draw(logits, admitted((params, 0, [], [])), [0])
    raw = np.log(softmax(logits[0].astype(np.float64)))
    assert drawn.tokens[0] == 5
    np.testing.assert_allclose(drawn.logprobs[0], raw[5], atol=1e-5)
    best_first = np.argsort(-logits[0], kind="stable")[:20]
    np.testing.assert_array_equal(drawn.top_ids[0], best_first)
    np.testing.assert_allclose(drawn.top_logprobs[0], raw[best_first], atol=1e-5)


@pytest.mark.parametrize("poison", [np.nan, np.inf])
@pytest.mark.parametrize("temperature", [0, 1])
def test_logits_that_are_not_finite_are_told(poison, temperature):
    requests = [(SamplingParams(temperature=temperature), 0, [], [])] * 2
    logits = np.zeros((2, VOCAB))
    logits[1, 3] = poison
    _, drawn = draw(logits, admitted(*requests), [0, 1])
    np.testing.assert_array_equal(drawn.bad, [False, True])
    assert 0 <= int(drawn.tokens[1]) < VOCAB


def test_the_state_is_updated_in_place():
    state = init(4, VOCAB)
    old = state.output_counts
    row = slot_row(SamplingParams(), vocab_size=VOCAB, seed=0)
    state = admit(state, 3, row)
    assert old.is_deleted()
    with pytest.raises(IndexError, match="slot 4 is outside the sampler's 4 slots"):
        admit(state, 4, row)

    shapes = jax.ShapeDtypeStruct((4, VOCAB), jnp.float32), jax.ShapeDtypeStruct((4,), jnp.int32)
    lowered = jax.jit(sample, donate_argnums=1).lower(
        shapes[0], state, shapes[1], jax.ShapeDtypeStruct((4,), jnp.bool_)
    )
    memory = lowered.compile().memory_analysis()
    held = sum(leaf.nbytes for leaf in jax.tree.leaves(state))
    assert memory.alias_size_in_bytes >= held


@pytest.mark.parametrize("demand", COMPILED_APART)
def test_a_demand_known_beforehand_gives_the_same_tokens(demand: Demand):
    """What a GPU compiles without branches draws what the branches draw."""
    rows = SLOTS
    params = [SamplingParams(temperature=0.0) for _ in range(rows)]
    if demand is Demand.DRAWN:
        params[1] = SamplingParams(temperature=0.9, min_p=0.05)
    elif demand is Demand.CUT:
        params[1] = SamplingParams(temperature=0.9, top_k=5, top_p=0.8)
        params[2] = SamplingParams(temperature=0.7, top_p=0.6)
    elif demand is not Demand.PLAIN:
        params[1] = SamplingParams(temperature=0.9, top_k=5, top_p=0.8, presence_penalty=1.0)
        params[2] = SamplingParams(temperature=0.0, logit_bias={7: 100.0})
    if demand is Demand.REPORTED:
        params[0] = SamplingParams(temperature=0.0, logprobs=3)
    assert largest(demand_of(entry) for entry in params) is demand
    logits = np.random.default_rng(5).normal(0, 1, (rows, VOCAB + PADDING)).astype(np.float32)
    results = []
    for known in (Demand.ANY, demand):
        state = init(rows, VOCAB)
        for slot, entry in enumerate(params):
            state = admit(state, slot, slot_row(entry, vocab_size=VOCAB, seed=11 + slot))
        draw = jax.jit(sample, static_argnums=4)
        drawn = []
        for _ in range(4):
            state, sampled = draw(logits, state, jnp.arange(rows), jnp.ones(rows, bool), known)
            drawn.append(np.asarray(sampled.tokens))
        results.append((drawn, np.asarray(sampled.top_logprobs), np.asarray(sampled.bad)))
    np.testing.assert_array_equal(results[0][0], results[1][0])
    np.testing.assert_array_equal(results[0][2], results[1][2])
    np.testing.assert_allclose(results[0][1], results[1][1], rtol=1e-6)
