"""A whole checkpoint is mapped before it is read, and all that is wrong with it is told at once."""

import warnings

import numpy as np
import pytest

from jaxgen_checkpoints.container import LayerContainer, present_if
from jaxgen_checkpoints.container_map import ContainerMap
from jaxgen_checkpoints.errors import CheckpointError, CheckpointWarning, MappingError
from jaxgen_checkpoints.mesh_layout import MeshLayout, make_mesh
from jaxgen_checkpoints.parameters.embedding import Embedding, Unembedding
from jaxgen_checkpoints.parameters.mlp import MLP2, GatedMLP, MLP2Bias
from jaxgen_checkpoints.parameters.moe import ExpertsDown
from jaxgen_checkpoints.parameters.norm import Norm


class Layer(LayerContainer):
    norm: Norm
    gate_up: GatedMLP
    down: MLP2
    down_bias: MLP2Bias = present_if("mlp_bias")

    PARAM_MAPPING = {
        "norm.weight": "norm.weight",
        "mlp.gate.weight": "gate_up.gate",
        "mlp.up.weight": "gate_up.up",
        "mlp.down.weight": "down.weight",
        "mlp.down.bias": "down_bias.bias",
    }


class MoELayer(LayerContainer):
    down: ExpertsDown
    PARAM_MAPPING = {"experts.*.w2.weight": "down.down"}


class Ends(LayerContainer):
    embed: Embedding
    unembed: Unembedding = present_if("untied")

    PARAM_MAPPING = {"embed.weight": "embed.weight", "lm_head.weight": "unembed.weight"}


@pytest.fixture
def mesh():
    return MeshLayout(make_mesh())


@pytest.fixture
def make_map(make_model):
    def make(layers=2, layer=Layer, untied=True, **changes):
        model = make_model(num_layers=layers, mlp_bias=False, untied=untied, **changes)
        containers = ContainerMap()
        containers.set_transformer_params(["model.h"], [layer(model) for _ in range(layers)])
        containers.set_non_transformer_params(Ends(model))
        return containers

    return make


@pytest.fixture
def good(make_map, random_arrays):
    return random_arrays(make_map().expected_tensors())


@pytest.fixture
def describe(counting_source, mesh):
    """Describe arrays by a map and return (described, the one warning or None); of no tensor but
    `reads` is a value read.
    """

    def run(containers, arrays, *, reads=frozenset(), **options):
        source = counting_source(arrays)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            described = containers.describe(source, mesh, **options)
        assert {name for name, _ in source.reads} == reads
        assert all(warning.category is CheckpointWarning for warning in caught)
        assert len(caught) <= 1
        return described, str(caught[0].message) if caught else None

    return run


def refusal(describe, containers, arrays, **options):
    with pytest.raises(CheckpointError) as caught:
        describe(containers, arrays, **options)
    return str(caught.value)


def test_a_good_checkpoint_is_described_and_again(make_map, good, describe):
    containers = make_map()
    for _ in range(2):
        described, warning = describe(containers, good)
        assert warning is None
        assert list(described) == ["layers", "embed", "unembed"]
        assert [list(layer) for layer in described["layers"]] == [["norm", "gate_up", "down"]] * 2
    gate_up = described["layers"][1]["gate_up"].placed().read_all()
    np.testing.assert_array_equal(gate_up[1], good["model.h.1.mlp.up.weight"])


def test_all_problems_come_in_one_message(make_map, good, describe):
    del good["model.h.0.norm.weight"]
    del good["lm_head.weight"]
    good["model.h.1.mlp.gate.weight"] = good["model.h.1.mlp.gate.weight"].T
    good["embed.weight"] = good["embed.weight"].astype(np.int8)
    message = refusal(describe, make_map(), good)
    assert "4 problems:" in message
    assert "model.h.0.norm.weight: missing\n" in message
    assert "lm_head.weight: missing; tie_word_embeddings is false" in message
    assert "embed.weight: has type I8, expected a floating type" in message
    assert (
        "model.h.1.mlp.gate.weight: found shape [6, 10], "
        "expected [10, 6] = [intermediate_size, hidden_size]; it looks transposed" in message
    )


def test_the_same_problem_in_many_layers_is_told_once(make_map, random_arrays, describe):
    arrays = random_arrays(make_map(layers=8).expected_tensors())
    for layer in (0, 1, 2, 5):
        arrays[f"model.h.{layer}.norm.weight"] = np.zeros(7, np.float32)
        del arrays[f"model.h.{layer}.mlp.up.weight"]
    message = refusal(describe, make_map(layers=8), arrays)
    assert "model.h.0.norm.weight: found shape [7], expected [6] = [hidden_size]" in message
    assert message.count("(likewise in layers 1-2, 5)") == 2
    assert message.count("\n") == 2


def test_missing_layers_are_counted_not_listed(make_map, good, describe):
    message = refusal(describe, make_map(layers=3), good)
    assert message == (
        "10 arrays: the tensors do not fit the model: model.h.2: all 4 tensors missing: "
        "config says num_hidden_layers=3, the checkpoint holds 2"
    )
    message = refusal(describe, make_map(layers=6), good)
    assert "model.h.2-5: each layer's 4 tensors missing: config says num_hidden_layers=6" in message


