"""`jaxgen bench serve` against the real server: a table, vLLM's keys, files, refusals."""

import json
import socket

import pytest

from jaxgen.cli import main

KEYS = {
    *("duration", "completed", "failed", "total_input_tokens", "total_output_tokens"),
    *("request_throughput", "request_goodput", "output_throughput", "total_token_throughput"),
    *("max_output_tokens_per_s", "max_concurrent_requests", "backend", "endpoint_type", "label"),
    *("model_id", "tokenizer_id", "num_prompts", "request_rate", "burstiness", "max_concurrency"),
    *("mean_ttft_ms", "median_ttft_ms", "std_ttft_ms", "p99_ttft_ms", "mean_tpot_ms"),
    *("mean_itl_ms", "p99_itl_ms"),
}
SHORT = ("--random-input-len", "9", "--random-output-len", "5", "--num-prompts", "6")
RAMP = (
    "--ramp-up-strategy",
    "exponential",
    "--ramp-up-start-rps",
    "50",
    "--ramp-up-end-rps",
    "500",
)


@pytest.fixture
def bench(server, golden_dir, monkeypatch, capsys):
    """Runs the command against the server; what it wrote, and its exit code."""
    monkeypatch.setenv("OPENAI_API_KEY", "key")
    vocabulary = str(golden_dir("llama_plain"))

    def run(*words, code=0, url=server.base_url):
        asked = ["bench", "serve", "--base-url", url, "--tokenizer", vocabulary, *words]
        assert main(asked) == code
        return capsys.readouterr()

    return run


def test_vllms_keys_and_the_servers_counts(bench, tmp_path):
    out = tmp_path / "out.json"
    told = json.loads(bench(*SHORT, "--json", "--output-json", str(out)).out)
    assert json.loads(out.read_text()) == told
    assert told.keys() >= KEYS
    assert (told["completed"], told["failed"]) == (6, 0)
    assert (told["total_input_tokens"], told["total_output_tokens"]) == (54, 30)
    assert (told["model_id"], told["request_rate"]) == ("tiny", "inf")
    assert 0 < told["mean_ttft_ms"] < 1e3 * told["duration"]
    assert told["output_throughput"] == pytest.approx(30 / told["duration"])


def test_a_chat_of_a_file(bench, tmp_path):
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "hello", "output_tokens": 3}\n{"prompt": "you"}\n')
    words = ("--dataset-name", "custom", "--dataset-path", str(prompts), "--ignore-eos")
    limits = ("--custom-output-len", "4", "--max-concurrency", "1", "--temperature", "0")
    details = ("--save-result", "--save-detailed", "--result-dir", str(tmp_path / "results"))
    names = ("--label", "mine", "--metadata", "chip=none")
    told = bench(*words, *limits, *details, *names, "--backend", "openai-chat", "--json").out
    assert json.loads(told)["total_output_tokens"] == 7
    (saved,) = (tmp_path / "results").iterdir()
    assert saved.name.startswith("mine-infqps-concurrency1-tiny-")
    result = json.loads(saved.read_text())
    assert result["output_lens"] == [3, 4]
    assert result["errors"] == ["", ""]
    assert result["queue_times"][1] > result["latencies"][0] / 2  # it waited for the only place
    assert all(result["generated_texts"])
    assert (result["chip"], result["max_concurrent_requests"]) == ("none", 1)


def test_a_table_as_vllm_prints_it(bench):
    out = bench(
        *SHORT, "--goodput", "ttft:0.001", "tpot:60000", "--metric-percentiles", "50,99"
    ).out
    lines = out.splitlines()
    assert lines[0] == "============ Serving Benchmark Result ============"
    told = dict(line.split(":") for line in lines if ":" in line)
    assert int(told["Successful requests"]) == 6
    assert float(told["Request goodput (req/s)"]) == 0
    assert float(told["P50 TTFT (ms)"]) <= float(told["P99 TTFT (ms)"])
    assert {"Median TPOT (ms)", "Mean ITL (ms)", "Total generated tokens"} <= told.keys()


def test_a_sweep_has_a_line_a_rate(bench, tmp_path):
    words = (*SHORT, "--request-rate", "50", "inf", "--percentile-metrics", "ttft,e2el")
    out = bench(*words, "--output-json", str(tmp_path / "sweep.json")).out
    head, slow, fast, *_ = (line.split() for line in out.splitlines())
    assert head[:2] == ["rate", "done"]
    assert (slow[:3], fast[:3]) == (["50.00", "6", "0"], ["inf", "6", "0"])
    sweep = json.loads((tmp_path / "sweep.json").read_text())["sweep"]
    assert sweep[0]["duration"] > 0.02  # the last of six at 50 a second


def test_a_ramp_is_told(bench):
    told = json.loads(bench(*SHORT, *RAMP, "--json").out)
    assert (told["completed"], told["request_rate"]) == (6, "inf")
    ramp = [told[f"ramp_up_{name}"] for name in ("strategy", "start_rps", "end_rps")]
    assert ramp == ["exponential", 50, 500]


def test_failures_are_counted_and_told(bench):
    words = ("--random-input-len", "500", "--random-output-len", "5", "--num-prompts", "3")
    told = bench(*words, "--json", code=1)
    assert json.loads(told.out)["failed"] == 3
    assert "3 of 3 requests failed: status 400" in told.err
    with socket.create_server(("127.0.0.1", 0)) as silent:
        port = silent.getsockname()[1]
    gone = bench(*SHORT, "--model", "tiny", code=1, url=f"http://127.0.0.1:{port}")
    assert "6 of 6 requests failed: ConnectionRefusedError" in gone.err


def test_the_model_is_asked_for(bench, monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "wrong")
    assert "/v1/models names no model" in bench(*SHORT, code=2).err


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (("--lora-modules", "a"), "unrecognized arguments"),
        (("--goodput", "itl:3"), "ttft, tpot, e2el"),
        (("--request-rate", "0"), "above 0"),
        (("--ramp-up-strategy", "linear"), "a ramp needs"),
        (("--ramp-up-start-rps", "inf"), "finite"),
        ((*RAMP, "--request-rate", "4"), "takes the place"),
        (("--percentile-metrics", "ttft,speed"), "speed"),
        (("--metric-percentiles", "101"), "from 0 to 100"),
        (("--header", "nothing"), "KEY=VALUE"),
        (("--result-filename", "x"), "--save-result"),
        (("--base-url", "ftp://x", "--model", "m"), "expected a URL"),
        (("--model", "nowhere"), "give --tokenizer"),
        (("--model", "llama-3.1-8b", "--backend", "openai-chat"), "give --tokenizer"),
        (("--model", "m", "--ready-check-timeout-sec", "0.1", "--port", "1"), "gave no answer"),
    ],
)
def test_refusals(capsys, monkeypatch, words, complaint):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    vocabulary = ["--tokenizer", "llama-3.1-8b"] if "--port" in words else []
    try:
        code = main(["bench", "serve", *words, *vocabulary])
    except SystemExit as end:
        code = end.code
    assert code == 2
    assert complaint in capsys.readouterr().err
