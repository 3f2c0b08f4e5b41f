"""Every file-level case of the malformed checkpoints: one precise error, or a warning."""

import json
import os
import shutil
from pathlib import Path

import numpy as np
import pytest

from jaxgen_checkpoints.checkpoint import open_checkpoint
from jaxgen_checkpoints.errors import CheckpointError, CheckpointWarning, ConfigError

# Case -> what the message must hold beyond what the manifest asks for.
REFUSED = {
    "missing_shard": ["incomplete"],
    "truncated_data": ["16420", "27368"],
    "truncated_header": ["header"],
    "empty_file": ["0 bytes"],
    "header_length_overflow": ["100000000"],
    "header_length_past_file": ["28368", "27368"],
    "header_not_json": ["line 1, column 1"],
    "overlapping_offsets": ["model.layers.1.mlp.up_proj.weight", "share"],
    "offset_past_end": ["past the end"],
    "offset_negative_length": ["begin after they end"],
    "shape_bytes_mismatch": ["512", "256"],
    "shape_overflow": ["9223372036854775808"],
    "unknown_dtype": ["BF16"],
    "duplicate_header_key": ["twice"],
    "index_names_absent_tensor": ["no shard holds", "model-00002-of-00002.safetensors"],
    "index_invalid_json": ["line 16, column 3"],
    "index_path_traversal": ["plain name"],
    "index_absolute_path": ["plain name"],
    "is_a_directory": ["folder"],
    "no_weights": ["model.safetensors.index.json"],
    "pickle_bin": ["jaxgen convert"],
    "config_missing": ["hub"],
    "config_invalid_json": ["line"],
    "config_not_object": ["object"],
}
WARNED = {
    "duplicate_tensor": "using model-00002-of-00002.safetensors",
    "index_wrong_shard": "was found in model-00002-of-00002.safetensors",
    "unreadable_bytes_in_name": r"weird/\x07\u202e name",
}
K_PROJ = "model.layers.1.self_attn.k_proj.weight"


@pytest.fixture(scope="module")
def manifest(bad_dir: Path) -> dict:
    return json.loads((bad_dir / "manifest.json").read_text())["cases"]


@pytest.mark.parametrize("case", REFUSED)
def test_refused_with_one_precise_sentence(case, bad_dir, manifest, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    expected = ConfigError if case.startswith("config_") else CheckpointError
    with pytest.raises(expected) as caught:
        open_checkpoint(bad_dir / case)
    message = str(caught.value)
    assert "\n" not in message
    for words in [*manifest[case]["message_should_mention"], *REFUSED[case]]:
        assert words in message
    assert not list(tmp_path.iterdir())  # PICKLE_WAS_EXECUTED would lie here


@pytest.mark.parametrize("case", WARNED)
def test_loads_with_a_warning(case, bad_dir, manifest):
    with pytest.warns(CheckpointWarning) as caught:
        opened = open_checkpoint(bad_dir / case)
    message = " ".join(str(warning.message) for warning in caught)
    assert message.isprintable()
    for words in [*manifest[case]["message_should_mention"], WARNED[case]]:
        assert words in message
    assert K_PROJ in opened.source.tensors()


def test_index_decides_between_two_copies(bad_dir):
    with pytest.warns(CheckpointWarning):
        source = open_checkpoint(bad_dir / "duplicate_tensor").source
    assert source.tensors()[K_PROJ].origin == "model-00002-of-00002.safetensors"


def test_shards_and_single_file_hold_the_same(bad_dir):
    one = open_checkpoint(bad_dir / "good_base")
    two = open_checkpoint(bad_dir / "good_sharded")
    assert one.config["hidden_size"] == 16
    assert one.generation_config["eos_token_id"] == 271
    assert one.source.tensors().keys() == two.source.tensors().keys()
    for name, info in one.source.tensors().items():
        whole = tuple(slice(None) for _ in info.shape)
        np.testing.assert_array_equal(one.source.read(name, whole), two.source.read(name, whole))


def test_safetensors_beside_a_pickle_are_used(bad_dir):
    assert (
        "1 safetensors file"
        in open_checkpoint(bad_dir / "both_bin_and_safetensors").source.description
    )


def test_symlink_loop_is_refused(bad_dir, tmp_path):
    shutil.copy(bad_dir / "good_base" / "config.json", tmp_path)
    (tmp_path / "model.safetensors").symlink_to("loop")
    (tmp_path / "loop").symlink_to("model.safetensors")
    (tmp_path / "sub").symlink_to(".")
    with pytest.raises(CheckpointError, match=r"model\.safetensors: a symbolic link that leads to"):
        open_checkpoint(tmp_path)


def test_pipe_is_refused_rather_than_waited_for(bad_dir, tmp_path):
    shutil.copy(bad_dir / "good_base" / "config.json", tmp_path)
    os.mkfifo(tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match="expected a regular file"):
        open_checkpoint(tmp_path)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_unreadable_file_is_refused(bad_dir, tmp_path):
    for name in ("config.json", "model.safetensors"):
        shutil.copy(bad_dir / "good_base" / name, tmp_path)
    (tmp_path / "model.safetensors").chmod(0)
    with pytest.raises(CheckpointError, match="permissions"):
        open_checkpoint(tmp_path)


def test_shards_without_their_index(bad_dir, tmp_path):
    shutil.copytree(bad_dir / "good_sharded", tmp_path / "model")
    (tmp_path / "model" / "model.safetensors.index.json").unlink()
    with pytest.raises(CheckpointError, match="without the index"):
        open_checkpoint(tmp_path / "model")


def test_path_that_is_not_there(tmp_path):
    with pytest.raises(CheckpointError, match="there is no such path"):
        open_checkpoint(tmp_path / "org" / "model")


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        (b'{"a": 1, "b": {"c": 1, "c": 2}}', "'c' stands twice"),
        (b'{"a": NaN}', "NaN is not a JSON number"),
        (b'{"a": -Infinity}', "-Infinity is not"),
        (b'{"a": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", "nested too deeply"),
        (b'{"a": "\xff"}', "not UTF-8"),
        (b'{"a": ' + b"9" * 5000 + b"}", "not valid JSON"),
        (b"null", "got null"),
        (b"", "line 1, column 1"),
    ],
)
def test_config_is_strict_json(text, complaint, tmp_path):
    (tmp_path / "config.json").write_bytes(text)
    with pytest.raises(ConfigError, match=complaint):
        open_checkpoint(tmp_path)
