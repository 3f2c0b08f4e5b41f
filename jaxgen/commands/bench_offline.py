"""`jaxgen bench latency|throughput|startup`: builds an engine for the workload and measures it."""

import argparse
from typing import Any

from jaxgen.bench.latency import run_latency
from jaxgen.bench.progress import Progress
from jaxgen.bench.roofline import measure_ceilings
from jaxgen.bench.startup import run_startup
from jaxgen.bench.throughput import run_throughput
from jaxgen.commands.bench_dataset import read_dataset
from jaxgen.commands.model_config import read_model_config, with_weights
from jaxgen.commands.opening import limited_options
from jaxgen.compile_cache import use_compile_cache
from jaxgen.config import EngineConfig
from jaxgen.engine.build import build_engine, config_checkpoint, describe
from jaxgen.engine.engine import InferenceEngine
from jaxgen.text.checkpoint_tokenizer import checkpoint_tokenizer
from jaxgen_checkpoints.checkpoint import Checkpoint, open_checkpoint
from jaxgen_checkpoints.errors import RefusedInput


def latency(args: argparse.Namespace) -> dict[str, Any]:
    """One batch of prompts of one length."""
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


def throughput(args: argparse.Namespace) -> dict[str, Any]:
    """A dataset, all of it at once."""
    checkpoint = _checkpoint(args)
    vocab = int(checkpoint.config["vocab_size"])
    tokenizer = None
    if args.dataset_name == "custom":
        tokenizer = checkpoint_tokenizer(checkpoint, vocab_size=vocab, folder=args.tokenizer)
        if tokenizer is None:
            raise RefusedInput("--dataset-name custom needs a tokenizer: give --tokenizer FOLDER")
    encode = None if tokenizer is None else tokenizer.encode
    requests = read_dataset(args, lambda: vocab, encode)
    longest = max(len(request.prompt_ids) + request.output_len for request in requests)
    engine = _engine(args, sequences=256, longest=longest, compile_ahead=True)
    engine.warm_up()
    progress: list[Progress] = []
    result = run_throughput(engine, requests, progress)
    if args.plot:
        from jaxgen.commands.bench_picture import draw_progress  # matplotlib, where it is asked for

        draw_progress(progress, f"{args.model}, {args.dataset_name}", args.plot)
    return result


def startup(args: argparse.Namespace) -> dict[str, Any]:
    """From a checkpoint to the first token."""
    return run_startup(lambda: _engine(args, sequences=1, longest=None, compile_ahead=True))


def _engine(
    args: argparse.Namespace, *, sequences: int, longest: int | None, compile_ahead: bool = False
) -> InferenceEngine:
    use_compile_cache()
    options = limited_options(args, sequences)
    if longest is not None:
        options.setdefault("max_model_len", longest)
    config = EngineConfig.from_any(None, **options)
    described = describe(_checkpoint(args), config, policy=args.policy)
    return build_engine(
        described, config, load_format=args.load_format, compile_ahead=compile_ahead
    )


def _checkpoint(args: argparse.Namespace) -> Checkpoint:
    """The checkpoint, or with --load-format dummy its config alone."""
    if args.load_format == "dummy":
        return config_checkpoint(
            {**read_model_config(args.model), **args.hf_overrides}, args.policy
        )
    if args.hf_overrides:
        raise RefusedInput("--hf-overrides needs --load-format dummy: real weights have one config")
    return open_checkpoint(with_weights(args.model))
