"""Every parameter of a request reaches the engine or is refused by name; null is not given.

So does whatever a client writes where the document leaves the form open: it is served, or refused.
"""

import dataclasses
import json
from types import NoneType
from typing import get_args

import pytest

from jaxgen.pipelines import GenerateParams
from jaxgen.sampling import SamplingParams, StructuredOutputs
from jaxgen.serving.protocol.chat import ChatRequest
from jaxgen.serving.protocol.completion import CompletionRequest
from jaxgen.serving.protocol.responses import ResponsesRequest
from jaxgen.serving.protocol.service import GenerateRequest
from jaxgen.serving.routes import native_request

HUGE = 10**400
JSON = {"content-type": "application/json"}
HI = [{"role": "user", "content": "hi"}]
ROUTES = {
    "/v1/completions": (CompletionRequest, {"prompt": "hi"}),
    "/v1/chat/completions": (ChatRequest, {"messages": HI}),
    "/v1/responses": (ResponsesRequest, {"input": "hi"}),
    "/generate": (GenerateRequest, {"text": "hi"}),
}
ASKED = {
    "n": 2,
    "presence_penalty": 0.5,
    "frequency_penalty": -0.5,
    "repetition_penalty": 1.2,
    "temperature": 0.7,
    "top_p": 0.6,
    "top_k": 7,
    "min_p": 0.05,
    "seed": 11,
    "stop": ["a", "b"],
    "stop_token_ids": [5, 6],
    "ignore_eos": True,
    "max_tokens": 9,
    "min_tokens": 3,
    "prompt_logprobs": 2,
    "skip_special_tokens": False,
    "include_stop_str_in_output": True,
    "logit_bias": {"5": 1.5},
    "allowed_token_ids": [5, 6, 7],
    "bad_words": ["x"],
    "structured_outputs": {"regex": "[ab]+"},
}
REFUSED = {
    "logprob_token_ids": [1],
    "thinking_token_budget": 5,
    "repetition_detection": {"min_count": 2},
    "spaces_between_special_tokens": False,
}
NATIVE = {
    "max_tokens": "max_new_tokens",
    "min_tokens": "min_new_tokens",
    "seed": "sampling_seed",
    "structured_outputs": "regex",
}


def engine_of(client):
    return client.app.state.serving.engine


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_no_parameter_is_lost_on_its_way(ask, path):
    client = ask()
    body = ROUTES[path][1]
    wanted = SamplingParams(**ASKED)
    for name, value in ASKED.items():
        told = client.post(path, json=body | {"max_tokens": 4, name: value})
        assert told.status_code == 200, (name, told.text)
        *_, params = engine_of(client).asked[-1]
        assert getattr(params, name) == getattr(wanted, name), name
    for name, value in REFUSED.items():
        told = client.post(path, json=body | {name: value})
        assert (told.status_code, told.json()["error"]["param"]) == (400, name)
    # `logprobs` has another form in each route, `detokenize` and `extra_args` are Python's.
    known = {*ASKED, *REFUSED, "logprobs", "detokenize", "extra_args"}
    assert {field.name for field in dataclasses.fields(SamplingParams)} == known


def test_nor_on_the_way_of_the_native_route(ask):
    client = ask()
    wanted = SamplingParams(**ASKED)
    missing = {"prompt_logprobs", "allowed_token_ids", "bad_words", "include_stop_str_in_output"}
    for name, value in ASKED.items():
        value = "[ab]+" if name == "structured_outputs" else value
        given = {"max_new_tokens": 4, NATIVE.get(name, name): value}
        told = client.post("/generate", json={"text": "hi", "sampling_params": given})
        if name in missing:
            assert (told.status_code, told.json()["error"]["param"]) == (400, name)
            continue
        assert told.status_code == 200, (name, told.text)
        *_, params = engine_of(client).asked[-1]
        assert getattr(params, name) == getattr(wanted, name), name


@pytest.mark.parametrize("path", ROUTES)
def test_null_is_not_given(ask, path):
    client = ask()
    model, body = ROUTES[path]
    assert client.post(path, json=body).status_code == 200
    *_, plain = engine_of(client).asked[-1]
    optional = [
        name
        for name, field in model.model_fields.items()
        if name not in body and NoneType in get_args(field.annotation)
    ]
    assert len(optional) > 4
    for name in optional:
        told = client.post(path, json=body | {name: None})
        assert told.status_code == 200, (name, told.text)
        *_, params = engine_of(client).asked[-1]
        assert params == plain, name
    told = client.post(path, json=body | dict.fromkeys(optional))
    assert told.status_code == 200
    assert engine_of(client).asked[-1][2] == plain
    if path == "/generate":
        nothing = {"sampling_params": dict.fromkeys(native_request.PARAMS)}
        assert client.post(path, json=body | nothing).status_code == 200
        assert engine_of(client).asked[-1][2] == plain


def anywhere(name):
    """Bodies with a member `name` where only its route knows what it may be."""
    native = {"text": "hi", "sampling_params": {"max_new_tokens": 1}}
    for value in (True, -1, HUGE, 1e308, "", [HUGE], [[1]], {}, {"5": HUGE}):
        member = {name: value}
        if name in native_request.PARAMS:
            yield "/generate", native | {"sampling_params": native["sampling_params"] | member}
        if name in GenerateParams.__dataclass_fields__:
            yield "/mii/stub", {"prompts": "hi", "max_new_tokens": 1} | member
        if name in StructuredOutputs.__dataclass_fields__:
            yield "/v1/completions", {"prompt": "hi", "structured_outputs": member}
            yield "/v1/completions", {"prompt": "hi", "structured_outputs": {"regex": "a"} | member}


def test_values_of_no_form_are_served_or_refused_by_name(ask):
    client = ask(["a"])
    places = (GenerateParams, StructuredOutputs)
    names = {name for place in places for name in place.__dataclass_fields__}
    for name in sorted(names | {*native_request.PARAMS}):
        for path, body in anywhere(name):
            told = client.post(path, content=json.dumps(body), headers=JSON)
            assert told.status_code in (200, 400), (path, name, body)
            assert told.status_code == 200 or told.json()["error"]["param"], (path, name, body)
