"""From options to an opened model: what is not given is chosen for serving few prompts.

Shapes compile as they are met, so that a command pays for the few that it uses.
"""

import argparse
from pathlib import Path
from typing import Any

import jax

from jaxgen.commands.model_config import read_model_config, with_weights
from jaxgen.compile_cache import use_compile_cache
from jaxgen.config import EngineConfig
from jaxgen.engine.build import config_checkpoint
from jaxgen.opened import OpenedModel, open_model
from jaxgen_checkpoints.checkpoint import Checkpoint
from jaxgen_checkpoints.errors import RefusedInput

CPU_STEP_TOKENS = 256
"""Tokens in one step on a CPU, which gains nothing from larger ones."""

_ENGINE_OPTIONS = (
    "dtype",
    "tensor_parallel_size",
    "expert_parallel_size",
    "enable_expert_parallel",
    "max_model_len",
    "block_size",
    "max_num_seqs",
    "max_num_batched_tokens",
    "kv_cache_memory_bytes",
    "num_gpu_blocks_override",
    "seed",
    "gpu_memory_utilization",
    "enforce_eager",
    "enable_prefix_caching",
)


def engine_options(args: argparse.Namespace) -> dict[str, Any]:
    """EngineConfig's options, as far as the command has them and they were given."""
    options = {name: getattr(args, name, None) for name in _ENGINE_OPTIONS}
    return {name: value for name, value in options.items() if value is not None}


def limited_options(
    args: argparse.Namespace, sequences: int, step_tokens: int = CPU_STEP_TOKENS
) -> dict[str, Any]:
    """The same with limits that fit this many sequences, and on a CPU steps of so many tokens."""
    options = engine_options(args)
    options.setdefault("max_num_seqs", _at_most(sequences, options.get("max_num_batched_tokens")))
    if jax.default_backend() == "cpu":
        options.setdefault("max_num_batched_tokens", max(step_tokens, options["max_num_seqs"]))
    return options


def open_for(args: argparse.Namespace, sequences: int) -> OpenedModel:
    """The model of `args`, mapped and not loaded, for this many sequences at once."""
    use_compile_cache()
    load_format, tokenizer = getattr(args, "load_format", None) or "auto", args.tokenizer
    if load_format == "dummy":
        model: str | Path | Checkpoint = config_checkpoint(
            read_model_config(args.model), args.policy
        )
        tokenizer = tokenizer or (args.model if Path(args.model).is_dir() else None)
    else:
        model = with_weights(args.model)
    return open_model(
        model,
        EngineConfig.from_any(None, **limited_options(args, sequences)),
        tokenizer=tokenizer,
        chat_template=chat_template(getattr(args, "chat_template", None)),
        policy=args.policy,
        load_format=load_format,
    )


def chat_template(given: str | None) -> str | None:
    """The text of a template that was given as a file, or as itself."""
    if given is None or "{" in given:
        return given
    return read_text(Path(given), "--chat-template")


def read_text(path: Path, option: str) -> str:
    """The UTF-8 text of a file that an option names; RefusedInput naming the option."""
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise RefusedInput(f"{option} {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise RefusedInput(f"{option} {path}: not UTF-8 text: {error}") from error


def _at_most(sequences: int, limit: int | None) -> int:
    return sequences if limit is None else max(1, min(sequences, limit))