def test_missing_experts_are_named_one_by_one(make_map, random_arrays, describe):
    arrays = random_arrays(make_map(layer=MoELayer).expected_tensors())
    del arrays["model.h.1.experts.2.w2.weight"]
    message = refusal(describe, make_map(layer=MoELayer), arrays)
    assert "model.h.1.experts.2.w2.weight: missing" in message
    arrays["model.h.1.experts.3.w2.weight"] = np.zeros((6, 5), np.float32)
    message = refusal(describe, make_map(layer=MoELayer), arrays)
    assert "is out of range: num_local_experts is 3" in message


def test_unused_tensors_warn_with_the_nearest_name_or_are_refused(make_map, good, describe):
    good["model.h.0.mlp.gates.weight"] = np.zeros(1, np.float32)
    good["odd\x1b[2J.weight"] = np.zeros(1, np.float32)
    _, warning = describe(make_map(), good)
    assert (
        "model.h.0.mlp.gates.weight: not used; "
        "the nearest name that is known is 'mlp.gate.weight'" in warning
    )
    assert "odd\\x1b[2J.weight: not used" in warning
    assert "mlp.gates.weight" in refusal(describe, make_map(), good, strict=True)


def test_layers_too_many_warn_once(make_map, good, describe):
    described, warning = describe(make_map(layers=1), good)
    assert len(described["layers"]) == 1
    assert "model.h.1: 4 tensors of a layer too many: config says num_hidden_layers=1" in warning
    assert "the checkpoint holds 2" in warning


def test_what_the_config_switches_off_warns(make_map, good, describe):
    for layer in range(2):
        good[f"model.h.{layer}.mlp.down.bias"] = np.zeros(6, np.float32)
    _, warning = describe(make_map(), good)
    assert "model.h.0.mlp.down.bias: not used, because mlp_bias is false (likewise in layer 1)" in (
        warning
    )


def test_a_misnamed_tensor_is_suggested_where_it_is_missing(make_map, good, describe):
    good["model.h.0.mlp.gat.weight"] = good.pop("model.h.0.mlp.gate.weight")
    message = refusal(describe, make_map(), good)
    assert "is 'model.h.0.mlp.gat.weight', which nothing uses, meant?" in message


def test_two_prefixes_for_one_layer_are_mapped_twice(make_map, good, describe, make_model):
    containers = make_map()
    model = make_model(mlp_bias=False)
    containers.set_transformer_params(["model.h", "h"], [Layer(model), Layer(model)])
    for layer in range(2):
        good[f"h.{layer}.norm.weight"] = good.pop(f"model.h.{layer}.norm.weight")
    described, warning = describe(containers, good)
    assert warning is None
    assert len(described["layers"]) == 2
    good["model.h.1.norm.weight"] = good["h.1.norm.weight"]
    message = refusal(describe, containers, good)
    assert "norm.weight is set twice: by h.1.norm.weight and by model.h.1.norm.weight" in message


def test_tied_copies_are_accepted_and_stand_in_when_alone(make_map, good, describe):
    containers = make_map(untied=False)
    containers.set_tied({"lm_head.weight": "embed.weight"})
    good["lm_head.weight"] = good["embed.weight"]
    described, warning = describe(containers, good, reads={"lm_head.weight", "embed.weight"})
    assert warning is None
    assert "unembed" not in described
    assert described["embed"].tensor.sources == {"embed.weight"}
    del good["embed.weight"]
    described, warning = describe(containers, good)
    assert warning is None
    assert described["embed"].tensor.sources == {"lm_head.weight"}


def test_a_tied_copy_with_values_of_its_own_is_refused(make_map, good, describe):
    containers = make_map(untied=False)
    containers.set_tied({"lm_head.weight": "embed.weight"})
    other = good["embed.weight"].copy()
    other[7, 3] += 1
    for head in (other, good["embed.weight"][:-1]):
        message = refusal(describe, containers, {**good, "lm_head.weight": head})
        assert "lm_head.weight: holds other values than embed.weight" in message
        assert "set tie_word_embeddings to false" in message


def test_unmapped_patterns_are_silent_whole_names(make_map, good, describe):
    for name in ("model.h.0.rotary.inv_freq", "visual.a.b.weight", "model.h.7.eh_proj.weight"):
        good[name] = np.zeros(1, np.int64)
    containers = make_map()
    containers.set_unmapped_params(["model.h.*.rotary.inv_freq", "visual.**", "model.h.7.**"])
    assert describe(containers, good)[1] is None
    containers.set_unmapped_params(["rotary.inv_freq", "visual.*", "model.h.7"])
    assert "3 problems" in refusal(describe, containers, good, strict=True)


@pytest.mark.parametrize(
    ("method", "arguments", "match"),
    [
        ("set_unmapped_params", ("rotary",), "patterns: expected a list of strings, got 'rotary'"),
        ("set_transformer_params", ("model.h", []), "prefixes: expected a list of strings"),
        ("set_transformer_params", (["h"], Layer), "containers: expected a list with one"),
        ("set_transformer_params", (["h"], [Layer]), "containers: expected a list with one"),
        ("set_non_transformer_params", (Ends,), "container: expected a LayerContainer"),
        ("set_tied", (["lm_head.weight"],), "copies: expected a mapping"),
        ("set_other_beginnings", ("model.",), "beginnings: expected a mapping"),
    ],
)
def test_misuse_is_a_mapping_error(method, arguments, match):
    with pytest.raises(MappingError, match=match):
        getattr(ContainerMap(), method)(*arguments)
