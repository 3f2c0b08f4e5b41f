"""The benches run on any shape, report vLLM's keys, and draw the fixed workload."""

import json
from pathlib import Path

import pytest

from jaxgen.cli import main

TINY = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 2,
    "vocab_size": 512,
    "torch_dtype": "float32",
}
SHAPE = ["--model", "llama-3.1-8b", "--load-format", "dummy", "--hf-overrides", json.dumps(TINY)]


def test_latency_reports_steps_and_roofline(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    out = tmp_path / "latency.json"
    sizes = ["--batch-size", "2", "--input-len", "8", "--output-len", "6"]
    rounds = ["--num-iters", "2", "--num-iters-warmup", "1"]
    assert main(["bench", "latency", *SHAPE, *sizes, *rounds, "--output-json", str(out)]) == 0
    result = json.loads(out.read_text())
    assert json.loads(capsys.readouterr().out) == result
    assert len(result["latencies"]) == 2
    assert 0 < result["decode_step_ms"] < 1e3 * result["avg_latency"]
    assert 0 < result["decode_roofline_share"] <= 1


def test_overrides_need_dummy_weights(capsys: pytest.CaptureFixture[str]):
    options = ["--model", "x", "--hf-overrides", '{"vocab_size": 8}']
    assert main(["bench", "startup", *options]) == 2
    assert "--load-format dummy" in capsys.readouterr().err


def test_throughput_of_a_file(golden_dir, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    prompts, picture = tmp_path / "prompts.jsonl", tmp_path / "run.svg"
    prompts.write_text('{"prompt": "hello", "output_tokens": 3}\n{"prompt": "you"}\n')
    dataset = ["--dataset-name", "custom", "--dataset-path", str(prompts)]
    limits = ["--custom-output-len", "4", "--max-num-batched-tokens", "16", "--max-num-seqs", "1"]
    model = ["--model", str(golden_dir("llama_plain")), "--dtype", "float32"]
    assert main(["bench", "throughput", *model, *dataset, *limits, "--plot", str(picture)]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["num_requests"] == 2
    assert told["output_tokens_per_second"] == pytest.approx(7 / told["elapsed_time"])
    assert told["late_compiles"] == 0
    assert "<svg" in picture.read_text()
