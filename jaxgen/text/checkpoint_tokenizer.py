"""The tokenizer that belongs to an opened checkpoint, wherever it keeps it."""

import warnings
from pathlib import Path

from jaxgen.text.gguf_tokenizer import gguf_tokenizer
from jaxgen.text.loading import VOCABULARY_FILES, has_tokenizer, load_tokenizer
from jaxgen.text.tokenizer import Tokenizer
from jaxgen_checkpoints.checkpoint import Checkpoint
from jaxgen_checkpoints.errors import CheckpointWarning


def checkpoint_tokenizer(
    checkpoint: Checkpoint,
    *,
    vocab_size: int,
    folder: str | Path | None = None,
    chat_template: str | None = None,
) -> Tokenizer | None:
    """The tokenizer in `folder`, or else in the checkpoint's own folder or GGUF metadata.

    None, with a CheckpointWarning, where a checkpoint has none: it still takes token ids.
    """
    if folder is None and checkpoint.gguf_tokenizer is not None:
        return gguf_tokenizer(
            checkpoint.gguf_tokenizer, vocab_size=vocab_size, chat_template=chat_template
        )
    place = Path(folder) if folder is not None else checkpoint.path
    if folder is None and (place is None or not has_tokenizer(place)):
        where = "an in-memory checkpoint" if place is None else str(place)
        warnings.warn(
            f"{where} has no tokenizer (looked for {', '.join(VOCABULARY_FILES)}): prompts must be "
            "token ids, and answers are",
            CheckpointWarning,
            stacklevel=2,
        )
        return None
    assert place is not None
    return load_tokenizer(place, vocab_size=vocab_size, chat_template=chat_template)
