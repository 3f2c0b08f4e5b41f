"""The options of `jaxgen serve`, in vLLM's names where vLLM has them."""

import argparse
from collections.abc import Sequence
from typing import Any

from jaxgen.commands.bench_values import json_object, number, whole
from jaxgen.commands.peer_options import add_peer_options

API_KEY_VARIABLE = "JAXGEN_API_KEY"


def add_serve(
    commands: Any,  # noqa: ANN401 (argparse does not name its type)
    parents: Sequence[argparse.ArgumentParser],
) -> None:
    """Adds `serve` to argparse's subcommands."""
    serve = commands.add_parser(
        "serve", parents=parents, help="an HTTP server that OpenAI's clients understand"
    )
    _listening(serve.add_argument_group("listening"))
    _model(serve.add_argument_group("answers"))
    _defaults(serve.add_argument_group("what requests leave out"))
    _limits(serve.add_argument_group("limits"))
    _browsers(serve.add_argument_group("browsers and logs"))
    add_peer_options(serve)


def _listening(group: Any) -> None:  # noqa: ANN401
    group.add_argument("--host", help="the address to listen on; default: all of them")
    group.add_argument("--port", type=int, metavar="N", help="default 8000; 0 takes a free one")
    group.add_argument(
        "--api-key",
        action="extend",
        nargs="+",
        metavar="KEY",
        help=f"any of these opens the server; also in ${API_KEY_VARIABLE}, with commas between",
    )
    group.add_argument("--ssl-keyfile", metavar="FILE")
    group.add_argument("--ssl-certfile", metavar="FILE")
    group.add_argument("--ssl-ca-certs", metavar="FILE", help="of clients' certificates")
    group.add_argument("--ssl-cert-reqs", type=int, metavar="N", help="2 demands one of clients")
    group.add_argument("--root-path", metavar="PATH", help="where a proxy puts this server")
    group.add_argument(
        *("--data-parallel-size", "-dp"),
        type=int,
        metavar="N",
        help="so many replicas behind the port, each on devices of its own; default 1",
    )
    group.add_argument("--replica", action="store_true", help=argparse.SUPPRESS)
    group.add_argument(
        "--shutdown-timeout",
        type=number(),
        metavar="SECONDS",
        help="what runs may take so long after SIGTERM; default 30",
    )


def _model(group: Any) -> None:  # noqa: ANN401
    group.add_argument(
        "--served-model-name",
        action="extend",
        nargs="+",
        metavar="NAME",
        help="what clients call the model; default: MODEL as it was given",
    )
    group.add_argument(
        "--load-format",
        choices=("auto", "dummy"),
        help="dummy: random weights, for load tests; MODEL may be a config.json or a shape's name",
    )
    group.add_argument(
        "--chat-template", metavar="FILE", help="a Jinja file (or its text) instead of the model's"
    )
    group.add_argument(
        "--default-chat-template-kwargs",
        type=json_object,
        metavar="JSON",
        dest="chat_template_defaults",
        help='variables of the template, like {"enable_thinking": false}; requests may change them',
    )
    group.add_argument(
        "--trust-request-chat-template",
        action="store_const",
        const=True,
        help="take chat templates from requests",
    )
    group.add_argument("--response-role", metavar="ROLE", help="of answers; default: assistant")
    group.add_argument(
        "--enable-auto-tool-choice",
        action="store_const",
        const=True,
        help='allow tool_choice "auto"; needs --tool-call-parser',
    )
    group.add_argument(
        "--tool-call-parser", metavar="NAME", help="hermes, qwen, llama3_json, mistral, deepseek_v3"
    )
    group.add_argument("--reasoning-parser", metavar="NAME", help="deepseek_r1, qwen3")


def _defaults(group: Any) -> None:  # noqa: ANN401
    group.add_argument(
        "--generation-config",
        choices=("auto", "vllm"),
        help="where a request's defaults come from: the checkpoint (auto), or nowhere (vllm)",
    )
    group.add_argument(
        "--override-generation-config",
        type=json_object,
        metavar="JSON",
        help='a request\'s defaults over these, like {"temperature": 0.6}',
    )
    group.add_argument(
        "--return-tokens-as-token-ids",
        action="store_const",
        const=True,
        help="logprobs name every token token_id:N, as if each request asked for it",
    )
    group.add_argument(
        "--enable-force-include-usage",
        action="store_const",
        const=True,
        dest="force_usage",
        help="streams end with their usage, as if each request asked for it",
    )


def _limits(group: Any) -> None:  # noqa: ANN401
    group.add_argument(
        "--max-num-queued-reqs",
        type=whole(1),
        metavar="N",
        dest="max_queued_requests",
        help="requests that may wait; more are told to come back (503)",
    )
    group.add_argument(
        "--max-request-bytes",
        type=whole(1),
        metavar="N",
        dest="max_body_bytes",
        help="of a request's body",
    )
    group.add_argument(
        "--max-header-bytes", type=int, metavar="N", dest="head_bytes", help="of all its headers"
    )


def _browsers(group: Any) -> None:  # noqa: ANN401
    for option, what in {
        "--allowed-origins": "web pages that may use the server: origins, or *",
        "--allowed-methods": "default: all",
        "--allowed-headers": "default: all",
    }.items():
        group.add_argument(option, action="extend", nargs="+", metavar="X", help=what)
    group.add_argument("--allow-credentials", action="store_const", const=True)
    group.add_argument(
        "--metrics-prefix", metavar="NAME", help="default: jaxgen; vllm suits its dashboards"
    )
    group.add_argument(
        *("--disable-access-log", "--disable-uvicorn-access-log"),
        action="store_const",
        const=False,
        dest="access_log",
        help="write no line for each request",
    )
