"""A load test, a sweep or an offline run as a picture, for reports."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from jaxgen.bench.load import LoadRun, Outcome
from jaxgen.bench.progress import Progress
from jaxgen.bench.serve_metrics import samples
from jaxgen_checkpoints.errors import RefusedInput

_SMOOTHED = 60
"""Slices of time that a curve is averaged over."""


def draw_load(results: Sequence[dict[str, Any]], runs: Sequence[LoadRun], path: str) -> None:
    """One run: its latencies and its course. Several: what the rate does to them.

    RefusedInput without matplotlib, for a format that it does not know, or with nothing to draw.
    """
    if not all(result["completed"] for result in results):
        raise RefusedInput(f"--plot {path}: no picture of a run in which nothing was answered")
    name = f"{results[0]['model_id']}, {results[0]['dataset_name']}"
    if len(runs) == 1:
        rate = results[0]["request_rate"]
        title = f"{name}, {'all at once' if rate == 'inf' else f'{rate:g} requests/s'}"
        figure, axes = _figure(title, 2, 2)
        _distributions(axes[0], runs[0])
        _course(axes[1], runs[0])
    else:
        figure, axes = _figure(f"{name}, {results[0]['num_prompts']} requests at each rate", 1, 3)
        _sweep(axes[0], results, runs)
    _save(figure, path)


def draw_progress(progress: Sequence[Progress], title: str, path: str) -> None:
    """An offline run: output tokens a second, and requests that run and wait, over time."""
    figure, axes = _figure(title, 1, 2)
    rates, requests = axes[0]
    end = progress[-1].seconds
    times = [each.seconds for each in progress]
    _rate(rates, times, [each.tokens for each in progress], end, "tokens/s")
    rates.set(title="output", xlabel="s")
    requests.step(times, [each.running for each in progress], where="post", label="running")
    requests.step(times, [each.waiting for each in progress], where="post", label="waiting")
    requests.set(title="requests", xlabel="s", xlim=(0, end))
    requests.set_ylim(bottom=0)
    requests.legend()
    _save(figure, path)


def _figure(title: str, rows: int, columns: int) -> tuple[Any, Any]:
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise RefusedInput("--plot needs matplotlib: pip install 'jaxgen[bench]'") from error
    figure = Figure(figsize=(1.0 + 4.2 * columns, 0.6 + 3.2 * rows), layout="constrained", dpi=130)
    axes = figure.subplots(rows, columns, squeeze=False)
    for each in axes.flat:
        each.grid(alpha=0.3)
        each.spines[["top", "right"]].set_visible(False)
    figure.suptitle(title)
    return figure, axes


def _save(figure: Any, path: str) -> None:  # noqa: ANN401 (matplotlib is imported where needed)
    try:
        figure.savefig(path)
    except (OSError, ValueError) as error:
        raise RefusedInput(f"--plot {path}: {error}") from error


def _done(run: LoadRun) -> list[Outcome]:
    return [outcome for outcome in run.outcomes if not outcome.error]


def _distributions(axes: Any, run: LoadRun) -> None:  # noqa: ANN401
    """Which share of the requests was faster than how many milliseconds."""
    values = samples(_done(run))
    for axis, name, title in (
        (axes[0], "ttft", "time to first token"),
        (axes[1], "tpot", "time per output token"),
    ):
        found = 1e3 * np.sort(values[name])
        axis.set(title=title, xlabel="ms", ylabel="share of requests", ylim=(0, 1.02))
        if not found.size:
            continue
        axis.step(found, np.arange(1, found.size + 1) / found.size, where="post")
        for percent, style in ((50, "--"), (99, ":")):
            mark = np.percentile(found, percent)
            axis.axvline(mark, color="gray", linestyle=style, label=f"p{percent}: {mark:.3g} ms")
        axis.set_xlim(0, 1.08 * found[-1])
        axis.legend(loc="lower right")


def _course(axes: Any, run: LoadRun) -> None:  # noqa: ANN401
    done = _done(run)
    end = max(outcome.start + outcome.latency for outcome in done)
    times, weights = [], []
    for outcome in done:
        pieces = outcome.start + outcome.ttft + np.cumsum([0.0, *outcome.gaps])
        times.append(pieces)
        weights.append(np.full(pieces.size, outcome.output_tokens / pieces.size))
    _rate(axes[0], np.concatenate(times), np.concatenate(weights), end, "tokens/s")
    axes[0].set(title="output", xlabel="s")
    begins = sorted(outcome.start for outcome in done)
    ends = sorted(outcome.start + outcome.latency for outcome in done)
    moments = np.linspace(0, end, 1000)
    under_way = np.searchsorted(begins, moments, "right") - np.searchsorted(ends, moments, "right")
    axes[1].step(moments, under_way, where="post")
    axes[1].set(title="requests under way", xlabel="s", xlim=(0, end))
    axes[1].set_ylim(0, 1.08 * under_way.max())
    axes[1].locator_params(axis="y", integer=True)


def _rate(axis: Any, times: Any, weights: Any, end: float, label: str) -> None:  # noqa: ANN401
    """Tokens a second over time, and their average."""
    counts, edges = np.histogram(times, bins=_SMOOTHED, range=(0, end), weights=weights)
    axis.stairs(counts / np.diff(edges), edges, fill=True, alpha=0.5)
    average = counts.sum() / end
    axis.axhline(average, color="gray", linestyle="--", label=f"average {average:,.0f} {label}")
    axis.set(xlim=(0, end), ylabel=label)
    axis.set_ylim(0, 1.15 * (counts / np.diff(edges)).max())
    axis.legend(loc="upper right")


def _sweep(axes: Any, results: Sequence[dict[str, Any]], runs: Sequence[LoadRun]) -> None:  # noqa: ANN401
    """Latencies at each rate, and how much of it was served; an infinite one stands at the end."""
    rates = [result["request_rate"] for result in results]
    names = [rate if rate == "inf" else f"{rate:g}" for rate in rates]
    places = np.arange(len(names))
    for axis, name, title in (
        (axes[0], "ttft", "time to first token, ms"),
        (axes[1], "tpot", "time per output token, ms"),
    ):
        values = [1e3 * np.asarray(samples(_done(run))[name]) for run in runs]
        for percent, style in ((99, "o:"), (90, "o--"), (50, "o-")):
            found = [np.percentile(each, percent) if each.size else np.nan for each in values]
            axis.plot(places, found, style, label=f"p{percent}")
        axis.set(title=title)
        axis.legend()
    if np.nanmax(axes[0].get_ylim()) > 20 * max(1e-9, min(_medians(runs))):
        axes[0].set_yscale("log")
    else:
        axes[0].set_ylim(bottom=0)
    axes[1].set_ylim(0, 1.1 * axes[1].get_ylim()[1])
    served = axes[2].bar(places, [result["output_throughput"] for result in results], alpha=0.6)
    axes[2].bar_label(served, [f"{result['request_throughput']:.3g}/s" for result in results])
    axes[2].set(title="output tokens/s (above the bars: requests/s)")
    axes[2].margins(y=0.1)
    for axis in axes:
        axis.set_xticks(places, names)
        axis.set_xlabel("requests/s")


def _medians(runs: Sequence[LoadRun]) -> list[float]:
    return [1e3 * float(np.median(samples(_done(run))["ttft"])) for run in runs]
