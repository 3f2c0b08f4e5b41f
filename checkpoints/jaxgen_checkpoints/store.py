"""Saving loaded weights, from whatever mesh they are on, as a snapshot that any mesh can read."""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxgen_checkpoints.errors import RefusedInput
from jaxgen_checkpoints.load import Tree
from jaxgen_checkpoints.readers.shard_index import INDEX_NAME
from jaxgen_checkpoints.safetensors_writer import write_safetensors
from jaxgen_checkpoints.snapshot import SNAPSHOT_FILE, SNAPSHOT_FORMAT, SNAPSHOT_VERSION
from jaxgen_checkpoints.weight import Weight

MAX_FILE_BYTES = 4 << 30


def save_snapshot(
    folder: str | Path,
    arrays: Tree,
    described: Tree,
    *,
    policy: str,
    config: Mapping[str, Any],
    generation_config: Mapping[str, Any],
    gguf_tokenizer: Mapping[str, Any] | None = None,
    max_file_bytes: int = MAX_FILE_BYTES,
) -> None:
    """Write `arrays`, placed as `described` says, in canonical layout to a new snapshot.

    One weight at a time is brought to the host. Files are cut at `max_file_bytes`; a larger weight
    has a file of its own. The JSON file comes last: a snapshot that has it is complete. Raises
    `RefusedInput` if the folder holds a snapshot already or a weight lies on other hosts too.
    """
    folder = Path(folder)
    if (folder / SNAPSHOT_FILE).exists():
        raise RefusedInput(f"{folder} holds a snapshot already; choose an empty folder")
    folder.mkdir(parents=True, exist_ok=True)
    weights = {name: (weight, array) for name, weight, array in _named(described, arrays)}
    for name, (_, array) in weights.items():
        if not array.is_fully_addressable:
            raise RefusedInput(f"{name} lies on other hosts too; save from a mesh of one host")
    files = _cut(weights, max_file_bytes)
    index = {}
    for number, names in enumerate(files, start=1):
        file = f"model-{number:05d}-of-{len(files):05d}.safetensors"
        shapes = {n: (weights[n][0].tensor.shape, np.dtype(weights[n][1].dtype)) for n in names}
        write_safetensors(folder / file, shapes, (canonical(*weights[name]) for name in names))
        index |= dict.fromkeys(names, file)
    _write_json(folder / INDEX_NAME, {"metadata": {}, "weight_map": index})
    manifest = {
        "format": SNAPSHOT_FORMAT,
        "version": SNAPSHOT_VERSION,
        "policy": policy,
        "config": config,
        "generation_config": generation_config,
        "gguf_tokenizer": gguf_tokenizer,
        "axes": {name: list(weight.axes) for name, (weight, _) in weights.items()},
    }
    _write_json(folder / SNAPSHOT_FILE, manifest)


def canonical(weight: Weight, array: jax.Array) -> np.ndarray:
    """Undo a placement: the canonical values of a placed array, on the host."""
    if array.shape != weight.shape:
        raise ValueError(f"expected an array placed as {weight.shape}, got {array.shape}")
    values = np.asarray(array)
    for axis, gathered in weight.placement.items():
        values = np.take(values, _inverse(gathered, weight.tensor.shape[axis]), axis)
    return values


def _inverse(gathered: np.ndarray, size: int) -> np.ndarray:
    """For each canonical index the first place that holds it."""
    present, first = np.unique(gathered, return_index=True)
    inverse = first[present >= 0]
    if len(inverse) != size:
        raise ValueError(f"the placement keeps {len(inverse)} of {size} rows: it has no inverse")
    return inverse


def _named(described: Tree, arrays: Tree) -> Iterator[tuple[str, Weight, jax.Array]]:
    for index, (layer, loaded) in enumerate(
        zip(described["layers"], arrays["layers"], strict=True)
    ):
        for attribute, weight in layer.items():
            yield f"layers.{index}.{attribute}", weight, loaded[attribute]
    for attribute, weight in described.items():
        if attribute != "layers":
            yield attribute, weight, arrays[attribute]


def _cut(weights: Mapping[str, tuple[Weight, jax.Array]], max_file_bytes: int) -> list[list[str]]:
    files: list[list[str]] = []
    used = 0
    for name, (weight, array) in weights.items():
        size = int(np.prod(weight.tensor.shape)) * array.dtype.itemsize
        if not files or used + size > max_file_bytes:
            files.append([])
            used = 0
        files[-1].append(name)
        used += size
    return files


def _write_json(path: Path, value: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=1, allow_nan=False) + "\n", encoding="utf-8")
