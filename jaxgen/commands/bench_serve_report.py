"""How a load test is told: a table as `vllm bench serve` prints it, one line a rate, a file."""

import argparse
import json
import re
import time
from pathlib import Path
from typing import Any

from jaxgen.commands.terminal import table

_WIDTH = 50
_COUNTS = {
    "completed": "Successful requests:",
    "failed": "Failed requests:",
    "max_concurrency": "Maximum request concurrency:",
    "request_rate": "Request rate configured (RPS):",
    "duration": "Benchmark duration (s):",
    "total_input_tokens": "Total input tokens:",
    "total_output_tokens": "Total generated tokens:",
    "request_throughput": "Request throughput (req/s):",
    "request_goodput": "Request goodput (req/s):",
    "output_throughput": "Output token throughput (tok/s):",
    "max_output_tokens_per_s": "Peak output token throughput (tok/s):",
    "max_concurrent_requests": "Peak concurrent requests:",
    "total_token_throughput": "Total token throughput (tok/s):",
}
_HEADINGS = {
    "ttft": "Time to First Token",
    "tpot": "Time per Output Token (excl. 1st token)",
    "itl": "Inter-token Latency",
    "e2el": "End-to-end Latency",
}
_STATISTIC = re.compile(r"(mean|median|p[\d.]+)_(\w+)_ms")


def as_lines(result: dict[str, Any]) -> str:
    """One run as vLLM's table; of a sweep a line for each rate."""
    sweep = result.get("sweep")
    return _of_one(result) if sweep is None else _of_sweep(sweep)


def save(args: argparse.Namespace, result: dict[str, Any]) -> None:
    """Writes the result file, if one was asked for."""
    if not (args.save_result or args.append_result):
        return
    date = time.strftime("%Y%m%d-%H%M%S")
    model = result["model_id"].rstrip("/").rpartition("/")[2]
    places = "" if args.max_concurrency is None else f"-concurrency{args.max_concurrency}"
    usual = f"{result['label']}-{result['request_rate']}qps{places}-{model}-{date}.json"
    path = Path(args.result_dir or ".") / (args.result_filename or usual)
    path.parent.mkdir(parents=True, exist_ok=True)
    line = json.dumps({"date": date, **result}, allow_nan=False) + "\n"
    with path.open("a" if args.append_result else "w", encoding="utf-8") as file:
        file.write(line)


def _of_one(result: dict[str, Any]) -> str:
    lines = [" Serving Benchmark Result ".center(_WIDTH, "=")]
    for key, name in _COUNTS.items():
        value = result[key]
        if value is not None and value != "inf":
            lines.append(f"{name:<40} {_shown(value):<10}")
    told = [name for name in _HEADINGS if f"mean_{name}_ms" in result]
    for name in told:
        lines.append(_HEADINGS[name].center(_WIDTH, "-"))
        for key, value in result.items():
            match = _STATISTIC.fullmatch(key)
            if match and match[2] == name:
                label = f"{match[1].capitalize()} {name.upper()} (ms):"
                lines.append(f"{label:<40} {_shown(value):<10}")
    lines.append("=" * _WIDTH)
    return "".join(f"{line.rstrip()}\n" for line in lines)


def _of_sweep(sweep: list[dict[str, Any]]) -> str:
    """Medians and percentiles of what was asked for, in milliseconds."""
    keys = [
        key
        for key in sweep[0]
        if (match := _STATISTIC.fullmatch(key)) and match[1] != "mean" and match[2] in _HEADINGS
    ]
    goodput = [("request_goodput", "good/s")] if sweep[0]["request_goodput"] is not None else []
    counts = [
        ("request_rate", "rate"),
        ("completed", "done"),
        ("failed", "failed"),
        ("request_throughput", "req/s"),
        *goodput,
        ("output_throughput", "out tok/s"),
        ("max_concurrent_requests", "at once"),
    ]
    head = [name for _, name in counts]
    for key in keys:
        match = _STATISTIC.fullmatch(key)
        assert match is not None
        head.append(f"{match[2].upper()} {match[1].replace('median', 'p50')}")
    rows = [[_shown(run[key]) for key in (*(key for key, _ in counts), *keys)] for run in sweep]
    return table([head, *rows], right=range(len(head))) + "\n(latencies in ms)\n"


def _shown(value: float | str | None) -> str:
    if value is None:
        return "-"
    return f"{value:.2f}" if isinstance(value, float) else str(value)
