"""The options of `jaxgen bench serve`: those of `vllm bench serve`, as far as they are served."""

import argparse
from typing import Any

from jaxgen.commands.bench_dataset_options import add_dataset
from jaxgen.commands.bench_values import finite_rate, json_object, number, pair, rate, whole

METRICS = ("ttft", "tpot", "itl", "e2el")
"""Time to the first output, of a token after it, between two pieces of output, and of all."""

OBJECTIVES = ("ttft", "tpot", "e2el")
"""Those that a request has one number of."""

SAMPLING = {
    "top_p": float,
    "top_k": int,
    "min_p": float,
    "temperature": float,
    "frequency_penalty": float,
    "presence_penalty": float,
    "repetition_penalty": float,
}
"""Options that are sent as body members of the same name."""


def add_bench_serve(parser: argparse.ArgumentParser) -> None:
    """Adds them all; what vLLM has beside them is refused by name, as any unknown option."""
    _server(parser.add_argument_group("server"))
    _load(parser.add_argument_group("load"))
    add_dataset(parser, "random")
    _sampling(parser.add_argument_group("sampling", "what is not given, the server chooses"))
    _report(parser.add_argument_group("report"))


def _server(group: Any) -> None:  # noqa: ANN401 (argparse does not name its type)
    group.add_argument(
        "--backend",
        choices=("openai", "vllm", "openai-chat"),
        default="openai",
        help="/v1/completions (openai, vllm) or /v1/chat/completions",
    )
    group.add_argument("--base-url", metavar="URL", help="instead of --host and --port")
    group.add_argument("--host", default="127.0.0.1")
    group.add_argument("--port", type=int, default=8000, metavar="N")
    group.add_argument("--endpoint", metavar="PATH", help="default: the backend's usual one")
    group.add_argument("--model", help="whom to ask; default: the server's first model")
    group.add_argument(
        "--served-model-name", metavar="NAME", help="its name in requests, if not --model"
    )
    group.add_argument(
        "--tokenizer",
        metavar="FOLDER",
        help="a checkpoint folder, a config.json or a shipped shape that has the vocabulary; "
        "default: --model, or what the server says",
    )
    group.add_argument(
        "--header", nargs="*", type=pair, default=[], metavar="KEY=VALUE", help="of each request"
    )
    group.add_argument("--insecure", action="store_true", help="take any certificate")
    group.add_argument(
        "--ready-check-timeout-sec",
        type=number(),
        default=0.0,
        metavar="S",
        help="ask for so long until a first answer comes; default 0: do not",
    )


def _load(group: Any) -> None:  # noqa: ANN401
    group.add_argument(
        "--request-rate",
        nargs="+",
        type=rate,
        default=[float("inf")],
        metavar="R",
        help="requests a second, or inf: all at once; several rates are a sweep",
    )
    group.add_argument(
        "--burstiness",
        type=rate,
        default=1.0,
        metavar="B",
        help="1 is Poisson, less comes in bursts, more is more even",
    )
    group.add_argument(
        "--ramp-up-strategy",
        choices=("linear", "exponential"),
        help="from --ramp-up-start-rps to --ramp-up-end-rps, in place of --request-rate",
    )
    for option in ("--ramp-up-start-rps", "--ramp-up-end-rps"):
        group.add_argument(option, type=finite_rate, metavar="R", help="requests a second")
    group.add_argument(
        "--max-concurrency", type=whole(1), metavar="N", help="requests under way at one time"
    )
    group.add_argument(
        "--num-warmups", type=whole(0), default=0, metavar="N", help="requests that are not told"
    )
    group.add_argument("--seed", type=whole(0), default=0, metavar="N")
    group.add_argument(
        "--request-id-prefix", default="bench-", metavar="TEXT", help="of X-Request-Id"
    )
    group.add_argument("--disable-tqdm", action="store_true", help="no progress bar")


def _sampling(group: Any) -> None:  # noqa: ANN401
    for name, kind in SAMPLING.items():
        group.add_argument(f"--{name.replace('_', '-')}", type=kind, metavar="X")
    group.add_argument(
        "--ignore-eos",
        action="store_true",
        help="as the datasets whose lengths are drawn do anyway",
    )
    group.add_argument("--logprobs", type=whole(0), metavar="K", help="of /v1/completions")
    group.add_argument(
        "--extra-body", type=json_object, default={}, metavar="JSON", help="of each request"
    )


def _report(group: Any) -> None:  # noqa: ANN401
    group.add_argument(
        "--percentile-metrics",
        type=_metrics,
        default=("ttft", "tpot", "itl"),
        metavar="M,M",
        help=f"of {', '.join(METRICS)}; default ttft,tpot,itl",
    )
    group.add_argument(
        "--metric-percentiles",
        type=_percentiles,
        default=(99.0,),
        metavar="P,P",
        help="default 99",
    )
    group.add_argument(
        "--goodput",
        nargs="+",
        type=_objective,
        metavar="M:MS",
        help=f"what a good request holds: {', '.join(OBJECTIVES)}, in milliseconds",
    )
    group.add_argument("--json", action="store_true", help="print one JSON object")
    group.add_argument("--output-json", metavar="FILE", help="write it there as well")
    group.add_argument("--save-result", action="store_true", help="write vLLM's result file")
    group.add_argument("--append-result", action="store_true", help="as a line after others")
    group.add_argument("--save-detailed", action="store_true", help="with each request's numbers")
    group.add_argument("--result-dir", metavar="FOLDER", help="of the result file")
    group.add_argument("--result-filename", metavar="FILE", help="instead of a name with the date")
    group.add_argument("--label", metavar="TEXT", help="in the result; default: the backend")
    group.add_argument(
        "--metadata", nargs="*", type=pair, default=[], metavar="KEY=VALUE", help="for the result"
    )
    group.add_argument(
        "--plot", metavar="FILE", help="draw latencies and throughput, as .png or .svg"
    )


def _metrics(text: str) -> tuple[str, ...]:
    names = tuple(name.strip() for name in text.split(","))
    if unknown := set(names) - set(METRICS):
        known = ", ".join(METRICS)
        raise argparse.ArgumentTypeError(f"expected some of {known}, got {sorted(unknown)}")
    return names


def _percentiles(text: str) -> tuple[float, ...]:
    try:
        found = tuple(float(part) for part in text.split(","))
    except ValueError:
        found = (-1.0,)
    if not all(0 <= each <= 100 for each in found):
        raise argparse.ArgumentTypeError(f"expected numbers from 0 to 100, got {text!r}")
    return found


def _objective(text: str) -> tuple[str, float]:
    name, _, most = text.partition(":")
    if name not in OBJECTIVES:
        known = ", ".join(OBJECTIVES)
        raise argparse.ArgumentTypeError(f"expected one of {known} before the colon, got {text!r}")
    return name, number()(most)
