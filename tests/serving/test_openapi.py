"""/openapi.json is true: answers are as it says, and nothing that it allows ends in a 5xx."""

import re
from html.parser import HTMLParser

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis.errors import Unsatisfiable
from schemathesis import GenerationMode

from jaxgen.serving.app import all_endpoints, create_app
from jaxgen.serving.openapi import documented
from jaxgen.serving.protocol.chat import ChatAnswer
from jaxgen.serving.protocol.completion import CompletionAnswer
from jaxgen.serving.protocol.responses import ResponsesAnswer
from jaxgen.serving.protocol.service import GenerateAnswer, ModelList, TokenizeAnswer
from jaxgen.serving.settings import ServerSettings
from tests.serving.live import live
from tests.serving.stub_engine import StubEngine

CHAT = {"messages": [{"role": "user", "content": "hi"}], "logprobs": True, "n": 2}
OPERATIONS = [(endpoint.method, documented(endpoint.path)) for endpoint in all_endpoints()]


@pytest.fixture(scope="module")
def schema(tokenizer):
    """The document of a server that listens."""
    app = create_app(StubEngine(tokenizer, ["a", "b"]), ServerSettings(access_log=False))
    with live(app) as server:
        yield schemathesis.openapi.from_url(server.base_url + "/openapi.json")


def try_out(schema, method, path, examples):
    """Sends so many requests that the document allows, and as many that it does not."""
    for mode in (GenerationMode.POSITIVE, GenerationMode.NEGATIVE):
        strategy = schema[path][method].as_strategy(generation_mode=mode)

        @given(strategy)
        @settings(
            max_examples=examples,
            derandomize=True,
            database=None,
            phases=[Phase.generate],
            suppress_health_check=list(HealthCheck),
        )
        def send(case):
            response = case.call()
            assert response.status_code < 500, f"{case.as_curl_command()}: {response.text}"

        try:
            send()
        except Unsatisfiable:
            assert mode is GenerationMode.NEGATIVE  # nothing can be wrong with a bare GET


@pytest.mark.parametrize(("method", "path"), OPERATIONS)
def test_nothing_that_is_allowed_is_a_server_error(schema, method, path):
    try_out(schema, method, path, examples=8 if method == "POST" else 2)


@pytest.mark.slow
@pytest.mark.parametrize(("method", "path"), OPERATIONS)
def test_nor_is_much_more_of_it(schema, method, path):
    try_out(schema, method, path, examples=100)


@pytest.mark.parametrize(
    ("path", "body", "model"),
    [
        ("/v1/completions", {"prompt": ["a", "b"], "logprobs": 1, "echo": True}, CompletionAnswer),
        ("/v1/chat/completions", CHAT, ChatAnswer),
        ("/v1/responses", {"input": "hi"}, ResponsesAnswer),
        ("/tokenize", {"prompt": "hi", "return_token_strs": True}, TokenizeAnswer),
        ("/generate", {"text": "hi"}, GenerateAnswer),
    ],
)
def test_answers_are_what_the_document_says(ask, path, body, model):
    answer = ask().post(path, json=body)
    assert answer.status_code == 200, answer.text
    read = model.model_validate_json(answer.content, strict=True)
    assert not read.model_extra or path in ("/v1/responses", "/generate", "/v1/completions")


def test_every_route_is_in_the_document(ask):
    client = ask()
    ModelList.model_validate_json(client.get("/v1/models").content, strict=True)
    document = client.get("/openapi.json").json()
    described = {(path, method.upper()) for path, o in document["paths"].items() for method in o}
    served = {
        (documented(route.path), next(iter(route.methods - {"HEAD"})))
        for route in client.app.routes
    }
    assert described == served
    assert len(served) == len(all_endpoints())
    fields = document["components"]["schemas"]["ChatRequest"]["properties"]
    assert {"messages", "top_k", "min_p", "ignore_eos", "structured_outputs"} <= set(fields)
    references = set(re.findall(r"#/components/schemas/(\w+)", client.get("/openapi.json").text))
    assert references <= set(document["components"]["schemas"])


class _Outside(HTMLParser):
    """Whatever a page would fetch."""

    def __init__(self):
        super().__init__()
        self.fetched = []

    def handle_starttag(self, tag, attrs):
        self.fetched += [value for name, value in attrs if name in ("src", "href")]


def test_the_status_page_needs_nothing_from_elsewhere(ask):
    client = ask(api_keys=("key",))
    page = client.get("/").text
    reader = _Outside()
    reader.feed(page)
    assert reader.fetched == ["data:,"]
    assert "http" not in page.replace("http-equiv", "")
    numbers = client.get("/status.json").json()
    asked = set(re.findall(r"\bnow\.(\w+)", page)) | set(re.findall(r'rate\("(\w+)"\)', page))
    assert asked <= set(numbers)
    assert numbers["state"] == "ready"
