"""Every option of the command line, in vLLM's names; a command takes only those that concern it.

Defaults are None: "not given" is told from "given as the default", and the engine has the defaults.
"""

import argparse
from collections.abc import Sequence
from typing import Any, NoReturn

from jaxgen.commands.bench_options import add_bench
from jaxgen.commands.mesh_options import add_mesh
from jaxgen.commands.plan_options import add_plan
from jaxgen.commands.serve_options import add_serve
from jaxgen.commands.terminal import say

_MODEL_HELP = "a checkpoint folder, a .gguf file, a snapshot folder, or a hub id (ORG/NAME)"


class Parser(argparse.ArgumentParser):
    """argparse without abbreviated options, whose errors are one line."""

    def __init__(self, **options: Any) -> None:  # noqa: ANN401 (argparse's own, by name)
        options["allow_abbrev"] = False
        super().__init__(**options)

    def error(self, message: str) -> NoReturn:
        """One line on stderr, exit code 2."""
        self.exit(2, f"error: {message} (see {self.prog} --help)\n")


class ShowVersion(argparse.Action):
    """Prints the version of the installed package and leaves, as argparse's own `version` does.

    It is looked up when it is asked for: that takes longer than `--help`.
    """

    def __init__(self, option_strings: Sequence[str], dest: str) -> None:
        super().__init__(option_strings, dest, nargs=0, help="print the version and leave")

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: object,
        option_string: str | None = None,
    ) -> NoReturn:
        """One line on stdout."""
        from importlib.metadata import version

        say(f"jaxgen {version('jaxgen')}")
        parser.exit()


def build_parser() -> Parser:
    """The parser of the whole command line; `args.command` names the chosen subcommand."""
    parser = Parser(prog="jaxgen", description="LLM inference in JAX.")
    parser.add_argument("--version", "-v", action=ShowVersion)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    model, engine, text, sampling = (
        _model_options(),
        _engine_options(),
        _text_options(),
        _sampling_options(),
    )
    generate = commands.add_parser(
        "generate", parents=[model, engine, text, sampling], help="continue prompts"
    )
    _generate_options(generate)
    chat = commands.add_parser(
        "chat", parents=[model, engine, text, sampling], help="answer a chat prompt, or talk"
    )
    _chat_options(chat)
    convert = commands.add_parser(
        "convert", parents=[model], help="write a snapshot, that any mesh reads back"
    )
    convert.add_argument("out", metavar="OUT", help="a new or empty folder")
    inspect = commands.add_parser(
        "inspect", parents=[model], help="what maps where: shapes, shardings, bytes"
    )
    inspect.add_argument("--json", action="store_true", help="print one JSON object")
    verify = commands.add_parser(
        "verify", parents=[model, engine], help="compare with transformers, or with a recording"
    )
    _verify_options(verify)
    add_serve(commands, [model, engine, text])
    add_plan(commands, engine)
    add_bench(commands, engine)
    return parser


def _model_options() -> Parser:
    """What every command takes."""
    parent = Parser(add_help=False)
    parent.add_argument("model", metavar="MODEL", help=_MODEL_HELP)
    group = parent.add_argument_group("model")
    group.add_argument(
        "--dtype", help="of weights and activations: auto (the checkpoint's), float32, bfloat16 ..."
    )
    add_mesh(group)
    group.add_argument("--policy", help="a family's name, or auto: by structure, if Llama-like")
    return parent


