"""`jaxgen convert`: any checkpoint, pytorch_model.bin included, becomes a snapshot for any mesh."""

import argparse
import shutil
from dataclasses import replace
from pathlib import Path

from jaxgen.commands.opening import engine_options
from jaxgen.commands.terminal import note, size
from jaxgen.config import EngineConfig
from jaxgen.engine.build import describe, load_model
from jaxgen.hub import PICKLES, local_model
from jaxgen.text.checkpoint_tokenizer import checkpoint_tokenizer
from jaxgen.text.loading import FURTHER_TEMPLATES
from jaxgen_checkpoints.checkpoint import (
    TORCH_NAMES,
    WEIGHTS_NAME,
    Checkpoint,
    open_checkpoint,
    open_torch_checkpoint,
)
from jaxgen_checkpoints.errors import RefusedInput
from jaxgen_checkpoints.readers.shard_index import INDEX_NAME
from jaxgen_checkpoints.snapshot import SNAPSHOT_FILE

_READY = (WEIGHTS_NAME, INDEX_NAME, SNAPSHOT_FILE)
_TEXT_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "qwen.tiktoken",
    "chat_template.jinja",
    "chat_template.json",
    f"{FURTHER_TEMPLATES}/*.jinja",
)


def run(args: argparse.Namespace) -> int:
    """Writes the snapshot and what belongs to its tokenizer to OUT."""
    out = Path(args.out)
    if out.exists() and not (out.is_dir() and not any(out.iterdir())):
        raise RefusedInput(f"{out}: expected a new or empty folder to write to")
    config = EngineConfig.from_any(None, **engine_options(args))
    checkpoint = _open(args.model)
    if config.dtype != "auto":
        # The snapshot's own type is then what was asked for.
        checkpoint = replace(checkpoint, config={**checkpoint.config, "dtype": config.dtype})
    described = describe(checkpoint, config, policy=args.policy)
    checkpoint_tokenizer(checkpoint, vocab_size=int(described.policy.config.vocab_size))
    loaded = load_model(described, "auto")
    loaded.save(out)
    _copy_text_files(checkpoint, out)
    files = [path.stat().st_size for path in out.rglob("*") if path.is_file()]
    note(f"wrote {len(files)} files, {size(sum(files))}, to {out}")
    return 0


def _open(model: str) -> Checkpoint:
    path = local_model(model)
    if not Path(model).exists() and not any((path / name).exists() for name in _READY):
        path = local_model(model, PICKLES)
    ready = path.is_file() or any((path / n).exists(follow_symlinks=False) for n in _READY)
    if not ready and any((path / name).exists() for name in TORCH_NAMES):
        return open_torch_checkpoint(path)
    return open_checkpoint(path)


def _copy_text_files(checkpoint: Checkpoint, out: Path) -> None:
    folder = checkpoint.path
    if folder is not None and folder.is_dir():
        for path in (path for pattern in _TEXT_FILES for path in folder.glob(pattern)):
            copy = out / path.relative_to(folder)
            copy.parent.mkdir(exist_ok=True)
            shutil.copyfile(path, copy)
