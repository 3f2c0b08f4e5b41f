"""SamplingParams accepts what vLLM accepts, and refuses the rest by the parameter's name."""

import math

import pytest

from jaxgen.sampling import InvalidParameter, SamplingParams, StructuredOutputs


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("n", 0),
        ("n", True),
        ("presence_penalty", 2.1),
        ("frequency_penalty", -2.1),
        ("repetition_penalty", 0.0),
        ("repetition_penalty", math.inf),
        ("repetition_penalty", 1e-38),
        ("temperature", -0.1),
        ("temperature", math.nan),
        ("temperature", 2.5),
        ("temperature", "hot"),
        ("top_p", 0.0),
        ("top_p", 1.1),
        ("top_k", -2),
        ("top_k", 1.5),
        ("min_p", -0.1),
        ("seed", 2**63),
        ("stop", ["a", ""]),
        ("stop", [3]),
        ("stop_token_ids", ["a"]),
        ("stop_token_ids", [[1]]),
        ("max_tokens", 0),
        ("min_tokens", -1),
        ("min_tokens", 17),
        ("logprobs", 21),
        ("logprobs", -1),
        ("prompt_logprobs", 21),
        ("logit_bias", {"x": 1}),
        ("logit_bias", {1.5: 1}),
        ("logit_bias", {1: math.nan}),
        ("logit_bias", {1: 10**400}),
        ("logit_bias", dict.fromkeys(range(321), 1)),
        ("allowed_token_ids", []),
        ("ignore_eos", 1),
        ("bad_words", ["no", ""]),
        ("bad_words", 3),
        ("structured_outputs", "json"),
        ("structured_outputs", {}),
        ("structured_outputs", {"regex": "a", "choice": ["b"]}),
        ("structured_outputs", {"regex": ""}),
        ("structured_outputs", {"json": "[1]"}),
        ("structured_outputs", {"json": "{"}),
        ("structured_outputs", {"choice": []}),
        ("structured_outputs", {"choice": ["a", ""]}),
        ("structured_outputs", {"schema": {}}),
        ("structured_outputs", {"regex": "a" * 600_000}),
        ("logprob_token_ids", [1]),
        ("thinking_token_budget", 5),
        ("repetition_detection", {"min_count": 2}),
        ("extra_args", {"a": 1}),
        ("spaces_between_special_tokens", False),
    ],
)
def test_refused_by_name(name, value):
    with pytest.raises(InvalidParameter, match=name) as refused:
        SamplingParams(**{name: value})
    assert refused.value.param == name


def test_unknown_names_are_refused():
    with pytest.raises(InvalidParameter, match="best_of is not a sampling parameter"):
        SamplingParams.from_mapping({"best_of": 2})


def test_defaults_and_normal_forms():
    assert SamplingParams() == SamplingParams.from_mapping({"seed": -1, "top_k": -1, "stop": None})
    params = SamplingParams(
        stop="end", stop_token_ids=[4, 4, 2], logit_bias={"7": 200, 8: -200.0}, logprobs=True
    )
    assert params.stop == ("end",)
    assert params.stop_token_ids == (4, 2)
    assert params.logit_bias == {7: 100.0, 8: -100.0}
    assert params.logprobs == 1


def test_structured_outputs_have_one_kind():
    params = SamplingParams(structured_outputs={"json": {"type": "object"}, "regex": None})
    assert params.structured_outputs == StructuredOutputs(json='{"type": "object"}')
    assert params.structured_outputs.kind == "json"
    assert params.masked
    assert StructuredOutputs(json_object=True, choice=None).kind == "json_object"


def test_tiny_temperatures():
    greedy = SamplingParams(temperature=9e-6, top_p=0.5, top_k=3, min_p=0.1)
    assert greedy.greedy
    assert (greedy.top_p, greedy.top_k, greedy.min_p) == (1.0, 0, 0.0)
    with pytest.warns(UserWarning, match=r"raised to 0\.01"):
        assert SamplingParams(temperature=0.005).temperature == 0.01
    with pytest.raises(InvalidParameter, match="n must be 1 when sampling greedily"):
        SamplingParams(temperature=0, n=2)


def test_stop_strings_need_text():
    with pytest.raises(InvalidParameter, match="use stop_token_ids"):
        SamplingParams(stop="end", detokenize=False)


@pytest.mark.parametrize("name", ["stop_token_ids", "allowed_token_ids"])
@pytest.mark.parametrize("token", [-1, 10])
def test_ids_outside_the_vocabulary(name, token):
    params = SamplingParams(**{name: [3, token]})
    with pytest.raises(InvalidParameter, match="outside the vocabulary of 10") as refused:
        params.validate(10)
    assert refused.value.param == name


def test_bias_ids_outside_the_vocabulary():
    with pytest.raises(InvalidParameter, match="logit_bias names token ids outside"):
        SamplingParams(logit_bias={12: 1.0}).validate(12)
