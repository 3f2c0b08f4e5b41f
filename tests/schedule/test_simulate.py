"""Replays: exact times of one request, and the policy's promises as numbers."""

import json

import numpy as np
import pytest

from jaxgen.cli import main
from jaxgen.ragged.buckets import Buckets
from jaxgen.ragged.prefix_cache import PrefixCache
from jaxgen.ragged.sequence import CacheGroup
from jaxgen.ragged.state import StateManager
from jaxgen.schedule.limits import Limits
from jaxgen.schedule.order import longest_first
from jaxgen.schedule.simulate import Arrival, CostModel, replay

COST = CostModel(base=4e-3, per_token=25e-6, per_kv_token=30e-9)


def served(arrivals, *, budget=512, sequences=64, blocks=4000):
    groups = [CacheGroup()]
    state = StateManager(
        groups,
        [blocks],
        block_size=16,
        max_context=20_000,
        max_tracked=sequences,
        prefix_cache=PrefixCache(groups, 16),
    )
    result = replay(arrivals, Limits(budget, sequences, max_waiting=300), state, COST)
    assert state.free_blocks == state.num_blocks
    return result


def test_one_request_takes_the_time_of_its_steps():
    (outcome,) = served([Arrival(1.0, [5] * 600, 3)]).outcomes
    steps = [(512, 512), (88, 600), (1, 601), (1, 602)]
    ends = 1.0 + np.cumsum([COST.seconds(*step) for step in steps])
    assert outcome.token_times == pytest.approx(ends[1:])
    assert outcome.ttft == pytest.approx(ends[1] - 1)
    assert outcome.tpot == pytest.approx((ends[3] - ends[1]) / 2)


def test_short_prompts_hardly_wait_behind_long_ones_and_long_ones_go_on():
    """A long prompt every second: alone it takes 0.4 s; short ones take 8 ms."""
    dice = np.random.default_rng(1)
    longs = [Arrival(float(second), [second] * 12_000, 8) for second in range(1, 6)]
    shorts = [
        Arrival(float(time), [100 + number] * 128, 8)
        for number, time in enumerate(dice.uniform(0, 6, 60))
    ]
    arrivals = sorted([*longs, *shorts], key=lambda arrival: arrival.time)
    result = served(arrivals)
    waits = {
        length: [o.ttft for o in result.outcomes if len(o.arrival.prompt_ids) == length]
        for length in (128, 12_000)
    }
    assert len(waits[12_000]) == 5
    assert max(waits[128]) < 0.1
    assert max(waits[12_000]) < 2


def test_what_preemption_and_refusals_cost_is_counted():
    arrivals = [Arrival(0.0, [number] * 64, 64) for number in range(400)]
    result = served(arrivals, blocks=120, sequences=32)
    summary = result.summary()
    assert summary["completed"] + summary["refused"] == 400
    assert summary["refused"] == 100
    assert result.preemptions > 0
    assert all(len(o.token_times) == 64 for o in result.outcomes if not o.refused)
    assert summary["p50_ttft_ms"] <= summary["p99_ttft_ms"]


def test_padding_costs_time_and_a_full_queue_fills_steps():
    """Prompts come as others end: hardly a step ends at a compiled size by itself."""
    dice = np.random.default_rng(2)
    arrivals = [
        Arrival(0.0, [number] * int(dice.integers(100, 400)), int(dice.integers(20, 60)))
        for number in range(100)
    ]
    buckets = Buckets.for_limits(max_tokens=1024, max_rows=16, max_blocks=100)
    cost = CostModel(1e-3, 20e-6, 0.0, weights=2e-3)

    def replayed(sizes):
        state = StateManager(
            [CacheGroup()], [4000], block_size=16, max_context=1000, max_tracked=16, num_slots=16
        )
        limits = Limits(1024, 16, sizes=sizes)
        return replay(arrivals, limits, state, cost, buckets=buckets)

    padded, filled = replayed(()), replayed(buckets.filled)
    assert filled.padding_tokens < padded.padding_tokens
    assert filled.summary()["duration"] < padded.summary()["duration"]
    assert cost.seconds(50, 0) == 3e-3
    assert cost.seconds(200, 0) == 5e-3


def test_the_command_tells_the_same_as_json_and_in_lines(capsys, tmp_path):
    trace = tmp_path / "trace.jsonl"
    trace.write_text(
        "\n".join(
            json.dumps({"arrival": 0.1 * number, "input_len": 40, "output_len": 8})
            for number in range(20)
        )
    )
    options = ["bench", "simulate", "--trace", str(trace), "--random-prefix-len", "128"]
    assert main([*options, "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["completed"] == 20
    assert told["prefix_cache_hits"] == 19 * 128
    assert main([*options, "--no-enable-prefix-caching"]) == 0
    lines = dict(line.split() for line in capsys.readouterr().out.splitlines())
    assert lines["completed"] == "20"
    assert "prefix_cache_hits" not in lines
    assert float(lines["p50_ttft_ms"]) > told["p50_ttft_ms"]
    trace.write_text('{"arrival": 1}')
    assert main(options) == 2
    assert "line 1: expected" in capsys.readouterr().err


def test_a_batch_ends_sooner_if_long_answers_begin_it():
    chance = np.random.default_rng(0)
    prompts, answers = chance.integers(32, 256, size=128), chance.integers(16, 128, size=128)
    arrivals = [Arrival(0.0, [5] * int(p), int(a)) for p, a in zip(prompts, answers, strict=True)]
    ordered = [arrivals[index] for index in longest_first([each.max_tokens for each in arrivals])]
    come, longest = (
        max(outcome.token_times[-1] for outcome in served(each, sequences=32).outcomes)
        for each in (arrivals, ordered)
    )
    assert longest < 0.95 * come
