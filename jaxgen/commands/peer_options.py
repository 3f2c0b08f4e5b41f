"""Options of vLLM's server that `jaxgen serve` has no use for: always so, or refused with why.

A command line that was written for another server fails at what would be different here, and
nowhere else.
"""

import argparse
from collections.abc import Mapping, Sequence
from typing import Any

ALWAYS_SO = (
    *("--enable-chunked-prefill", "--async-scheduling", "--enable-request-id-headers"),
    *("--enable-prompt-tokens-details", "--enable-server-load-tracking"),
    *("--disable-log-requests", "--no-enable-log-requests", "--disable-frontend-multiprocessing"),
)
"""What they ask for is done without being asked."""

_NO_ADAPTERS = "there are no LoRA adapters here"
_TEXT_ONLY = "text only: neither pictures nor sound are read"
_WHOLE = "the checkpoint must be here: download it first"
REFUSED: Mapping[str, str] = {
    "--pipeline-parallel-size": "layers are not spread over devices: use --tensor-parallel-size",
    "--distributed-executor-backend": "one process has all devices of a replica",
    "--nnodes": "one host serves: use --data-parallel-size and --tensor-parallel-size there",
    "--quantization": "weights have the checkpoint's own format, or --dtype",
    "--kv-cache-dtype": "the KV cache has the activations' --dtype",
    "--calculate-kv-scales": "the KV cache has the activations' --dtype",
    "--cpu-offload-gb": "weights stay on the devices",
    "--swap-space": "what is preempted is computed again, not swapped",
    "--kv-transfer-config": "no KV cache is transferred",
    "--speculative-config": "there is no speculative decoding here",
    "--num-speculative-tokens": "there is no speculative decoding here",
    "--enable-lora": _NO_ADAPTERS,
    "--lora-modules": _NO_ADAPTERS,
    "--limit-mm-per-prompt": _TEXT_ONLY,
    "--mm-processor-kwargs": _TEXT_ONLY,
    "--language-model-only": _TEXT_ONLY,
    "--trust-remote-code": "no code of a checkpoint is ever run; leave it out",
    "--download-dir": _WHOLE,
    "--revision": _WHOLE,
    "--tokenizer-revision": _WHOLE,
    "--hf-token": _WHOLE,
    "--hf-overrides": "edit the checkpoint's config.json",
    "--skip-tokenizer-init": "a checkpoint without a tokenizer is served by token ids",
    "--tokenizer-mode": "the checkpoint's files say which tokenizer it is",
    "--max-logprobs": "at most 20 are given",
    "--no-enable-chunked-prefill": "prompts are always split where a step is full",
    "--scheduling-policy": "requests are served by their priority, then as they came",
    "--max-num-queued-tokens": "the queue is bounded by --max-num-queued-reqs",
    "--structured-outputs-config": "there is one grammar library; --reasoning-parser is an option",
    "--guided-decoding-backend": "there is one grammar library",
    "--compilation-config": "every step is compiled by XLA; --enforce-eager compiles none",
    "--enable-sleep-mode": "the engine does not sleep",
    "--runner": "models here generate text",
    "--task": "models here generate text",
    "--middleware": "wrap jaxgen.serving.create_app, which is an ASGI application",
    "--uvicorn-log-level": "there is no such level: --disable-access-log leaves lines out",
    "--uds": "a server listens on a port: use --host and --port",
    "--config": "options are given on the command line",
    "--model": "the model is the first word after serve",
    "--enable-log-requests": "no prompt is ever written to a log",
    "--log-config-file": "Python's logging is left to who wraps jaxgen.serving.run_server",
    "--chat-template-content-format": "templates are given content as text",
    "--exclude-tools-when-tool-choice-none": "a template is given the tools of the request",
    "--tool-parser-plugin": "parsers are those of --tool-call-parser",
    "--reasoning-parser-plugin": "parsers are those of --reasoning-parser",
    "--tool-server": "no tool is run here: a client answers the calls",
    "--disable-log-stats": "no statistics are logged: they are at /metrics",
    "--show-hidden-metrics-for-version": "no metric is hidden",
}


def add_peer_options(parser: argparse.ArgumentParser) -> None:
    """Adds what is not shown in --help."""
    for option in ALWAYS_SO:
        parser.add_argument(option, action=_AlwaysSo, nargs=0, help=argparse.SUPPRESS)
    for option in REFUSED:
        parser.add_argument(option, action=_Refused, nargs="?", help=argparse.SUPPRESS)


class _AlwaysSo(argparse.Action):
    """Leaves no trace in the options."""

    def __init__(self, **options: Any) -> None:  # noqa: ANN401 (argparse's own, by name)
        options |= {"dest": argparse.SUPPRESS, "default": argparse.SUPPRESS}
        super().__init__(**options)

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: str | Sequence[Any] | None,
        option_string: str | None = None,
    ) -> None:
        """Nothing is to be done."""


class _Refused(_AlwaysSo):
    """Ends the program with why."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: str | Sequence[Any] | None,
        option_string: str | None = None,
    ) -> None:
        """The parser's own one line, exit code 2."""
        parser.error(f"{option_string}: {REFUSED[option_string or '']}")
