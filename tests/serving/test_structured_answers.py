"""Calls that are required, and answers of a given form, from a model that knows of neither."""

import json

import openai
import pytest
from pydantic import BaseModel

from jaxgen.serving.protocol.chat import ChatTool
from jaxgen.serving.tools import required_schema

HI = [{"role": "user", "content": "hi"}]
SWITCH = {"type": "object", "properties": {"on": {"type": "boolean"}}, "required": ["on"]}
SWITCH |= {"additionalProperties": False}
TOOLS = [{"type": "function", "function": {"name": "set", "parameters": SWITCH}}]
NAMED = {"type": "function", "function": {"name": "set"}}


class Switch(BaseModel):
    """What the model is made to say."""

    on: bool


@pytest.fixture(scope="module")
def ask(served):
    """`ask(**fields)`: a chat completion."""
    with openai.OpenAI(base_url=served.base_url + "/v1", api_key="any", max_retries=0) as client:

        def chat(**fields):
            fixed = {"model": "llama", "messages": HI, "seed": 5, "temperature": 1.0}
            return client.chat.completions.create(**fixed, **fields)

        chat.parse = lambda **fields: client.chat.completions.parse(
            model="llama", messages=HI, seed=5, **fields
        )
        yield chat


@pytest.mark.parametrize("choice", ["required", NAMED], ids=["required", "named"])
def test_a_call_that_must_be(ask, choice):
    asked = {"tools": TOOLS, "tool_choice": choice, "parallel_tool_calls": False}
    whole = ask(**asked).choices[0]
    (call,) = whole.message.tool_calls
    assert call.function.name == "set"
    assert isinstance(json.loads(call.function.arguments)["on"], bool)
    assert not whole.message.content
    assert whole.finish_reason == ("tool_calls" if choice == "required" else "stop")
    arguments, names = "", []
    for chunk in ask(**asked, stream=True):
        for delta in chunk.choices[0].delta.tool_calls or ():
            names += [delta.function.name] if delta.function.name else []
            arguments += delta.function.arguments
    assert names == ["set"]
    assert json.loads(arguments) == json.loads(call.function.arguments)


def test_a_form_that_must_be(ask):
    assert isinstance(ask.parse(response_format=Switch).choices[0].message.parsed.on, bool)
    chosen = ask(extra_body={"structured_outputs": {"choice": ["left", "right"]}})
    assert chosen.choices[0].message.content in ("left", "right")
    with pytest.raises(openai.BadRequestError) as refused:
        ask(extra_body={"structured_outputs": {"regex": "("}})
    assert refused.value.param == "structured_outputs"


@pytest.mark.parametrize("place", ["$defs", "definitions"])
def test_definitions_are_found_from_the_root(place):
    inner = {"$ref": f"#/{place}/colour"}
    parameters = {"properties": {"c": inner}, place: {"colour": {"enum": ["red"]}}}
    function = {"name": "paint", "parameters": parameters}
    schema = required_schema([ChatTool(function=function)] * 2, one=True)
    assert schema[place] == {"colour": {"enum": ["red"]}}
    assert place not in schema["items"]["anyOf"][0]["properties"]["parameters"]
    assert schema["maxItems"] == 1
