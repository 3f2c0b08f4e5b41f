"""A GGUF file opened whole: config, generation config, tokenizer metadata and tensors."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from jaxgen_checkpoints.readers.gguf_config import (
    architecture_of,
    build_config,
    build_generation_config,
)
from jaxgen_checkpoints.readers.gguf_header import read_gguf_header
from jaxgen_checkpoints.readers.gguf_rope import ROPE_FACTORS_NAME
from jaxgen_checkpoints.readers.gguf_source import GGUFSource


@dataclass(frozen=True, slots=True)
class GGUFCheckpoint:
    """The four things that a GGUF file holds; `tokenizer` has the raw `tokenizer.*` metadata."""

    config: dict[str, Any]
    generation_config: dict[str, Any]
    tokenizer: dict[str, Any]
    source: GGUFSource


def open_gguf(path: Path) -> GGUFCheckpoint:
    """Open the GGUF file at `path`.

    Raises `CheckpointError` for a damaged file or a tensor type that is not read, `ConfigError` for
    metadata that does not make a config.
    """
    header = read_gguf_header(path)
    factors = _rope_factors(GGUFSource(path, header, interleaved_head=None))
    config = build_config(path, header, factors)
    source = GGUFSource(
        path,
        header,
        interleaved_head=config["head_dim"] if architecture_of(path, header).interleaved else None,
        hidden=frozenset({ROPE_FACTORS_NAME}),
    )
    tokenizer = {
        key: value for key, value in header.metadata.items() if key.startswith("tokenizer.")
    }
    return GGUFCheckpoint(config, build_generation_config(header), tokenizer, source)


def _rope_factors(plain: GGUFSource) -> np.ndarray | None:
    info = plain.tensors().get(ROPE_FACTORS_NAME)
    return None if info is None else plain.read(info.name, tuple(slice(None) for _ in info.shape))
