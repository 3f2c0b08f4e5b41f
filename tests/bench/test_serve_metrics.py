"""The numbers of a load test follow from what each request saw, by vLLM's definitions."""

import numpy as np
import pytest

from jaxgen.bench.load import LoadRun, Outcome
from jaxgen.bench.openai_stream import Told
from jaxgen.bench.serve_metrics import details, summarize

RUN = LoadRun(
    [
        # Three tokens: at 0.1, 0.2, 0.4 s after it was sent.
        Outcome(
            0.0, 0.0, ttft=0.1, latency=0.4, gaps=(0.1, 0.2), prompt_tokens=10, output_tokens=3
        ),
        # One token.
        Outcome(0.2, 0.0, ttft=0.3, latency=0.3, gaps=(), prompt_tokens=20, output_tokens=1),
        # Five tokens in two pieces.
        Outcome(0.5, 0.1, ttft=0.2, latency=0.6, gaps=(0.4,), prompt_tokens=30, output_tokens=5),
        Outcome(0.6, 0.0, error="status 503: busy"),
    ],
    duration=2.0,
)


def test_counts_and_rates():
    told = summarize(RUN)
    assert (told["completed"], told["failed"]) == (3, 1)
    assert (told["total_input_tokens"], told["total_output_tokens"]) == (60, 9)
    assert told["request_throughput"] == 1.5
    assert told["output_throughput"] == 4.5
    assert told["total_token_throughput"] == 34.5
    assert told["max_concurrent_requests"] == 2  # the second ends when the third begins
    assert told["max_output_tokens_per_s"] == 9 - 2.5  # half of the last answer came in 1.1 s
    assert told["request_goodput"] is None


def test_latencies_in_milliseconds():
    told = summarize(RUN, metrics=("ttft", "tpot", "itl", "e2el"), percentiles=(25, 50, 99.9))
    assert told["mean_ttft_ms"] == pytest.approx(200)
    assert told["median_ttft_ms"] == pytest.approx(200)
    assert told["std_ttft_ms"] == pytest.approx(np.std([100, 300, 200]))
    assert told["p25_ttft_ms"] == pytest.approx(150)
    assert told["p99.9_ttft_ms"] == pytest.approx(np.percentile([100, 300, 200], 99.9))
    assert told["mean_tpot_ms"] == pytest.approx((150 + 100) / 2)  # of those with two tokens
    assert told["p50_itl_ms"] == pytest.approx(200)
    assert told["p50_e2el_ms"] == pytest.approx(400)


@pytest.mark.parametrize(
    ("objectives", "good"),
    [
        ({"ttft": 200}, 2),
        ({"ttft": 200, "tpot": 120}, 1),
        ({"tpot": 1}, 1),  # one token: nothing that could be late
        ({"e2el": 400}, 2),
        ({"e2el": 10_000}, 3),  # what failed is never good
    ],
)
def test_goodput_needs_every_objective(objectives, good):
    assert summarize(RUN, goodput=objectives)["request_goodput"] == good / RUN.duration


def test_nothing_answered_has_no_latencies():
    told = summarize(LoadRun(RUN.outcomes[3:], 1.0))
    assert told["completed"] == 0
    assert told["mean_ttft_ms"] is told["p99_tpot_ms"] is None


def test_details_have_an_entry_each():
    told = details(RUN)
    assert told["errors"] == ["", "", "", "status 503: busy"]
    assert told["itls"][0] == [0.1, 0.2]
    assert {len(values) for values in told.values()} == {4}


def test_a_stream_is_read_in_pieces_of_any_size():
    lines = (
        b": a comment\r\n\r\n"
        b'data: {"choices": [{"delta": {"role": "assistant", "content": ""}}]}\n\n'
        b'data: {"choices": [{"delta": {"reasoning": "Hm"}}]}\r\n\r\n'
        b'data:{"choices": [{"delta": {"content": " \xc3\xa9"}}], "usage": null}\n\n'
        b'data: {"choices": [{"delta": {}, "finish_reason": "stop"}]}\n\n'
        b'data: {"choices": [], "usage": {"prompt_tokens": 4, "completion_tokens": 2}}\n\n'
        b"data: [DONE]\n\n"
    )
    for size in (1, 7, 1000):
        told = Told()
        for place in range(0, len(lines), size):
            told.push(lines[place : place + size], float(place // size))
        assert "".join(told.text) == "Hm é"
        assert (told.prompt_tokens, told.output_tokens, told.error) == (4, 2, None)
        assert len(told.gaps) == 1  # neither the opening nor the end is output
        end = lines.index(b"\n", lines.index(b"Hm"))
        assert told.first == end // size  # not before its line was whole


def test_an_error_in_a_stream_is_told():
    told = Told()
    told.push(b'data: {"error": {"message": "gone", "code": 500}}\n\n', 1.0)
    assert told.error is not None
    assert "gone" in told.error
