"""A parameter collects its dependencies once each and describes its weight without reading."""

import numpy as np
import pytest

from jaxgen_checkpoints.errors import CheckpointError, MappingError
from jaxgen_checkpoints.lazy import lazy, stack
from jaxgen_checkpoints.mesh_layout import MeshLayout, make_mesh
from jaxgen_checkpoints.parameter import Parameter, Tensor
from jaxgen_checkpoints.parameter_list import ParameterList, ParamList
from jaxgen_checkpoints.source import TensorInfo


class Pair(Parameter):
    """Two tensors stacked."""

    first: Tensor
    second: Tensor
    axes = (None, "ffn")

    def expected(self, model):
        return {"first": (model.ffn_dim,), "second": (model.ffn_dim,)}

    def canonical(self, model):
        return stack(0, [self.first, self.second])


class Experts(Parameter):
    """One tensor an expert."""

    items: ParamList("num_experts")
    axes = ("experts", None)

    def expected(self, model):
        return {"items": (model.expert_ffn_dim,)}

    def canonical(self, model):
        return stack(0, list(self.items))


@pytest.fixture
def tensor(counting_source):
    def make(name, shape, dtype=np.float32):
        source = counting_source({name: np.zeros(shape, dtype)})
        return lazy(source.tensors()[name], source)

    return make


@pytest.fixture
def one_device():
    return MeshLayout(make_mesh())


def test_dependencies_are_annotations_inherited_ones_first():
    class Triple(Pair):
        third: Tensor
        note: str = "not a dependency"

    assert list(Triple.dependencies) == ["first", "second", "third"]
    assert issubclass(Experts.dependencies["items"], ParameterList)


def test_finalize_describes_and_does_not_read(make_model, random_arrays, counting_source):
    model = make_model(ffn_dim=5)
    source = counting_source(random_arrays({"a": (5,), "b": (5,)}))
    pair = Pair(model)
    assert not pair.is_populated
    for dependency, name in (("first", "a"), ("second", "b")):
        pair.set(dependency, lazy(source.tensors()[name], source))
    weight = pair.finalize(model, MeshLayout(make_mesh(tensor=2)))
    assert (weight.shape, weight.tensor.shape, weight.axes) == ((2, 6), (2, 5), (None, "ffn"))
    assert source.reads == []
    placed = weight.placed().read_all()
    np.testing.assert_array_equal(placed[:, :5], np.stack([source.arrays["a"], source.arrays["b"]]))
    assert not placed[:, 5].any()


def test_a_tensor_set_twice_names_both_sources(make_model, tensor):
    pair = Pair(make_model(), "gate_up")
    pair.first = tensor("gate", (10,))
    with pytest.raises(CheckpointError, match=r"gate_up.first is set twice: by gate and by w1"):
        pair.first = tensor("w1", (10,))
    with pytest.raises(MappingError, match="no dependency 'third'"):
        pair.set("third", tensor("x", (10,)))
    with pytest.raises(MappingError, match="expected a LazyTensor"):
        pair.second = np.zeros(10)
    with pytest.raises(CheckpointError, match=r"gate_up.second has not been set"):
        _ = pair.second


def test_lists_fill_by_index_once_each(make_model, tensor, one_device):
    model = make_model(num_experts=3)
    experts = Experts(model, "up")
    for index in (2, 0):
        experts.set("items", tensor(f"e{index}", (5,)), index)
    assert experts.missing() == [("items", 1)]
    with pytest.raises(CheckpointError, match=r"up is incomplete: \[\('items', 1\)\] not set"):
        experts.finalize(model, one_device)
    with pytest.raises(CheckpointError, match=r"up.items\[2\] is set twice: by e2 and by again"):
        experts.set("items", tensor("again", (5,)), 2)
    with pytest.raises(
        CheckpointError, match=r"items\[3\], from e3, is out of range: num_local_experts is 3"
    ):
        experts.set("items", tensor("e3", (5,)), 3)
    experts.set("items", tensor("e1", (5,)), 1)
    assert experts.finalize(model, one_device).shape == (3, 5)


def test_lists_are_not_assigned_and_need_their_count(make_model, tensor):
    experts = Experts(make_model())
    with pytest.raises(MappingError, match="is a list: set its items"):
        experts.items = tensor("x", (5,))
    with pytest.raises(MappingError, match="expected a LazyTensor"):
        experts.items = [tensor("x", (5,))]
    model = make_model()
    del model.num_experts
    with pytest.raises(MappingError, match="expected an int 'num_experts' on SimpleNamespace"):
        Experts(model)


@pytest.mark.parametrize(
    ("shape", "dtype", "match"),
    [
        ((9,), np.float32, r"b: found shape \[9\], expected \[10\] = \[intermediate_size\]"),
        ((10,), np.int32, "b: has type I32, expected a floating type"),
        ((10,), "float8_e4m3fn", "b: has type F8_E4M3 but no scales"),
    ],
)
def test_wrong_tensors_are_explained(make_model, tensor, one_device, shape, dtype, match):
    model = make_model()
    pair = Pair(model)
    pair.first = tensor("a", (10,))
    pair.second = tensor("b", shape, np.dtype(dtype))
    with pytest.raises(CheckpointError, match=match):
        pair.finalize(model, one_device)


def test_a_dependency_cannot_hide_a_method():
    with pytest.raises(MappingError, match=r"Bad.finalize: a dependency cannot have this name"):

        class Bad(Parameter):
            finalize: Tensor


def test_sources_of_different_float_types_meet(make_model, counting_source):
    model = make_model(ffn_dim=1)
    arrays = {"a": np.ones(1, "bfloat16"), "b": np.full(1, 1.001, np.float32)}
    source = counting_source(arrays)
    pair = Pair(model)
    pair.first = lazy(TensorInfo("a", (1,), arrays["a"].dtype, ""), source)
    pair.second = lazy(TensorInfo("b", (1,), arrays["b"].dtype, ""), source)
    values = pair.canonical(model).read_all()
    assert values.dtype == np.float32
    assert values[1] == np.float32(1.001)
