"""A model named by its hub id becomes a local folder, through huggingface_hub and its cache."""

import re
from collections.abc import Sequence
from pathlib import Path

from jaxgen_checkpoints.errors import RefusedInput

_TEMPLATES = "*.jinja"

CONFIGS = ("*.json", _TEMPLATES, "*.model", "*.txt", "*.tiktoken")
"""Configs, tokenizers and the index of the shards; never code."""

SAFETENSORS = ("*.safetensors",)
PICKLES = ("pytorch_model*.bin",)

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")


def local_model(model: str | Path, weights: Sequence[str] = SAFETENSORS) -> Path:
    """The path itself if it exists; otherwise the folder into which the hub's copy was fetched.

    weights: patterns of the weight files wanted. RefusedInput for what is neither a path nor a hub
    id, for an id that the hub does not have, and for one that is not cached while offline.
    """
    path = Path(model)
    if path.exists(follow_symlinks=False):
        return path
    if not _HUB_ID.fullmatch(str(model)) or path.suffix in (".gguf", ".safetensors", ".json"):
        raise RefusedInput(
            f"{model}: there is no such path, and it is no hub id (ORG/NAME); give a checkpoint "
            "folder, a .gguf file or a hub id"
        )
    return _download(str(model), (*CONFIGS, *weights))


def _download(hub_id: str, patterns: Sequence[str]) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import (
        GatedRepoError,
        HFValidationError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
    )

    try:
        # Top-level files only: subfolders hold other exports of the same weights. Further chat
        # templates have a folder.
        nested = [f"*/{pattern}" for pattern in patterns if pattern != _TEMPLATES]
        return Path(
            snapshot_download(hub_id, allow_patterns=list(patterns), ignore_patterns=nested)
        )
    except GatedRepoError as error:
        raise RefusedInput(
            f"{hub_id}: this hub repository is gated: accept its terms on its page, then log in "
            "with `hf auth login`"
        ) from error
    except RepositoryNotFoundError as error:
        raise RefusedInput(
            f"{hub_id}: no such folder or file here, and the hub has no such model (or it is "
            "private: log in with `hf auth login`)"
        ) from error
    except HFValidationError as error:
        raise RefusedInput(f"{hub_id}: not a path here, and no valid hub id: {error}") from error
    except (LocalEntryNotFoundError, OSError) as error:
        raise RefusedInput(
            f"{hub_id}: no such folder or file here, the hub cannot be reached and its copy is not "
            "in the local cache: go online once, or give a local folder"
        ) from error
