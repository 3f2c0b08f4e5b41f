"""One way in: a folder, a GGUF file or a snapshot folder becomes a config and a `TensorSource`.

Everything that can be wrong with the files is refused here, before a tensor is read or a device is
touched.
"""

import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jaxgen_checkpoints.errors import CheckpointError, CheckpointWarning, ConfigError
from jaxgen_checkpoints.json_file import read_json_object
from jaxgen_checkpoints.quantized import widened
from jaxgen_checkpoints.readers import torch_bin
from jaxgen_checkpoints.readers.memory import MemorySource
from jaxgen_checkpoints.readers.safetensors_source import SafetensorsSource, open_sharded
from jaxgen_checkpoints.readers.shard_index import INDEX_NAME
from jaxgen_checkpoints.snapshot import SNAPSHOT_FILE, open_snapshot
from jaxgen_checkpoints.source import TensorSource

CONFIG_NAME = "config.json"
GENERATION_CONFIG_NAME = "generation_config.json"
WEIGHTS_NAME = "model.safetensors"
ORBAX_NAME = "_METADATA"
TORCH_NAMES = (torch_bin.SINGLE_NAME, torch_bin.INDEX_NAME)


@dataclass(frozen=True)
class Checkpoint:
    """An opened checkpoint: nothing of its weights has been read yet.

    `path` is None for one that never was a file. `generation_config` is empty if there is none.
    `gguf_tokenizer` holds the `tokenizer.*` metadata of a GGUF file under the file's own keys. The
    `source` of a snapshot is a `SnapshotSource`: finished weights rather than tensors to be mapped.
    """

    path: Path | None
    config: dict[str, Any]
    generation_config: dict[str, Any]
    source: TensorSource
    gguf_tokenizer: dict[str, Any] | None


def open_checkpoint(path: str | Path) -> Checkpoint:
    """Open the folder with config.json and weights, the snapshot, or the .gguf file at `path`.

    Raises `CheckpointError` or `ConfigError` for every malformed, missing or incomplete file; warns
    (`CheckpointWarning`) of what is odd but clear. Nothing is unpickled, and no file outside the
    folder is read unless the folder links to it.
    """
    path = Path(path)
    if path.is_dir():
        return _open_folder(path)
    if path.suffix.lower() == ".gguf":
        from jaxgen_checkpoints.readers.gguf_checkpoint import open_gguf  # not all need gguf

        opened = open_gguf(path)
        return Checkpoint(
            path, opened.config, opened.generation_config, opened.source, opened.tokenizer
        )
    raise CheckpointError(
        f"{path}: expected a folder with {CONFIG_NAME} or a .gguf file, got "
        f"{'another file' if path.exists() else 'nothing: there is no such path'}"
    )


def memory_checkpoint(
    tree: object, config: Mapping[str, Any], generation_config: Mapping[str, Any] | None = None
) -> Checkpoint:
    """A checkpoint of arrays in memory: from training to inference with no file in between.

    tree: a flat or nested dict of arrays, an NNX state or Linen params, whose paths joined with `.`
    are the names that a Hugging Face checkpoint of this config would have.
    """
    return Checkpoint(None, dict(config), dict(generation_config or {}), MemorySource(tree), None)


def open_torch_checkpoint(folder: str | Path) -> Checkpoint:
    """Open a folder whose weights are pytorch_model.bin; for converting it, never for serving.

    Raises `CheckpointError` if torch is not installed or its `weights_only` loader refuses.
    """
    folder = Path(folder)
    return Checkpoint(folder, *read_configs(folder), torch_bin.open_torch_bin(folder), None)


def read_configs(folder: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """config.json and generation_config.json (empty if absent) of `folder`.

    Raises `ConfigError` if config.json is missing, or either is not one strict JSON object.
    """
    if not (folder / CONFIG_NAME).exists(follow_symlinks=False):
        raise ConfigError(
            f"{folder}: no {CONFIG_NAME} in this folder; it describes the model, copy it beside "
            "the weights (a local folder is never looked up on the hub)"
        )
    config = read_json_object(folder / CONFIG_NAME, error=ConfigError)
    generation = folder / GENERATION_CONFIG_NAME
    if not generation.exists(follow_symlinks=False):
        return config, {}
    return config, read_json_object(generation, error=ConfigError)


def _open_folder(folder: Path) -> Checkpoint:
    if (folder / SNAPSHOT_FILE).exists(follow_symlinks=False):
        snapshot = open_snapshot(folder)
        return Checkpoint(
            folder,
            snapshot.config,
            snapshot.generation_config,
            snapshot.source,
            snapshot.gguf_tokenizer,
        )
    config, generation_config = read_configs(folder)
    config, source = widened(config, _open_weights(folder))
    return Checkpoint(folder, config, generation_config, source, None)


def _open_weights(folder: Path) -> TensorSource:
    def present(name: str) -> bool:
        # A broken or looping link is present: its own error says more than "no weights".
        return (folder / name).exists(follow_symlinks=False)

    if present(WEIGHTS_NAME):
        if present(INDEX_NAME):
            warnings.warn(
                f"{folder}: both {WEIGHTS_NAME} and {INDEX_NAME}; the index is ignored",
                CheckpointWarning,
                stacklevel=2,
            )
        return SafetensorsSource(folder, (WEIGHTS_NAME,))
    if present(INDEX_NAME):
        return open_sharded(folder)
    if present(ORBAX_NAME):
        from jaxgen_checkpoints.readers.orbax_source import OrbaxSource  # TensorStore is large

        return OrbaxSource(folder)
    pickles = [name for name in TORCH_NAMES if present(name)]
    if pickles:
        raise CheckpointError(
            f"{folder}: only {pickles[0]}, a pickle, which could run any code and is not loaded; "
            f"expected {WEIGHTS_NAME}. With torch installed, `jaxgen convert {folder} OUT` writes "
            "safetensors"
        )
    raise CheckpointError(_no_weights(folder))


def _no_weights(folder: Path) -> str:
    looked_for = f"looked for {WEIGHTS_NAME} and {INDEX_NAME}"
    others = sorted(path.name for path in folder.glob("*.safetensors"))
    ggufs = sorted(path.name for path in folder.glob("*.gguf"))
    if others:
        return (
            f"{folder}: {looked_for}; there are {', '.join(others[:5])} without the index that "
            "says what they hold; the download may be incomplete"
        )
    if ggufs:
        return f"{folder}: {looked_for}; there is {ggufs[0]}: give the path of that file instead"
    return f"{folder}: no weights: {looked_for}"
