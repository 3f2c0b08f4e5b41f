"""Every rule of a PARAM_MAPPING is checked as the class is made; names find one place."""

import numpy as np
import pytest

from jaxgen_checkpoints.container import LayerContainer, present_if
from jaxgen_checkpoints.errors import CheckpointError, MappingError
from jaxgen_checkpoints.lazy import lazy
from jaxgen_checkpoints.mesh_layout import MeshLayout, make_mesh
from jaxgen_checkpoints.parameter import Parameter, Tensor
from jaxgen_checkpoints.parameter_list import ParamList
from jaxgen_checkpoints.parameters.mlp import MLP2, FusedGatedMLP, GatedMLP
from jaxgen_checkpoints.parameters.norm import Norm


class Single(Parameter):
    """One number, to have something to map."""

    t: Tensor
    axes = (None,)

    def expected(self, model):
        return {"t": (1,)}

    def canonical(self, model):
        return self.t


class Mixed(Parameter):
    """A list and a tensor."""

    items: ParamList("num_experts")
    t: Tensor


class MLP(LayerContainer):
    """A parent to inherit from."""

    gate_up: GatedMLP
    down: MLP2

    PARAM_MAPPING = {
        "gate.weight": "gate_up.gate",
        "up.weight": "gate_up.up",
        "down.weight": "down.weight",
    }


@pytest.fixture
def one(counting_source):
    def make(name, shape=(1,)):
        source = counting_source({name: np.zeros(shape, np.float32)})
        return lazy(source.tensors()[name], source)

    return make


FAULTS = [
    (Single, {"a": "p"}, "'a' is mapped to 'p'; expected 'parameter.dependency'"),
    (Single, {"a": "p.t.u"}, "expected 'parameter.dependency'"),
    (Single, {"a": ()}, "'a' is mapped to nothing"),
    (Single, {"a": "q.t"}, r"parameter 'q', which is not one of \['p'\]"),
    (Single, {"a": "p.u"}, r"'a' is mapped to p.u; Single has \['t'\]"),
    (Single, {"a": "p.t", "b": "p.t"}, "p.t is mapped twice, from 'a' and from 'b'"),
    (Mixed, {"a": "p.t"}, "no source is mapped to p.items"),
    (Mixed, {"z.*": "p.items"}, "no source is mapped to p.t"),
    (Mixed, {"z": "p.items", "a": "p.t"}, r"must hold exactly one '\*' \(the index\); it holds 0"),
    (Mixed, {"z.*.*": "p.items", "a": "p.t"}, "it holds 2"),
    (Mixed, {"z.*": ("p.items", "p.t")}, "to a list and to a tensor in one rule"),
]


@pytest.mark.parametrize(("kind", "mapping", "match"), FAULTS)
def test_faulty_mappings_are_refused_as_the_class_is_made(kind, mapping, match):
    body = {"__annotations__": {"p": kind}, "PARAM_MAPPING": mapping}
    with pytest.raises(MappingError, match=f"Layer: .*{match}"):
        type("Layer", (LayerContainer,), body)


def test_a_class_without_mapping_is_only_a_base(make_model):
    class Base(LayerContainer):
        p: Single

    with pytest.raises(MappingError, match="Base has parameters but no PARAM_MAPPING"):
        Base(make_model())

    class Child(Base):
        PARAM_MAPPING = {"a": "p.t"}

    assert list(Child(make_model()).parameters) == ["p"]


def test_a_parameter_cannot_hide_a_method():
    with pytest.raises(MappingError, match=r"Layer.finalize: a parameter cannot have this name"):

        class Layer(LayerContainer):
            finalize: Single
            PARAM_MAPPING = {"a": "finalize.t"}


def test_a_child_overrides_by_source_and_by_target(make_model):
    class Renamed(MLP):
        PARAM_MAPPING = {"w2.weight": "down.weight"}

    class Swapped(MLP):
        PARAM_MAPPING = {"gate.weight": "gate_up.up", "up.weight": "gate_up.gate"}

    class Fused(MLP):
        gate_up: FusedGatedMLP
        norm: Norm
        PARAM_MAPPING = {"gate_up.weight": "gate_up.gate_up", "norm.weight": "norm.weight"}

    renamed = Renamed(make_model())
    assert renamed.find("down.weight") is None
    assert renamed.find("w2.weight").targets == (("down", "weight"),)
    assert Swapped(make_model()).find("gate.weight").targets == (("gate_up", "up"),)
    fused = Fused(make_model())
    assert (fused.find("gate.weight"), fused.find("up.weight")) == (None, None)
    assert list(fused.parameters) == ["gate_up", "down", "norm"]
    assert list(MLP(make_model()).missing()) == ["gate.weight", "up.weight", "down.weight"]


