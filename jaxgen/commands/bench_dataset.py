"""The requests of every bench that takes a dataset."""

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

from jaxgen.bench.workload import (
    BenchRequest,
    custom,
    prefix_repetition,
    random,
    synthetic_sharegpt,
    uniform,
)
from jaxgen.commands.bench_dataset_options import DATASETS
from jaxgen_checkpoints.errors import RefusedInput


def read_dataset(
    args: argparse.Namespace,
    vocab: Callable[[], int],
    encode: Callable[[str], list[int]] | None,
) -> list[BenchRequest]:
    """The requests that `args` ask for, the same for the same --seed.

    vocab: asked where ids are drawn. encode: for texts; None leaves them as they are. RefusedInput
    for options of another dataset.
    """
    name, seed = args.dataset_name, args.seed or 0
    takes = DATASETS[name]
    for foreign in {key for options in DATASETS.values() for key in options} - takes.keys():
        if getattr(args, foreign) is not None:
            option = "--" + foreign.replace("_", "-")
            raise RefusedInput(f"{option} does not belong to --dataset-name {name}")
    given = {key: _chosen(getattr(args, key), default) for key, default in takes.items()}
    if name == "custom":
        if given["dataset_path"] is None:
            raise RefusedInput("--dataset-name custom needs --dataset-path FILE")
        path = Path(given["dataset_path"])
        return custom(path, args.num_prompts, given["custom_output_len"], encode)
    count = _chosen(args.num_prompts, args.default_prompts)
    if name == "synthetic-sharegpt":
        return synthetic_sharegpt(count, vocab(), seed)
    lengths = {key.removeprefix("prefix_repetition_"): value for key, value in given.items()}
    lengths = {key.removeprefix("random_"): value for key, value in lengths.items()}
    draw = {"uniform": uniform, "random": random, "prefix_repetition": prefix_repetition}[name]
    return draw(count, vocab=vocab(), seed=seed, **lengths)


def _chosen(given: Any, default: Any) -> Any:  # noqa: ANN401 (an option's value)
    return default if given is None else given
