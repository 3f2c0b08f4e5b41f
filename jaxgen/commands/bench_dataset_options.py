"""The options that say which requests a bench sends, in vLLM's names where it has them."""

import argparse
from typing import Any

from jaxgen.commands.bench_values import span, whole

DEFAULT_PROMPTS = 1000

DATASETS: dict[str, dict[str, Any]] = {
    "uniform": {
        "random_input_range": (128, 1024),
        "random_output_range": (64, 512),
        "random_prefix_len": 0,
    },
    "random": {
        "random_input_len": 1024,
        "random_output_len": 128,
        "random_range_ratio": 0.0,
        "random_prefix_len": 0,
    },
    "synthetic-sharegpt": {},
    "prefix_repetition": {
        "prefix_repetition_prefix_len": 256,
        "prefix_repetition_suffix_len": 256,
        "prefix_repetition_num_prefixes": 10,
        "prefix_repetition_output_len": 128,
    },
    "custom": {"dataset_path": None, "custom_output_len": 256},
}
"""What each is made of: the option's destination and its default; None must be given."""

_LENGTHS = {
    "--random-input-len": "of `random`: tokens of a prompt (1024)",
    "--random-output-len": "of `random`: tokens of an answer (128)",
    "--random-prefix-len": "of `random` and `uniform`: tokens that all prompts begin with (0)",
    "--prefix-repetition-prefix-len": "tokens of a shared beginning (256)",
    "--prefix-repetition-suffix-len": "tokens after it (256)",
    "--prefix-repetition-num-prefixes": "beginnings in all (10)",
    "--prefix-repetition-output-len": "tokens of an answer (128)",
    "--custom-output-len": "where a line has no output_tokens (256)",
}
_SHORT = {"--random-input-len": ["--input-len"], "--random-output-len": ["--output-len"]}


def add_dataset(
    parser: argparse.ArgumentParser, default: str, *, prompts: int = DEFAULT_PROMPTS
) -> None:
    """Adds the options. prompts: how many are drawn where --num-prompts is not given."""
    group = parser.add_argument_group("dataset")
    group.add_argument("--dataset-name", choices=tuple(DATASETS), default=default)
    group.add_argument(
        "--num-prompts",
        type=whole(1),
        metavar="N",
        help=f"default {prompts}; of `custom`: each line once",
    )
    group.add_argument(
        "--dataset-path",
        metavar="FILE",
        help='of `custom`: JSON lines of {"prompt": text}, with "output_tokens" or without',
    )
    for option, default_span in (("input", "128:1024"), ("output", "64:512")):
        group.add_argument(
            f"--random-{option}-range",
            type=span,
            metavar="LOW:HIGH",
            help=f"of `uniform`: tokens, drawn from the closed range ({default_span})",
        )
    for option, description in _LENGTHS.items():
        least = 0 if option == "--random-prefix-len" else 1
        names = (option, *_SHORT.get(option, ()))
        group.add_argument(*names, type=whole(least), metavar="N", help=description)
    group.add_argument(
        "--random-range-ratio",
        type=float,
        metavar="R",
        help="of `random`: lengths differ by this share, from 0 to below 1 (0)",
    )
    parser.set_defaults(default_prompts=prompts)
