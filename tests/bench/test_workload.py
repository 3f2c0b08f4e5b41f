"""The datasets: what a seed gives is what other engines were given, and files are read by line."""

import numpy as np
import pytest

from jaxgen.bench.workload import (
    SHAREGPT_LIMITS,
    arrivals,
    custom,
    other_ids,
    prefix_repetition,
    ramped,
    random,
    synthetic_sharegpt,
    uniform,
)
from jaxgen.cli import main
from jaxgen_checkpoints.errors import RefusedInput


def test_uniform_is_the_recorded_one():
    """Lengths first, outputs second, ids last, from one generator: peers are given the same."""
    requests = uniform(512, (128, 1024), (64, 512), 128256, seed=0)
    rng = np.random.default_rng(0)
    inputs = rng.integers(128, 1025, size=512)
    outputs = rng.integers(64, 513, size=512)
    assert [len(request.prompt_ids) for request in requests] == inputs.tolist()
    assert [request.output_len for request in requests] == outputs.tolist()
    assert requests[0].prompt_ids == rng.integers(0, 128256 - 16, size=inputs[0]).tolist()


def test_random_lengths_stay_within_the_ratio_behind_one_prefix():
    requests = random(50, 99, 20, 0.5, 512, seed=1, prefix_len=7)
    lengths = {len(request.prompt_ids) - 7 for request in requests}
    assert lengths <= set(range(49, 150))  # floor and ceiling, as vLLM
    assert len(lengths) > 10
    assert {request.output_len for request in requests} <= set(range(10, 31))
    assert len({tuple(request.prompt_ids[:7]) for request in requests}) == 1
    assert len({tuple(request.prompt_ids) for request in requests}) == 50


def test_synthetic_sharegpt_has_the_lengths_it_is_named_for():
    requests = synthetic_sharegpt(4000, 512, seed=3)
    prompts = np.array([len(request.prompt_ids) for request in requests])
    answers = np.array([request.output_len for request in requests])
    assert abs(prompts.mean() - 220) < 15
    assert abs(answers.mean() - 190) < 12
    fewest, most_prompt, most = SHAREGPT_LIMITS
    assert min(prompts.min(), answers.min()) >= fewest
    assert prompts.max() <= most_prompt
    assert (prompts + answers).max() <= most
    assert np.median(prompts) < 0.7 * prompts.mean()


def test_prefixes_repeat():
    requests = prefix_repetition(20, 30, 5, 4, 9, 512)
    beginnings = [tuple(request.prompt_ids[:30]) for request in requests]
    assert sorted(map(beginnings.count, set(beginnings))) == [5, 5, 5, 5]
    assert beginnings[:4] != sorted(beginnings)[:4]
    assert {len(request.prompt_ids) for request in requests} == {35}
    with pytest.raises(RefusedInput, match="--prefix-repetition-num-prefixes 4"):
        prefix_repetition(3, 30, 5, 4, 9, 512)


def test_another_turn_has_other_ids_of_the_same_lengths():
    requests = prefix_repetition(6, 30, 5, 2, 9, 512)
    assert other_ids(requests, 0, 512) == requests
    turned = other_ids(requests, 1, 512)
    for before, after in zip(requests, turned, strict=True):
        assert len(before.prompt_ids) == len(after.prompt_ids)
        assert before.prompt_ids[0] != after.prompt_ids[0]
        assert max(after.prompt_ids) < 512 - 16
    assert len({tuple(request.prompt_ids[:30]) for request in turned}) == 2


def test_custom_lines_begin_again(tmp_path):
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": "one", "output_tokens": 3}\n\n{"prompt": "two", "more": 1}\n')
    once = custom(path, None, 8, encode=lambda text: list(text.encode()))
    assert [(request.text, request.output_len) for request in once] == [("one", 3), ("two", 8)]
    assert once[1].prompt_ids == [116, 119, 111]
    assert [request.text for request in custom(path, 5, 8)] == ["one", "two", "one", "two", "one"]


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        ("{", "Expecting"),
        ("[1]", 'a text as "prompt"'),
        ('{"text": "x"}', 'a text as "prompt"'),
        ('{"prompt": ""}', "must not be empty"),
        ('{"prompt": "x", "output_tokens": 0}', "from 1 on, not 0"),
        ('{"prompt": "x", "output_tokens": "9"}', "from 1 on, not '9'"),
    ],
)
def test_custom_errors_name_the_line(tmp_path, line, complaint):
    path = tmp_path / "prompts.jsonl"
    path.write_text(f'{{"prompt": "fine"}}\n{line}\n')
    with pytest.raises(RefusedInput, match=r"prompts.jsonl line 2: ") as caught:
        custom(path, None, 8)
    assert complaint in str(caught.value)


@pytest.mark.parametrize("burstiness", [0.3, 1.0, 5.0])
def test_arrivals_keep_the_rate_and_the_shape(burstiness):
    times = np.array(arrivals(20_000, 8.0, seed=5, burstiness=burstiness))
    assert times[0] == 0
    gaps = np.diff(times)
    assert abs(gaps.mean() * 8 - 1) < 0.05
    assert abs((gaps.std() / gaps.mean()) ** 2 * burstiness - 1) < 0.1  # of a gamma distribution
    assert arrivals(50, 8.0, seed=5) == arrivals(50, 8.0, seed=5) != arrivals(50, 8.0, seed=6)


def test_arrivals_without_chance():
    rng = np.random.default_rng(0)
    poisson = np.cumsum(rng.exponential(1 / 16, 512))
    assert arrivals(512, 16.0) == (poisson - poisson[0]).tolist()  # as peers were asked
    assert arrivals(3, float("inf")) == [0, 0, 0]
    assert arrivals(3, 4.0, burstiness=float("inf")) == [0, 0.25, 0.5]


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (["--random-input-len", "5"], "--random-input-len does not belong to --dataset-name unif"),
        (["--dataset-name", "custom"], "needs --dataset-path"),
        (["--dataset-name", "custom", "--dataset-path", "nowhere.jsonl"], "nowhere.jsonl"),
        (["--dataset-name", "random", "--random-range-ratio", "1.5"], "must lie in [0, 1)"),
    ],
)
def test_options_that_do_not_fit_are_refused(capsys, words, complaint):
    assert main(["bench", "simulate", *words]) == 2
    assert complaint in capsys.readouterr().err


def test_every_drawn_dataset_can_be_simulated(capsys):
    for name in ("random", "synthetic-sharegpt", "prefix_repetition"):
        words = ["--dataset-name", name, "--num-prompts", "20", "--json"]
        assert main(["bench", "simulate", *words]) == 0
        assert '"completed": 20' in capsys.readouterr().out


def test_a_ramp():
    assert ramped(3, "linear", 2.0, 6.0).tolist() == [2, 4, 6]
    assert ramped(3, "exponential", 1.0, 9.0) == pytest.approx([1, 3, 9])
    even = arrivals(3, ramped(3, "linear", 1.0, 4.0), burstiness=float("inf"))
    assert even == pytest.approx([0, 1 / 2.5, 1 / 2.5 + 1 / 4])
    drawn = np.diff(arrivals(20_000, ramped(20_000, "linear", 5.0, 50.0), seed=1))
    assert 1 / drawn[:1000].mean() == pytest.approx(6.1, rel=0.1)
    assert 1 / drawn[-1000:].mean() == pytest.approx(48.9, rel=0.1)