def _engine_options() -> Parser:
    parent = Parser(add_help=False)
    group = parent.add_argument_group("engine")
    integers = {
        "--max-model-len": "tokens of a sequence, prompt and answer together",
        "--block-size": "tokens of one KV block",
        "--max-num-seqs": "sequences in one step",
        "--max-num-batched-tokens": "tokens in one step",
        "--kv-cache-memory-bytes": "bytes of the KV cache on one device",
        "--num-gpu-blocks-override": "blocks of the KV cache",
        "--seed": "of whatever is sampled",
    }
    for option, description in integers.items():
        group.add_argument(option, type=int, metavar="N", help=description)
    group.add_argument(
        "--gpu-memory-utilization",
        type=float,
        metavar="FRACTION",
        help="of a device's memory that weights, step and KV cache may fill",
    )
    group.add_argument(
        "--enforce-eager",
        action="store_const",
        const=True,
        help="run op by op, without compiled steps: slow, for debugging",
    )
    group.add_argument(
        "--enable-prefix-caching",
        action=argparse.BooleanOptionalAction,
        help="share the KV blocks of what prompts have in common (the default)",
    )
    return parent


def _text_options() -> Parser:
    parent = Parser(add_help=False)
    group = parent.add_argument_group("text")
    group.add_argument("--tokenizer", metavar="FOLDER", help="instead of the checkpoint's own")
    return parent


def _sampling_options() -> Parser:
    parent = Parser(add_help=False)
    group = parent.add_argument_group(
        "sampling", "defaults are the checkpoint's generation_config.json; greedy without one"
    )
    group.add_argument("--max-tokens", type=int, metavar="N", help="of one answer")
    group.add_argument("--min-tokens", type=int, metavar="N", help="before an answer may end")
    group.add_argument("--temperature", type=float, metavar="T", help="0 is greedy")
    group.add_argument("--top-p", type=float, metavar="P")
    group.add_argument("--top-k", type=int, metavar="K")
    group.add_argument("--min-p", type=float, metavar="P")
    for option in ("--presence-penalty", "--frequency-penalty", "--repetition-penalty"):
        group.add_argument(option, type=float, metavar="X")
    group.add_argument("--stop", action="append", metavar="TEXT", help="repeatable")
    group.add_argument("--ignore-eos", action="store_const", const=True)
    return parent


def _generate_options(generate: argparse.ArgumentParser) -> None:
    prompts = generate.add_argument_group("prompts").add_mutually_exclusive_group(required=True)
    prompts.add_argument("--prompt", action="append", metavar="TEXT", help="repeatable")
    prompts.add_argument(
        "--prompt-file", action="append", metavar="FILE", help="one prompt a file; - is stdin"
    )
    prompts.add_argument(
        "--prompt-token-ids",
        action="append",
        type=token_ids,
        metavar="IDS",
        help="token ids with commas between; repeatable",
    )
    generate.add_argument("--n", type=int, metavar="N", help="continuations of each prompt")
    generate.add_argument(
        "--logprobs", type=int, metavar="K", help="log-probabilities of the K likeliest (--json)"
    )
    generate.add_argument("--json", action="store_true", help="print one JSON object")


def _chat_options(chat: argparse.ArgumentParser) -> None:
    group = chat.add_argument_group("chat")
    group.add_argument("--prompt", metavar="TEXT", help="answer this and leave")
    group.add_argument("--system", metavar="TEXT", help="the system message")
    group.add_argument(
        "--chat-template", metavar="FILE", help="a Jinja file (or its text) instead of the model's"
    )


def _verify_options(verify: argparse.ArgumentParser) -> None:
    group = verify.add_argument_group("reference")
    group.add_argument(
        "--golden",
        metavar="FILE",
        help="expected.npz of a recorded fixture; without it compare "
        "with transformers, which must be installed",
    )
    group.add_argument(
        "--prompt", action="append", metavar="TEXT", help="to compare on; default: random token ids"
    )
    group.add_argument("--tokenizer", metavar="FOLDER", help="for --prompt")
    verify.add_argument("--json", action="store_true", help="print one JSON object")


def token_ids(text: str) -> Sequence[int]:
    """Token ids written as `1, 2, 3`, with or without brackets."""
    try:
        return [int(part) for part in text.strip().strip("[]").split(",")]
    except ValueError:
        message = f"expected token ids with commas between, got {text!r}"
        raise argparse.ArgumentTypeError(message) from None