def test_a_child_that_retargets_one_of_several_keeps_the_others(make_model):
    class Tied(LayerContainer):
        a: Single
        b: Single
        PARAM_MAPPING = {"shared": ("a.t", "b.t")}

    class Untied(Tied):
        PARAM_MAPPING = {"own": "b.t"}

    assert Untied(make_model()).find("shared").targets == (("a", "t"),)


def test_patterns_are_anchored_literal_and_of_one_segment(make_model):
    class Layer(LayerContainer):
        a: Single
        b: Single
        items: Mixed
        PARAM_MAPPING = {
            "mlp.*.weight": "a.t",
            "mlp.up.weight": "b.t",
            "experts.*.w1": "items.items",
            "t": "items.t",
        }

    layer = Layer(make_model())
    assert layer.find("mlp.up.weight").targets == (("b", "t"),)  # an exact name beats a pattern
    assert layer.find("mlp.x.weight").targets == (("a", "t"),)
    for name in (
        "mlp.x.y.weight",
        "mlp.x.weight.scale",
        "x.mlp.x.weight",
        "mlpXxXweight",
        "mlp..weight",
    ):
        assert layer.find(name) is None
    assert layer.find("experts.12.w1").index == 12
    for name in ("experts.x.w1", "experts.01.w1", "experts.-1.w1", "experts.1.w10"):
        assert layer.find(name) is None


def test_two_patterns_for_one_name_are_refused(make_model):
    class Layer(LayerContainer):
        a: Single
        b: Single
        PARAM_MAPPING = {"x.*": "a.t", "*.y": "b.t"}

    layer = Layer(make_model())
    assert layer.find("x.z").targets == (("a", "t"),)
    with pytest.raises(
        MappingError, match=r"'x.y' matches more than one source: \['x.\*', '\*.y'\]"
    ):
        layer.find("x.y")


def test_optional_parameters_exist_where_the_model_says_so(make_model, one):
    class Layer(LayerContainer):
        p: Single
        q: Single = present_if("bias")
        PARAM_MAPPING = {"a": "p.t", "b": "q.t"}

    without = Layer(make_model(bias=False))
    assert (without.q, list(without.missing())) == (None, ["a"])
    with pytest.raises(CheckpointError, match="tensor 'b' is not wanted: bias is false"):
        without.set_dependency("b", one("b"))
    assert list(Layer(make_model(bias=True)).missing()) == ["a", "b"]
    with pytest.raises(MappingError, match="asks SimpleNamespace for 'bias', which it has not got"):
        Layer(make_model())
    with pytest.raises(MappingError, match="is optional but not annotated"):
        type("Odd", (LayerContainer,), {"r": present_if("bias")})

    class Always(Layer):
        q: Single

    assert list(Always(make_model()).parameters) == ["p", "q"]


def test_one_source_feeds_several_and_states_follow(make_model, one):
    class Layer(LayerContainer):
        p: Single
        q: Single
        PARAM_MAPPING = {"a": ("p.t", "q.t")}

    mesh = MeshLayout(make_mesh())
    layer = Layer(make_model())
    assert (layer.is_populated, layer.is_initialized) == (False, False)
    with pytest.raises(CheckpointError, match="p is incomplete"):
        layer.finalize(mesh)
    with pytest.raises(CheckpointError, match="Layer has no rule for tensor 'c'"):
        layer.set_dependency("c", one("c"))
    layer.set_dependency("a", one("a"))
    assert (layer.is_populated, layer.is_initialized) == (True, False)
    assert list(layer.finalize(mesh)) == ["p", "q"]
    assert layer.is_initialized


def test_finished_tensors_can_be_injected(make_model, one):
    layer = MLP(make_model())
    layer.direct_injection("gate_up", one("x", (2, 10, 6)))
    assert list(layer.missing()) == ["down.weight"]
    with pytest.raises(CheckpointError, match="no parameter 'gate'"):
        layer.direct_injection("gate", one("x"))
    with pytest.raises(CheckpointError, match=r"found shape \[10, 6\], expected \[6, 10\]"):
        layer.direct_injection("down", one("x", (10, 6)))
    layer.direct_injection("down", one("x", (6, 10)))
    weights = layer.finalize(MeshLayout(make_mesh(tensor=4)))
    assert weights["gate_up"].shape == (2, 12, 6)
