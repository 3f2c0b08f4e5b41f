"""A snapshot saved from one mesh is read back onto any other, bit for bit."""

import json

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file

from jaxgen_checkpoints.container import LayerContainer
from jaxgen_checkpoints.container_map import ContainerMap
from jaxgen_checkpoints.errors import CheckpointError, RefusedInput
from jaxgen_checkpoints.load import load
from jaxgen_checkpoints.mesh_layout import DEFAULT_RULES, WHOLE_EXPERTS, MeshLayout, make_mesh
from jaxgen_checkpoints.parameters.attention_output import AttentionOutput
from jaxgen_checkpoints.parameters.embedding import Embedding
from jaxgen_checkpoints.parameters.moe import GatedExperts
from jaxgen_checkpoints.parameters.norm import Norm
from jaxgen_checkpoints.parameters.qkv import UnfusedQKV
from jaxgen_checkpoints.snapshot import SNAPSHOT_FILE, open_snapshot
from jaxgen_checkpoints.store import save_snapshot


class Layer(LayerContainer):
    norm: Norm
    qkv: UnfusedQKV
    out: AttentionOutput
    experts: GatedExperts

    PARAM_MAPPING = {
        "norm": "norm.weight",
        "q": "qkv.q",
        "k": "qkv.k",
        "v": "qkv.v",
        "o": "out.weight",
        "experts.*.gate": "experts.gate",
        "experts.*.up": "experts.up",
    }


class Ends(LayerContainer):
    embed: Embedding
    PARAM_MAPPING = {"embed": "embed.weight"}


@pytest.fixture
def containers(make_model):
    model = make_model(num_layers=2, heads=7, kv_heads=1, head_dim=4, vocab_size=509)
    containers = ContainerMap()
    containers.set_transformer_params(["h"], [Layer(model), Layer(model)])
    containers.set_non_transformer_params(Ends(model))
    return containers


@pytest.fixture
def source(containers, random_arrays, counting_source):
    return counting_source(random_arrays(containers.expected_tensors()))


@pytest.fixture(params=[DEFAULT_RULES, WHOLE_EXPERTS], ids=["sliced", "whole"])
def saved(containers, source, tmp_path, request):
    """A snapshot in bfloat16, saved from four tensor and two expert shards, in several files."""
    layout = MeshLayout(make_mesh(tensor=4, expert=2), request.param)
    described = containers.describe(source, layout)
    save_snapshot(
        tmp_path / "snapshot",
        load(described, layout, "bfloat16"),
        described,
        policy="tiny",
        config={"model_type": "tiny"},
        generation_config={"eos_token_id": [1, 2]},
        gguf_tokenizer={"tokenizer.ggml.tokens": ["é", "b"]},
        max_file_bytes=4000,
    )
    return tmp_path / "snapshot"


@pytest.mark.parametrize(
    ("sizes", "rules"),
    [
        ({}, DEFAULT_RULES),
        ({"tensor": 2}, DEFAULT_RULES),
        ({"tensor": 8}, DEFAULT_RULES),
        ({"tensor": 2, "expert": 4}, DEFAULT_RULES),
        ({"tensor": 2, "expert": 3}, WHOLE_EXPERTS),
    ],
)
def test_any_mesh_reads_it_back(containers, source, saved, sizes, rules):
    snapshot = open_snapshot(saved)
    layout = MeshLayout(make_mesh(**sizes), rules)
    restored = load(containers.describe(snapshot.source, layout), layout, "bfloat16")
    direct = load(containers.describe(source, layout), layout, "bfloat16")
    assert jax.tree.structure(restored) == jax.tree.structure(direct)
    for ours, theirs in zip(jax.tree.leaves(restored), jax.tree.leaves(direct), strict=True):
        assert ours.sharding == theirs.sharding
        np.testing.assert_array_equal(np.asarray(ours), np.asarray(theirs))
    assert snapshot.config == {"model_type": "tiny"}
    assert snapshot.generation_config == {"eos_token_id": [1, 2]}
    assert snapshot.gguf_tokenizer == {"tokenizer.ggml.tokens": ["é", "b"]}
    assert snapshot.source.policy == "tiny"


def test_files_are_plain_safetensors_of_canonical_weights(saved, source):
    files = sorted(saved.glob("*.safetensors"))
    assert len(files) > 1
    stored = {name: value for file in files for name, value in load_file(file).items()}
    assert stored["embed"].shape == (509, 6)
    assert stored["layers.1.qkv"].shape == (9, 4, 6)
    np.testing.assert_array_equal(stored["embed"], source.arrays["embed"].astype("bfloat16"))


def test_one_that_knew_no_hidden_layer_of_experts_is_read(containers, saved):
    axes = ["experts", None, "ffn", None]
    edit(saved, lambda m: m["axes"].update({f"layers.{n}.experts": axes for n in (0, 1)}))
    described = containers.describe(open_snapshot(saved).source, MeshLayout(make_mesh()))
    assert described["layers"][1]["experts"].axes == ("experts", None, "expert_ffn", None)


def test_a_snapshot_is_not_written_over(containers, source, saved):
    layout = MeshLayout(make_mesh())
    described = containers.describe(source, layout)
    arrays = load(described, layout, "float32")
    with pytest.raises(RefusedInput, match="holds a snapshot already"):
        save_snapshot(saved, arrays, described, policy="tiny", config={}, generation_config={})


def edit(folder, change):
    manifest = json.loads((folder / SNAPSHOT_FILE).read_text())
    change(manifest)
    (folder / SNAPSHOT_FILE).write_text(json.dumps(manifest))


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (lambda m: m.update(version=99), "expected 'jaxgen snapshot' version 1, got .* version 99"),
        (lambda m: m.pop("config"), "'config' is missing or of a wrong type"),
        (lambda m: m.update(axes=[]), "'axes' is missing or of a wrong type"),
    ],
)
def test_a_faulty_manifest_is_refused(saved, change, match):
    edit(saved, change)
    with pytest.raises(CheckpointError, match=match):
        open_snapshot(saved)


def test_a_snapshot_that_is_not_whole_is_refused(saved):
    *_, last = sorted(saved.glob("*.safetensors"))
    last.write_bytes(last.read_bytes()[:-1])
    with pytest.raises(CheckpointError, match=f"{last.name}: .*reaches past the end"):
        open_snapshot(saved)
    last.unlink()
    with pytest.raises(CheckpointError, match=f"shards are not in the folder: {last.name}"):
        open_snapshot(saved)


def test_weights_of_another_layout_are_refused(containers, saved, make_model):
    layout = MeshLayout(make_mesh())
    edit(saved, lambda m: m["axes"].update({"layers.0.qkv": ["heads", None, None]}))
    with pytest.raises(CheckpointError, match=r"layers.0.qkv: was saved with axes \('heads', None"):
        containers.describe(open_snapshot(saved).source, layout)
    model = make_model(num_layers=1, heads=7, kv_heads=1, head_dim=4, vocab_size=512)
    other = ContainerMap()
    other.set_transformer_params(["h"], [Layer(model)])
    other.set_non_transformer_params(Ends(model))
    with pytest.raises(CheckpointError) as caught:
        other.describe(open_snapshot(saved).source, layout)
    assert "layers.1.norm: is in the snapshot, but the model has no such weight" in str(
        caught.value
    )
    assert "'embed': found shape [509, 6], expected [512, 6]" in str(caught.value)
