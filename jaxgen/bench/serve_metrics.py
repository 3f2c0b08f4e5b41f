"""What a load on a server showed, in vLLM's keys: throughput, latencies, goodput, percentiles."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from jaxgen.bench.load import LoadRun, Outcome


def summarize(
    run: LoadRun,
    *,
    metrics: Sequence[str] = ("ttft", "tpot", "itl"),
    percentiles: Sequence[float] = (99,),
    goodput: Mapping[str, float] | None = None,
) -> dict[str, Any]:
    """vLLM's keys. goodput: milliseconds that ttft, tpot or e2el may take in a good request.

    Statistics are over the requests that were answered; a TPOT only those with two tokens have.
    Tokens are the server's own counts.
    """
    done = [outcome for outcome in run.outcomes if not outcome.error]
    tokens_in = sum(outcome.prompt_tokens for outcome in done)
    tokens_out = sum(outcome.output_tokens for outcome in done)
    good = sum(is_good(outcome, goodput or {}) for outcome in done)
    result: dict[str, Any] = {
        "duration": run.duration,
        "completed": len(done),
        "failed": len(run.outcomes) - len(done),
        "total_input_tokens": tokens_in,
        "total_output_tokens": tokens_out,
        "request_throughput": len(done) / run.duration,
        "request_goodput": good / run.duration if goodput else None,
        "output_throughput": tokens_out / run.duration,
        "total_token_throughput": (tokens_in + tokens_out) / run.duration,
        "max_output_tokens_per_s": most_tokens_in_a_second(done),
        "max_concurrent_requests": most_at_once(done),
    }
    values = samples(done)
    for name in metrics:
        result |= statistics(name, values[name], percentiles)
    return result


def details(run: LoadRun) -> dict[str, Any]:
    """vLLM's keys of --save-detailed: an entry a request, in the order of the requests."""
    outcomes = run.outcomes
    return {
        "input_lens": [outcome.prompt_tokens for outcome in outcomes],
        "output_lens": [outcome.output_tokens for outcome in outcomes],
        "ttfts": [outcome.ttft for outcome in outcomes],
        "itls": [list(outcome.gaps) for outcome in outcomes],
        "latencies": [outcome.latency for outcome in outcomes],
        "start_times": [outcome.start for outcome in outcomes],
        "queue_times": [outcome.queued for outcome in outcomes],
        "generated_texts": [outcome.text for outcome in outcomes],
        "errors": [outcome.error for outcome in outcomes],
    }


def tpot(outcome: Outcome) -> float | None:
    """Seconds a token after the first; None for an answer of one token."""
    more = outcome.output_tokens - 1
    return (outcome.latency - outcome.ttft) / more if more > 0 else None


def samples(done: Sequence[Outcome]) -> dict[str, list[float]]:
    """Seconds: ttft and e2el of each, tpot of those that have one, itl of every gap."""
    return {
        "ttft": [outcome.ttft for outcome in done],
        "tpot": [each for outcome in done if (each := tpot(outcome)) is not None],
        "itl": [gap for outcome in done for gap in outcome.gaps],
        "e2el": [outcome.latency for outcome in done],
    }


def statistics(
    name: str, seconds: Sequence[float], percentiles: Sequence[float]
) -> dict[str, float | None]:
    """Mean, median, deviation and percentiles in milliseconds; None where nothing was measured."""
    values = 1e3 * np.asarray(seconds)
    told = {"mean": np.mean, "median": np.median, "std": np.std}
    found = {f"{word}_{name}_ms": of(values) if values.size else None for word, of in told.items()}
    for each in percentiles:
        key = f"p{each:g}_{name}_ms"
        found[key] = np.percentile(values, each) if values.size else None
    return {key: None if value is None else float(value) for key, value in found.items()}


def is_good(outcome: Outcome, goodput: Mapping[str, float]) -> bool:
    """Whether each objective holds; an answer of one token has no TPOT to miss."""
    seconds = {"ttft": outcome.ttft, "tpot": tpot(outcome) or 0.0, "e2el": outcome.latency}
    return all(1e3 * seconds[name] <= most for name, most in goodput.items())


def most_at_once(done: Sequence[Outcome]) -> int:
    """The most requests that were being answered at one moment; an end comes before a begin."""
    edges = [(outcome.start, 1) for outcome in done]
    edges += [(outcome.start + outcome.latency, -1) for outcome in done]
    return int(np.cumsum([step for _, step in sorted(edges)]).max(initial=0))


def most_tokens_in_a_second(done: Sequence[Outcome]) -> float:
    """Output tokens of the fullest second; an answer's are spread evenly over its pieces."""
    if not done:
        return 0.0
    begin = min(outcome.start for outcome in done)
    times, weights = [], []
    for outcome in done:
        arrived = outcome.start + outcome.ttft - begin + np.cumsum([0.0, *outcome.gaps])
        times.append(arrived)
        weights.append(np.full(len(arrived), outcome.output_tokens / len(arrived)))
    seconds = np.concatenate(times).astype(int)
    return float(np.bincount(seconds, weights=np.concatenate(weights)).max())
