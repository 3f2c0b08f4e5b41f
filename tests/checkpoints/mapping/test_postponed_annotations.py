"""Parameters and containers are declared alike under postponed (string) annotations."""

from __future__ import annotations

import pytest

from jaxgen_checkpoints.container import LayerContainer, present_if
from jaxgen_checkpoints.errors import MappingError
from jaxgen_checkpoints.parameter import Parameter, Tensor
from jaxgen_checkpoints.parameter_list import ParameterList, ParamList


class Up(Parameter):
    weight: Tensor
    experts: ParamList("num_experts")


class Layer(LayerContainer):
    up: Up
    bias: Up = present_if("has_bias")

    PARAM_MAPPING = {
        "up.weight": "up.weight",
        "up.*": "up.experts",
        "bias.weight": "bias.weight",
        "bias.*": "bias.experts",
    }


def test_module_level_classes(make_model):
    assert Up.dependencies["weight"] is Tensor
    assert issubclass(Up.dependencies["experts"], ParameterList)
    assert list(Layer(make_model(has_bias=False)).parameters) == ["up"]
    assert list(Layer(make_model(has_bias=True)).parameters) == ["up", "bias"]


def test_classes_inside_a_function():
    class Local(Parameter):
        weight: Tensor

    class LocalLayer(LayerContainer):
        local: Local
        PARAM_MAPPING = {"w": "local.weight"}

    assert LocalLayer.PARAM_MAPPING == {"w": "local.weight"}


def test_a_name_that_nobody_knows_is_refused():
    with pytest.raises(MappingError, match="'Tensr' is not defined"):

        class Mistyped(Parameter):
            weight: Tensr  # noqa: F821
