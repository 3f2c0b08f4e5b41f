"""The options that say how many devices share a model, and how."""

import argparse
from typing import Any


def add_mesh(parser: Any) -> None:  # noqa: ANN401 (a parser or a group of one)
    """Adds them in vLLM's names."""
    parser.add_argument(
        *("--tensor-parallel-size", "-tp"),
        type=int,
        metavar="N",
        help="devices that share each layer",
    )
    parser.add_argument(
        "--expert-parallel-size",
        type=int,
        metavar="N",
        help="groups of so many devices, each with its part of the experts",
    )
    parser.add_argument(
        "--enable-expert-parallel",
        action=argparse.BooleanOptionalAction,
        help="devices that share a layer have whole experts each, not a part of every expert",
    )
