"""MII's client and route, against a server that runs here; launching is in test_launch."""

import sys

import pytest

from jaxgen import LLM
from jaxgen.commands.parser import build_parser
from jaxgen.deployments import Client, DeploymentNotFound, client, serve
from jaxgen.deployments.records import Deployment, read_record, write_record
from jaxgen.pipelines import Pipeline, Response
from jaxgen.sampling import InvalidParameter
from jaxgen.serving.app import create_app
from jaxgen.serving.async_engine import AsyncEngine
from jaxgen.serving.settings import ServerSettings
from jaxgen.text import load_tokenizer
from jaxgen_checkpoints.errors import RefusedInput
from tests.serving.live import live
from tests.serving.stub_engine import StubEngine

OPTIONS = {
    "dtype": "float32",
    "max_num_batched_tokens": 16,
    "max_num_seqs": 1,
    "max_model_len": 96,
    "block_size": 16,
}
GREEDY = {"do_sample": False, "max_new_tokens": 6, "ignore_eos": True}
PROMPTS = ["Hello", "The capital of", "a b c"]


@pytest.fixture(scope="module")
def llm(golden_dir):
    return LLM(golden_dir("llama_plain"), **OPTIONS)


@pytest.fixture(scope="module")
def expected(llm):
    """What a pipeline answers, before the server takes the engine over."""
    return Pipeline(llm)(PROMPTS, **GREEDY)


@pytest.fixture(scope="module")
def server(llm, expected):
    engine = AsyncEngine.of(llm, name="x")
    with live(create_app(engine, ServerSettings(served_model_names=("tiny",)))) as running:
        yield running


@pytest.fixture
def tiny(server):
    with Client(Deployment("tiny", "model", server.base_url, 0)) as client:
        yield client


def test_answers_are_those_of_a_pipeline(tiny, expected):
    assert tiny(PROMPTS, **GREEDY) == expected
    assert tiny.generate(PROMPTS[0], **GREEDY) == expected[:1]
    assert tiny([]) == []


def test_streamed_pieces_make_the_whole(tiny):
    (whole,) = tiny(PROMPTS[1], return_full_text=True, **GREEDY)
    pieces: list[Response] = []
    assert tiny(PROMPTS[1], streaming_fn=pieces.extend, return_full_text=True, **GREEDY) is None
    assert "".join(piece.generated_text for piece in pieces) == whole.generated_text
    assert sum(piece.generated_length for piece in pieces) == whole.generated_length
    assert [p.finish_reason for p in pieces] == ["none"] * (len(pieces) - 1) + ["length"]
    with pytest.raises(RefusedInput, match="one prompt can be streamed, 3 were given"):
        tiny(PROMPTS, streaming_fn=pieces.extend)


def test_what_is_wrong_is_said(tiny, server):
    with pytest.raises(InvalidParameter, match="top_q"):
        tiny("x", top_q=1)
    with pytest.raises(RefusedInput, match="max_length"):
        tiny("a long prompt indeed", max_length=1)
    with (
        Client(Deployment("other", "model", server.base_url, 0)) as unknown,
        pytest.raises(RefusedInput, match="other"),
    ):
        unknown("x")
    with (
        Client(Deployment("tiny", "model", "http://127.0.0.1:9", 0)) as gone,
        pytest.raises(ConnectionError, match="starts it anew"),
    ):
        gone("x")


def test_records_are_found_by_name(tmp_path, monkeypatch):
    monkeypatch.setenv("JAXGEN_CACHE_PATH", str(tmp_path / "kept"))
    with pytest.raises(DeploymentNotFound, match="there are: none"):
        client("tiny")
    made = Deployment("org/tiny", "model", "http://127.0.0.1:1", 7)
    write_record(made)
    assert read_record("org/tiny") == made
    assert [path.parent for path in tmp_path.rglob("*.json")] == [tmp_path / "kept"]
    with pytest.raises(RefusedInput, match="no letter"):
        read_record("..")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"port_number": 50050}, "the client speaks HTTP"),
        ({"enable_restful_api": False}, "the client speaks HTTP"),
        ({"quantization_mode": "wf6af16"}, "no option --quantization-mode"),
        ({"quantization": "fp8"}, "--quantization: weights have the checkpoint's own format"),
        ({"max_num_seqs": "many"}, "--max-num-seqs: invalid int value"),
        ({"override_generation_config": [1]}, "expected a JSON object"),
        ({"ssl_certfile": "cert.pem"}, "speaks plain HTTP"),
    ],
)
def test_options_that_there_are_not(options, words):
    with pytest.raises(RefusedInput, match=words):
        serve("model", **options)


def test_options_that_are_objects_reach_the_server(tmp_path, monkeypatch):
    """As JSON. Nothing is started here."""
    monkeypatch.setenv("JAXGEN_CACHE_PATH", str(tmp_path))
    asked = []
    monkeypatch.setattr("jaxgen.deployments.launch.start", lambda words, *_: asked.extend(words))
    monkeypatch.setattr("jaxgen.deployments.launch._wait_until_ready", lambda *_: None)
    usual = {"temperature": 0.5, "max_new_tokens": 7}
    serve("model", "it", override_generation_config=usual).close()
    args = build_parser().parse_args(asked)
    assert args.override_generation_config == usual


@pytest.fixture
def locked(golden_dir, tmp_path, monkeypatch):
    """A deployment behind a key that nobody here knows."""
    monkeypatch.setenv("JAXGEN_CACHE_PATH", str(tmp_path))
    tokenizer = load_tokenizer(golden_dir("llama_plain"), vocab_size=512)
    settings = ServerSettings(served_model_names=("locked",), api_keys=("secret",))
    with live(create_app(StubEngine(tokenizer, ["a"]), settings)) as running:
        write_record(Deployment("locked", "model", running.base_url, 7))
        yield running


def test_who_has_no_key_ends_a_deployment_all_the_same(locked, monkeypatch):
    stopped = []
    monkeypatch.setattr(sys.modules[Client.__module__], "stop", stopped.append)
    ended = client("locked")
    ended.terminate_server()
    assert stopped == [7]
    with pytest.raises(ConnectionError, match=r"'locked' is closed: jaxgen\.client gives another"):
        ended(["hi"])
    with pytest.raises(DeploymentNotFound):
        client("locked")


def test_a_name_is_served_once(locked, monkeypatch):
    monkeypatch.setattr("jaxgen.deployments.launch.start", lambda *_: pytest.fail("it was started"))
    with pytest.raises(RefusedInput, match="'locked' runs already"):
        serve("model", "locked")
