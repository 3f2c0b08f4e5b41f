"""Where each kind of draw has a program, as on a GPU: all are warm, and they draw the same."""

import pytest

from jaxgen.engine.runner import StepRunner
from jaxgen.sampling import COMPILED_APART, SamplingParams, demand_of

PROMPTS = [[5 + number] * (3 + number) for number in range(10)]


def mixed():
    """Each ends at another step than the others, so that batches ask for more, then for less."""
    cut = {"temperature": 1.2, "top_k": 7, "top_p": 0.8}
    kinds = [
        {"temperature": 0.0},
        {"temperature": 0.9, "min_p": 0.05},
        {**cut, "logprobs": 2},
        {"temperature": 1.1, "top_p": 0.6},
        {**cut, "presence_penalty": 1.0},
        {**cut, "structured_outputs": {"regex": "[a-z ]{3,}"}},
        {"temperature": 0.0, "repetition_penalty": 1.3},
        {"temperature": 1.3, "top_k": 3},
        {"temperature": 0.8},
        {"temperature": 0.0},
    ]
    return [
        SamplingParams(seed=number, max_tokens=4 + 3 * number, ignore_eos=True, **kind)
        for number, kind in enumerate(kinds)
    ]


@pytest.fixture
def known_beforehand(monkeypatch):
    """As if the platform were one whose branches make the host wait."""
    for module in ("frame", "runner", "programs"):
        monkeypatch.setattr(
            f"jaxgen.engine.{module}.compiled_demands", lambda platform: COMPILED_APART
        )


def outcome(output):
    """Its tokens, why it ended, and what was said of them."""
    (completion,) = output.outputs
    logprobs = [pytest.approx(entry.logprob, abs=1e-5) for entry in completion.logprobs or ()]
    return completion.token_ids, completion.finish_reason, logprobs


def test_every_kind_of_draw_is_warm_and_draws_the_same(
    golden_dir, one_shape_llm, request, monkeypatch
):
    branching = one_shape_llm(golden_dir("llama_tied"))
    expected = [outcome(output) for output in branching.generate(PROMPTS, mixed())]

    request.getfixturevalue("known_beforehand")
    llm = one_shape_llm(golden_dir("llama_tied"))
    llm.warm_up()
    assert llm.engine.runner.compiled_steps == 2 + len(COMPILED_APART)  # one scores prompts
    asked = []
    sample = StepRunner.sample
    monkeypatch.setattr(
        StepRunner,
        "sample",
        lambda runner, bucket, packed, demand: (
            asked.append(demand) or sample(runner, bucket, packed, demand)
        ),
    )
    assert [outcome(output) for output in llm.generate(PROMPTS, mixed())] == expected
    llm.generate(PROMPTS[:1], SamplingParams(temperature=0.0, max_tokens=2))  # nobody beside it
    assert llm.engine.runner.late_compiles == 0
    assert set(asked) == set(COMPILED_APART) == {demand_of(each) for each in mixed()}
