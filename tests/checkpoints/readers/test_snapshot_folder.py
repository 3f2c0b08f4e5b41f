"""A snapshot folder is recognised by its JSON file and opened like any other checkpoint."""

import json

import numpy as np
import pytest
from safetensors.numpy import save_file

from jaxgen_checkpoints.checkpoint import open_checkpoint
from jaxgen_checkpoints.errors import CheckpointError
from jaxgen_checkpoints.snapshot import (
    SNAPSHOT_FILE,
    SNAPSHOT_FORMAT,
    SNAPSHOT_VERSION,
    SnapshotSource,
)

SHARD = "model-00001-of-00001.safetensors"


@pytest.fixture
def snapshot(tmp_path):
    save_file({"norm": np.arange(4.0)}, tmp_path / SHARD)
    index = {"weight_map": {"norm": SHARD}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    manifest = {
        "format": SNAPSHOT_FORMAT,
        "version": SNAPSHOT_VERSION,
        "policy": "llama",
        "config": {"hidden_size": 4},
        "generation_config": {"eos_token_id": 2},
        "gguf_tokenizer": {"tokenizer.ggml.model": "gpt2"},
        "axes": {"norm": [None]},
    }
    (tmp_path / SNAPSHOT_FILE).write_text(json.dumps(manifest))
    return tmp_path


def test_snapshot_is_opened(snapshot):
    opened = open_checkpoint(snapshot)
    assert opened.config == {"hidden_size": 4}
    assert opened.generation_config == {"eos_token_id": 2}
    assert opened.gguf_tokenizer == {"tokenizer.ggml.model": "gpt2"}
    assert isinstance(opened.source, SnapshotSource)
    np.testing.assert_array_equal(opened.source.read("norm", (slice(1, 3),)), [1.0, 2.0])


def test_incomplete_snapshot_is_refused(snapshot):
    (snapshot / SHARD).unlink()
    with pytest.raises(CheckpointError, match="incomplete"):
        open_checkpoint(snapshot)
