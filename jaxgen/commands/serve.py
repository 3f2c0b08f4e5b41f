"""`jaxgen serve`: opens a model, puts it behind HTTP, and runs until it is told to stop."""

import argparse
import json
import logging
import os
import sys
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

import jax

from jaxgen import serving
from jaxgen.commands.opening import open_for
from jaxgen.commands.serve_options import API_KEY_VARIABLE
from jaxgen.compile_cache import program_folder
from jaxgen.config import DEFAULT_MAX_NUM_SEQS
from jaxgen.llm import LLM
from jaxgen.opened import OpenedModel
from jaxgen.sampling import SamplingParams
from jaxgen.serving.replicas.adoption import adopted, device_environments, replica_options
from jaxgen_checkpoints.errors import ConfigError

CPU_SEQUENCES = 32
"""Sequences in one step where --max-num-seqs is not given and there is no accelerator."""

logger = logging.getLogger(__name__)

_RENAMED = {
    "served_model_name": "served_model_names",
    "api_key": "api_keys",
    "shutdown_timeout": "drain_seconds",
}


_GENERATION_NAMES = {"max_new_tokens": "max_tokens", "min_new_tokens": "min_tokens"}


def run(args: argparse.Namespace) -> int:
    """0 after SIGTERM or Ctrl-C. What cannot be served is refused before a weight is read."""
    if args.replica:
        args = adopted(sys.stdin.fileno())
    replicas = 1 if args.data_parallel_size is None else args.data_parallel_size
    if replicas < 1:
        raise ConfigError(f"data_parallel_size must be at least 1, got {replicas}")
    if replicas > 1:
        return run_front(args, replicas)
    listen = serving.ListenSettings(**_given(args, serving.ListenSettings))
    with serving.bind(listen) as bound:
        cpu = jax.default_backend() == "cpu"
        opened = open_for(args, sequences=CPU_SEQUENCES if cpu else DEFAULT_MAX_NUM_SEQS)
        settings = server_settings(args, opened)
        _tell_of_compiling(opened.config.enforce_eager)
        llm = LLM.of(opened, compile_ahead=True)
        engine = serving.AsyncEngine.of(llm, name=args.model)

        def prepare() -> None:
            llm.warm_up()
            serving.settle_process()

        app = serving.create_app(engine, settings, prepare=prepare)
        serving.run_server(app, listen, bound)
    if app.state.serving.preparing:
        _leave_compilers()
    return 0


def _tell_of_compiling(eager: bool) -> None:
    """Why a first start takes minutes, and where later ones find what it made."""
    if eager:
        return
    folder = program_folder()
    kept = "" if folder is None else f"; programs are kept in {folder}"
    logger.info("every step is compiled before the first request%s", kept)


def _leave_compilers() -> None:
    """Ends the process: Python would wait for each compiler's thread, minutes for a large model."""
    logging.shutdown()
    sys.stdout.flush()
    os._exit(0)


def run_front(args: argparse.Namespace, replicas: int) -> int:
    """Serves with several processes behind one port; this one touches no device."""
    listen = serving.ListenSettings(**_given(args, serving.ListenSettings))
    devices = (args.tensor_parallel_size or 1) * (args.expert_parallel_size or 1)
    environments = device_environments(replicas, devices, os.environ)
    with serving.bind(listen) as bound:
        fleet = serving.Fleet(replica_options(args), environments)
        serving.run_server(
            serving.create_front(fleet, serving.ServerSettings(**_client_settings(args))),
            listen,
            bound,
        )
    return 0


def server_settings(args: argparse.Namespace, opened: OpenedModel) -> "serving.ServerSettings":
    """The options that concern clients; ConfigError for those that do not fit together."""
    return serving.ServerSettings(
        sampling_defaults=_sampling_defaults(args, opened), **_client_settings(args)
    )


def _client_settings(args: argparse.Namespace) -> dict[str, Any]:
    """Of ServerSettings' fields those that need no model."""
    given = _given(args, serving.ServerSettings)
    # An empty --api-key, a shell's unset variable, is refused; without any the server is open.
    known = (key for key in os.environ.get(API_KEY_VARIABLE, "").split(",") if key)
    given["api_keys"] = (*given.get("api_keys", ()), *known)
    given["served_model_names"] = given.get("served_model_names") or (args.model,)
    return given


def _given(
    args: argparse.Namespace,
    settings: "type[serving.ListenSettings] | type[serving.ServerSettings]",
) -> dict[str, Any]:
    """What was given of a dataclass' fields; lists become tuples."""
    options = {_RENAMED.get(name, name): value for name, value in vars(args).items()}
    known = {field.name for field in fields(settings)}
    return {
        name: tuple(_listed(value)) if isinstance(value, list) else value
        for name, value in options.items()
        if name in known and value is not None
    }


def _listed(values: list[str]) -> list[str]:
    """Words, or vLLM's way of writing them: one JSON list."""
    if len(values) != 1 or not values[0].startswith("["):
        return values
    try:
        return [str(value) for value in json.loads(values[0])]
    except ValueError as error:
        raise ConfigError(f"{values[0]} is not a JSON list: {error}") from None


def _sampling_defaults(args: argparse.Namespace, opened: OpenedModel) -> Mapping[str, Any]:
    """Of the checkpoint; like vLLM, a client that wants greedy answers asks for temperature 0."""
    held = {} if args.generation_config == "vllm" else opened.sampling_defaults
    defaults = {
        name: value for name, value in held.items() if (name, value) != ("temperature", 0.0)
    }
    return {**defaults, **_override(args.override_generation_config)}


def _override(given: Mapping[str, Any] | None) -> Mapping[str, Any]:
    """--override-generation-config; InvalidParameter for what no request could ask for."""
    renamed = {_GENERATION_NAMES.get(name, name): value for name, value in (given or {}).items()}
    SamplingParams.from_mapping(renamed)
    return renamed
