"""The options of `jaxgen bench`, in vLLM's names."""

import argparse
import json
from typing import Any

_HELP = "a checkpoint folder, a config.json, or one of the shapes shipped with jaxgen (see docs)"


def add_bench(commands: Any, engine_options: argparse.ArgumentParser) -> None:  # noqa: ANN401
    """Adds `bench latency|throughput|startup|host|simulate` to argparse's subcommands."""
    bench = commands.add_parser("bench", help="measure, beside the device's own ceilings")
    kinds = bench.add_subparsers(dest="bench", required=True, metavar="WHAT")
    _latency(_kind(kinds, engine_options, "latency", "one batch, prefill and decode steps"))
    _throughput(_kind(kinds, engine_options, "throughput", "many requests at once, offline"))
    _kind(kinds, engine_options, "startup", "from a checkpoint to the first token")
    _host(kinds.add_parser("host", help="what a decode step costs the host, without a device"))
    _simulate(
        kinds.add_parser(
            "simulate",
            parents=[engine_options],
            help="a trace through the scheduler, against a cost model",
        )
    )


def _kind(
    kinds: Any,  # noqa: ANN401
    engine_options: argparse.ArgumentParser,
    name: str,
    help_text: str,
) -> argparse.ArgumentParser:
    parser = kinds.add_parser(name, parents=[engine_options], help=help_text)
    parser.add_argument("--model", required=True, help=_HELP)
    parser.add_argument("--load-format", choices=("auto", "dummy"), default="auto")
    parser.add_argument(
        "--hf-overrides", type=_json_object, default={}, metavar="JSON", help="of the config"
    )
    parser.add_argument("--dtype")
    parser.add_argument("--tensor-parallel-size", type=int, metavar="N")
    parser.add_argument("--policy")
    parser.add_argument("--output-json", metavar="FILE", help="write the result there as well")
    return parser


def _latency(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--input-len", type=int, default=32, metavar="N")
    parser.add_argument("--output-len", type=int, default=128, metavar="N")
    parser.add_argument("--batch-size", type=int, default=8, metavar="N")
    parser.add_argument("--num-iters-warmup", type=int, default=10, metavar="N")
    parser.add_argument("--num-iters", type=int, default=30, metavar="N")


def _throughput(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--dataset-name", choices=("random", "uniform"), default="random")
    parser.add_argument("--num-prompts", type=int, default=1000, metavar="N")
    parser.add_argument("--random-input-len", type=int, default=1024, metavar="N")
    parser.add_argument("--random-output-len", type=int, default=128, metavar="N")
    parser.add_argument("--random-range-ratio", type=float, default=0.0, metavar="R")
    parser.add_argument(
        "--random-input-range", type=_range, default=(128, 1024), metavar="LOW:HIGH"
    )
    parser.add_argument("--random-output-range", type=_range, default=(64, 512), metavar="LOW:HIGH")


def _host(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--batch-size", type=_positive, default=256, metavar="N")
    parser.add_argument("--input-len", type=_positive, default=64, metavar="N")
    parser.add_argument("--output-len", type=_positive, default=400, metavar="N")
    parser.add_argument("--seed", type=int, metavar="N")
    _output(parser)


def _simulate(parser: argparse.ArgumentParser) -> None:
    trace = parser.add_argument_group("trace", "Poisson arrivals, or a file of them")
    trace.add_argument("--request-rate", type=_number, default=16.0, metavar="PER_SECOND")
    trace.add_argument("--num-prompts", type=_positive, default=512, metavar="N")
    for option, span in (
        ("--random-input-range", (128, 1024)),
        ("--random-output-range", (64, 512)),
    ):
        trace.add_argument(option, type=_range, default=span, metavar="LOW:HIGH")
    trace.add_argument(
        "--random-prefix-len", type=int, default=0, metavar="N", help="that all prompts begin with"
    )
    trace.add_argument(
        "--trace",
        metavar="FILE",
        help='instead: JSON lines of {"arrival": seconds, "input_len": N, "output_len": N}',
    )
    cost = parser.add_argument_group("cost of a step", "defaults: an 8B model on an H200")
    cost.add_argument("--step-ms", type=_number, default=4.2, metavar="MS", help="of any step")
    cost.add_argument("--token-us", type=_number, default=25.0, metavar="US", help="a new token")
    cost.add_argument(
        "--kv-token-ns", type=_number, default=33.0, metavar="NS", help="a token attended to"
    )
    _output(parser)


def _output(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--output-json", metavar="FILE", help="write it there as well")


def _positive(text: str) -> int:
    number = int(text) if text.isdecimal() else 0
    if number < 1:
        raise argparse.ArgumentTypeError(f"expected a number from 1 on, got {text!r}")
    return number


def _number(text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = 0.0
    if not 0 < number < float("inf"):
        raise argparse.ArgumentTypeError(f"expected a number above 0, got {text!r}")
    return number


def _range(text: str) -> tuple[int, int]:
    low, _, high = text.partition(":")
    try:
        return int(low), int(high)
    except ValueError:
        raise argparse.ArgumentTypeError(f"expected LOW:HIGH, got {text!r}") from None


def _json_object(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        raise argparse.ArgumentTypeError(f"expected a JSON object: {error}") from None
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f"expected a JSON object, got {text!r}")
    return value
