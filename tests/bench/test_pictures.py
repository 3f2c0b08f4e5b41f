"""Pictures of load tests, sweeps and offline runs are files that viewers open."""

import pytest

from jaxgen.bench.load import LoadRun, Outcome
from jaxgen.bench.progress import Progress
from jaxgen.bench.serve_metrics import summarize
from jaxgen.commands.bench_picture import draw_load, draw_progress
from jaxgen_checkpoints.errors import RefusedInput

pytest.importorskip("matplotlib")
PNG = b"\x89PNG\r\n"


def run(requests, tokens=4):
    gaps = [0.01] * (tokens - 1)
    seen = {"ttft": 0.02, "latency": 0.02 + sum(gaps), "gaps": gaps, "output_tokens": tokens}
    done = [Outcome(0.1 * number, **seen) for number in range(requests)]
    return LoadRun([*done, Outcome(0.0, error="refused")], 0.1 * requests + 0.1)


def told(rate, load):
    about = {"request_rate": rate, "model_id": "m", "dataset_name": "random", "num_prompts": 4}
    return about | summarize(load)


def test_a_run_and_a_sweep(tmp_path):
    one, many = tmp_path / "one.png", tmp_path / "many.svg"
    draw_load([told("inf", run(3))], [run(3)], str(one))
    assert one.read_bytes().startswith(PNG)
    rates, runs = [2.0, 8.5, "inf"], [run(3), run(5), run(4, tokens=1)]
    draw_load([told(*each) for each in zip(rates, runs, strict=True)], runs, str(many))
    assert "<svg" in many.read_text()


def test_an_offline_run(tmp_path):
    path = tmp_path / "run.png"
    draw_progress([Progress(0.1 * i, 8, 8, 20 - i) for i in range(1, 21)], "m", str(path))
    assert path.read_bytes().startswith(PNG)


def test_what_cannot_be_drawn_is_refused(tmp_path):
    with pytest.raises(RefusedInput, match="nothing was answered"):
        draw_load([told("inf", run(0))], [run(0)], str(tmp_path / "a.png"))
    with pytest.raises(RefusedInput, match=r"a.nothing"):
        draw_load([told("inf", run(2))], [run(2)], str(tmp_path / "a.nothing"))
