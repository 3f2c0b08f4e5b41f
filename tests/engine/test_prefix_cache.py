"""Shared beginnings change no token: with windows, latents, dynamic lengths, and preemption."""

import numpy as np
import pytest

from jaxgen.engine.build import describe
from jaxgen.engine.length_class import length_class
from jaxgen.engine.loop import GenerationLoop
from jaxgen.sampling import SamplingParams
from jaxgen_checkpoints.checkpoint import open_checkpoint

GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
# Windows of several sizes beside whole layers; latents instead of keys.
FAMILIES = ("gemma3", "deepseek_v2_lite")
# Keys follow from the length of the prompt as well; the turns end on both sides of the boundary.
LENGTHS = ("llama_dynamic", "phi3_longrope", "qwen_v1")


def talk(engine, prompts, params=GREEDY, *, cached=True):
    """Two turns of as many conversations, the second begun by the first; tokens of each, and hits.

    cached=False: the same without a prefix cache.
    """
    cache, engine.state.prefix_cache = engine.state.prefix_cache, None
    if cached:
        engine.state.prefix_cache = cache
    before = cache.hit_tokens
    loop = GenerationLoop(engine)
    tokens = []
    for turn in range(2):
        outputs = [
            loop.submit(f"{turn}.{number}", prompt, params) for number, prompt in enumerate(prompts)
        ]
        while loop.has_unfinished:
            loop.step()
            engine.state.check()
        tokens += [output.outputs[0].token_ids for output in outputs]
        prompts = [
            output.prompt_token_ids + output.outputs[0].token_ids[:20] + [7] for output in outputs
        ]
    assert engine.state.free_blocks == engine.state.num_blocks
    engine.state.prefix_cache = cache
    return tokens, cache.hit_tokens - before


def prompts_of(case, shared, tails):
    beginning = case.prompts[4][:shared]
    return [beginning + list(range(40 + tail, 40 + 2 * tail)) for tail in tails]


@pytest.mark.parametrize(
    "name", [*FAMILIES, *(pytest.param(name, marks=pytest.mark.slow) for name in LENGTHS)]
)
def test_tokens_are_the_same_with_and_without(golden, one_shape, preempted, name):
    """Five conversations in 18 blocks, so that some are preempted."""
    case = golden(name)
    engine = one_shape(case.folder, num_gpu_blocks_override=18)
    prompts = prompts_of(case, 24, (1, 2, 5, 8, 17))
    expected, hits = talk(engine, prompts, cached=False)
    assert hits == 0
    assert preempted
    preempted.clear()
    for _ in range(2):  # cold, then with whatever the pool still has
        tokens, hits = talk(engine, prompts)
        assert tokens == expected
        assert hits > 0 or name == "qwen_v1"  # shared by prompts of equal length only
    assert preempted
    engine.reset_prefix_cache()
    assert talk(engine, prompts[:1], GREEDY)[0] == [expected[0], expected[5]]


@pytest.mark.parametrize(
    ("name", "classes"),
    [
        ("llama_tied", [0, 0, 0, 0]),
        ("gemma3", [0, 0, 0, 0]),
        ("llama_dynamic", [32, 32, 33, 60]),
        ("phi3_longrope", [0, 0, 0, 1]),
        ("qwen_v1", [1, 32, 33, 60]),
    ],
)
def test_prompts_of_these_lengths_have_the_same_keys(golden_dir, name, classes):
    of = length_class(describe(open_checkpoint(golden_dir(name))).policy)
    assert [of(length) for length in (1, 32, 33, 60)] == classes


@pytest.fixture(scope="module")
def engine(golden, one_shape):
    return one_shape(golden("llama_tied").folder)


def hits(engine, prompt, **options):
    """How many tokens of one more prompt were cached, and what was said."""
    loop = GenerationLoop(engine)
    cache = engine.state.prefix_cache
    before = (cache.queried_tokens, cache.hit_tokens)
    params = SamplingParams(temperature=0, max_tokens=2, ignore_eos=True, **options.pop("ask", {}))
    output = loop.submit("0", prompt, params, **options)
    while loop.has_unfinished:
        loop.step()
    assert cache.queried_tokens - before[0] in (0, len(prompt))
    return cache.hit_tokens - before[1], output


def test_who_shares_what(engine, golden):
    prompt = golden("llama_tied").prompts[4][:40]
    engine.reset_prefix_cache()
    counts = [hits(engine, prompt)[0] for _ in range(2)]
    assert counts == [0, 32]  # of five whole blocks the last is computed for its logits
    assert hits(engine, [*prompt, 5])[0] == 40
    assert hits(engine, [*prompt[:17], 5, *prompt[18:]])[0] == 16
    assert hits(engine, prompt, cache_salt="other")[0] == 0
    assert hits(engine, prompt, cache_salt="other")[0] == 32
    engine.reset_prefix_cache()
    assert hits(engine, prompt)[0] == 0
    engine.forget_everything()
    assert hits(engine, prompt)[0] == 0


@pytest.mark.slow
def test_prompt_logprobs_are_those_of_every_token(engine, golden):
    case = golden("llama_tied")
    prompt = case.prompts[4]
    hits(engine, prompt)
    cached, output = hits(engine, prompt, ask={"prompt_logprobs": 0})
    assert cached == 0
    logits = case.logits[4].astype(np.float64)
    expected = logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True))
    assert output.prompt_logprobs[0] is None
    assert len(output.prompt_logprobs) == len(prompt)
    for position, entry in enumerate(output.prompt_logprobs[1:], start=1):
        assert abs(entry.logprob - expected[position - 1, prompt[position]]) < 1e-4
