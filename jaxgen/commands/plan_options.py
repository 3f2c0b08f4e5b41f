"""The options of `jaxgen plan`."""

import argparse
from typing import Any

from jaxgen.commands.mesh_options import add_mesh

_HELP = "a config.json, a folder that has one, or one of the shapes shipped with jaxgen"


def add_plan(commands: Any, engine_options: argparse.ArgumentParser) -> None:  # noqa: ANN401
    """Adds `plan` to argparse's subcommands."""
    plan = commands.add_parser(
        "plan",
        parents=[engine_options],
        help="what a model would take on a machine that is not there: no weights, no accelerator",
    )
    plan.add_argument("model", metavar="CONFIG", help=_HELP)
    plan.add_argument(
        "--topology",
        action="append",
        required=True,
        metavar="NAME",
        help="v5e:2x2, v6e:2x4, v5p:4x4x4, tpu7x:2x2x1, h200:8, cpu:4 ...; repeatable",
    )
    plan.add_argument("--dtype", help="of weights and activations; default: the config's")
    add_mesh(plan)
    plan.add_argument(
        "--context",
        type=int,
        metavar="N",
        help="tokens that a row of the estimated decode step sees; default: half of max_model_len",
    )
    plan.add_argument("--policy", help="a family's name, or auto: by structure, if Llama-like")
    plan.add_argument("--json", action="store_true", help="print one JSON object")
    plan.add_argument("--plot", metavar="FILE", help="draw memory and step times, as .png or .svg")
