"""The options of `jaxgen bench`, in vLLM's names."""

import argparse
from typing import Any

from jaxgen.commands.bench_dataset_options import add_dataset
from jaxgen.commands.bench_serve_options import add_bench_serve
from jaxgen.commands.bench_values import finite, json_object, whole
from jaxgen.commands.mesh_options import add_mesh

KERNELS = ("attention", "latent attention", "layer products", "layer chain", "experts")
_HELP = "a checkpoint folder, a config.json, or one of the shapes shipped with jaxgen (see docs)"


def add_bench(commands: Any, engine_options: argparse.ArgumentParser) -> None:  # noqa: ANN401
    """Adds `bench` and its kinds to argparse's subcommands."""
    bench = commands.add_parser("bench", help="measure, beside the device's own ceilings")
    kinds = bench.add_subparsers(dest="bench", required=True, metavar="WHAT")
    _latency(_kind(kinds, engine_options, "latency", "one batch, prefill and decode steps"))
    _throughput(_kind(kinds, engine_options, "throughput", "many requests at once, offline"))
    _kind(kinds, engine_options, "startup", "from a checkpoint to the first token")
    add_bench_serve(kinds.add_parser("serve", help="a load on a server, of OpenAI's routes"))
    _kernels(kinds.add_parser("kernels", help="each kernel, beside its reference and the roofline"))
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
        "--hf-overrides", type=json_object, default={}, metavar="JSON", help="of the config"
    )
    parser.add_argument("--dtype")
    add_mesh(parser)
    parser.add_argument("--policy")
    parser.add_argument("--output-json", metavar="FILE", help="write the result there as well")
    return parser


def _latency(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--input-len", type=whole(1), default=32, metavar="N")
    parser.add_argument("--output-len", type=whole(1), default=128, metavar="N")
    parser.add_argument("--batch-size", type=whole(1), default=8, metavar="N")
    parser.add_argument("--num-iters-warmup", type=whole(0), default=10, metavar="N")
    parser.add_argument("--num-iters", type=whole(1), default=30, metavar="N")


def _throughput(parser: argparse.ArgumentParser) -> None:
    add_dataset(parser, "random")
    parser.add_argument("--tokenizer", metavar="FOLDER", help="of `custom`, instead of the model's")
    parser.add_argument("--plot", metavar="FILE", help="draw the run's course, as .png or .svg")


def _kernels(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--kernels",
        nargs="+",
        choices=KERNELS,
        metavar="KERNEL",
        help=f"of {', '.join(KERNELS)}; default: all",
    )
    parser.add_argument("--match", default="", metavar="TEXT", help="only shapes named so")
    parser.add_argument("--seed", type=whole(0), metavar="N", help="default: another each time")
    _output(parser)


def _host(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--batch-size", type=whole(1), default=256, metavar="N")
    parser.add_argument("--input-len", type=whole(1), default=64, metavar="N")
    parser.add_argument("--output-len", type=whole(1), default=400, metavar="N")
    parser.add_argument("--seed", type=int, metavar="N")
    _output(parser)


def _simulate(parser: argparse.ArgumentParser) -> None:
    trace = parser.add_argument_group("trace", "Poisson arrivals, or a file of them")
    trace.add_argument("--request-rate", type=finite, default=16.0, metavar="PER_SECOND")
    trace.add_argument(
        "--trace",
        metavar="FILE",
        help='instead: JSON lines of {"arrival": seconds, "input_len": N, "output_len": N}',
    )
    add_dataset(parser, "uniform", prompts=512)
    cost = parser.add_argument_group("cost of a step", "defaults: an 8B model on an H200")
    for option, default, unit, what in (
        ("--step-ms", 1.0, "MS", "of any step, beside what follows"),
        ("--weights-ms", 3.9, "MS", "the least that the products of a step take"),
        ("--token-us", 22.5, "US", "a new token's products"),
        ("--kv-token-ns", 31.3, "NS", "a token attended to"),
    ):
        cost.add_argument(option, type=finite, default=default, metavar=unit, help=what)
    _output(parser)


def _output(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--output-json", metavar="FILE", help="write it there as well")
