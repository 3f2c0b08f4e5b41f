"""`jaxgen bench`: builds an engine for the workload, measures it, prints one JSON object."""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from jaxgen.bench.latency import run_latency
from jaxgen.bench.roofline import measure_ceilings
from jaxgen.bench.startup import run_startup
from jaxgen.bench.throughput import run_throughput
from jaxgen.bench.workload import BenchRequest, random, uniform
from jaxgen.commands import bench_simulate
from jaxgen.commands.model_config import read_model_config
from jaxgen.commands.opening import limited_options
from jaxgen.compile_cache import use_compile_cache
from jaxgen.config import EngineConfig
from jaxgen.engine.build import build_engine, config_checkpoint, describe, load_model
from jaxgen.engine.engine import InferenceEngine
from jaxgen.hub import local_model
from jaxgen_checkpoints.checkpoint import Checkpoint, open_checkpoint
from jaxgen_checkpoints.errors import RefusedInput


def run(args: argparse.Namespace) -> int:
    """Measures and prints; --output-json writes the same object to a file."""
    use_compile_cache()
    kinds = {
        "latency": _latency,
        "throughput": _throughput,
        "startup": _startup,
        "host": bench_simulate.host,
        "simulate": bench_simulate.simulate,
    }
    result = kinds[args.bench](args)
    text = json.dumps(result, indent=1) + "\n"
    lines = args.bench in ("host", "simulate") and not args.json
    sys.stdout.write(bench_simulate.as_lines(result) if lines else text)
    if args.output_json:
        Path(args.output_json).write_text(text)
    return 0


def _latency(args: argparse.Namespace) -> dict[str, Any]:
    length = args.input_len + args.output_len
    engine = _engine(args, sequences=args.batch_size, longest=length)
    ceilings = measure_ceilings(engine.model.dtype)
    return run_latency(
        engine,
        ceilings,
        input_len=args.input_len,
        output_len=args.output_len,
        batch_size=args.batch_size,
        num_iters_warmup=args.num_iters_warmup,
        num_iters=args.num_iters,
        seed=args.seed or 0,
    )


def _throughput(args: argparse.Namespace) -> dict[str, Any]:
    checkpoint = _checkpoint(args)
    requests = _requests(args, int(checkpoint.config["vocab_size"]))
    longest = max(len(request.prompt_ids) + request.output_len for request in requests)
    engine = _engine(args, sequences=256, longest=longest)
    engine.warm_up()
    return run_throughput(engine, requests)


def _startup(args: argparse.Namespace) -> dict[str, Any]:
    return run_startup(lambda: _engine(args, sequences=1, longest=None))


def _requests(args: argparse.Namespace, vocab: int) -> list[BenchRequest]:
    seed = args.seed or 0
    if args.dataset_name == "uniform":
        return uniform(
            args.num_prompts, args.random_input_range, args.random_output_range, vocab, seed
        )
    return random(
        args.num_prompts,
        args.random_input_len,
        args.random_output_len,
        args.random_range_ratio,
        vocab,
        seed,
    )


def _engine(args: argparse.Namespace, *, sequences: int, longest: int | None) -> InferenceEngine:
    options = limited_options(args, sequences)
    if longest is not None:
        options.setdefault("max_model_len", longest)
    config = EngineConfig.from_any(None, **options)
    described = describe(
        _checkpoint(args), tensor_parallel_size=config.tensor_parallel_size, policy=args.policy
    )
    return build_engine(load_model(described, config.dtype, load_format=args.load_format), config)


def _checkpoint(args: argparse.Namespace) -> Checkpoint:
    """The checkpoint, or with --load-format dummy its config alone."""
    if args.load_format == "dummy":
        return config_checkpoint(
            {**read_model_config(args.model), **args.hf_overrides}, args.policy
        )
    if args.hf_overrides:
        raise RefusedInput("--hf-overrides needs --load-format dummy: real weights have one config")
    return open_checkpoint(local_model(args.model))
