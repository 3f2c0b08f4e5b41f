"""Keys, sizes, times, queues: what a server must bear from clients that it does not know."""

import contextlib
import shutil
import socket
import ssl
import subprocess
import time

import httpx
import pytest

from jaxgen.serving.app import create_app
from jaxgen.serving.settings import ServerSettings
from jaxgen_checkpoints.errors import ConfigError, RefusedInput
from tests.serving.live import live, post, wait_until
from tests.serving.stub_engine import StubEngine

PROMPT = {"prompt": "hi"}


@pytest.fixture
def serve(tokenizer):
    """`with serve(texts, listen={...}, **settings) as server`: a stub engine behind loopback."""

    @contextlib.contextmanager
    def begin(texts=("a", "b"), *, seconds=0.0, listen=None, **settings):
        engine = StubEngine(tokenizer, texts, seconds=seconds)
        with live(create_app(engine, ServerSettings(**settings)), **(listen or {})) as server:
            yield server

    return begin


def test_any_of_the_keys_opens_everything_but_what_is_open(ask):
    client = ask(api_keys=("first", "second"))
    for path in ("/health", "/ready", "/version", "/metrics", "/openapi.json", "/"):
        assert client.get(path).status_code == 200, path
    for key in ("", "Bearer", "Bearer third", "Basic first", "first", "Bearer first "):
        refused = client.get("/v1/models", headers={"authorization": key})
        assert refused.status_code == (200 if key == "Bearer first " else 401), key
    refused = client.post("/tokenize", json=PROMPT)
    assert refused.status_code == 401
    assert refused.headers["www-authenticate"] == "Bearer"
    assert refused.json()["error"]["type"] == "AuthenticationError"
    assert client.get("/no/such/path").status_code == 401  # it does not tell what there is
    for key in ("first", "second"):
        headers = {"authorization": f"bearer {key}"}
        assert client.post("/v1/completions", json=PROMPT, headers=headers).status_code == 200


def test_a_proxy_may_strip_the_root_path_or_not(serve):
    headers = {"authorization": "Bearer key"}
    with serve(root_path="/llm", api_keys=("key",)) as server:

        def status(path, **options):
            return httpx.get(server.base_url + path, **options).status_code

        for prefix in ("", "/llm"):
            assert status(f"{prefix}/v1/models", headers=headers) == 200
            assert status(f"{prefix}/v1/models") == 401
            assert status(f"{prefix}/health") == status(f"{prefix}/") == 200
        assert status("/llmx/v1/models", headers=headers) == 404
    with serve(root_path="/v1") as server:
        assert httpx.get(server.base_url + "/v1/models").status_code == 200


def test_browsers_of_named_origins_only(ask):
    client = ask(allowed_origins=("https://a.example",), api_keys=("key",))
    asked = {"origin": "https://a.example", "access-control-request-method": "POST"}
    granted = client.options("/v1/completions", headers=asked)
    assert granted.status_code == 200
    assert granted.headers["access-control-allow-origin"] == "https://a.example"
    other = client.get("/health", headers={"origin": "https://b.example"})
    assert "access-control-allow-origin" not in other.headers
    refused = client.get("/v1/models", headers={"origin": "https://a.example"})
    assert refused.status_code == 401
    assert refused.headers["access-control-allow-origin"] == "https://a.example"


def test_request_ids_are_echoed_if_they_are_harmless(ask, caplog):
    caplog.set_level("INFO", logger="jaxgen.access")
    client = ask()
    body = {"prompt": "a secret of mine"}
    told = client.post("/v1/completions?key=1", json=body, headers={"x-request-id": "abc-1"})
    assert told.headers["x-request-id"] == "abc-1"
    assert told.json()["id"] == "cmpl-abc-1"
    made = client.get("/health", headers={"x-request-id": b"a b\xe9"}).headers["x-request-id"]
    assert made.isalnum()
    lines = [record.getMessage() for record in caplog.records]
    assert any("abc-1 POST /v1/completions 200" in line for line in lines)
    assert not any("secret" in line or "key=1" in line for line in lines)


def test_large_bodies_are_refused_announced_or_not(serve):
    with serve(max_body_bytes=1000) as server:
        assert post(server, "/v1/completions", {"prompt": "a" * 2000}).status_code == 413
        chunks = iter([b'{"prompt": "', *[b"a" * 100] * 20, b'"}'])
        headers = {"content-type": "application/json"}
        url = server.base_url + "/v1/completions"
        assert httpx.post(url, content=chunks, headers=headers).status_code == 413
        assert post(server, "/v1/completions", PROMPT).status_code == 200


def test_slow_bodies_and_heads_are_given_up(serve):
    listen = {"head_seconds": 0.3, "head_bytes": 4096}
    with serve(body_seconds=0.3, listen=listen) as server:
        head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
        assert b" 408 " in talk(server.port, head + b"content-length: 20\r\n\r\n{")
        assert talk(server.port, head + b"x: ") == b""
        assert talk(server.port, b"") == b""


@pytest.mark.parametrize("sent", [b"x: " + b"a" * 9000, b"x: a\r\n" * 2000, b"y" * 300_000])
def test_large_heads_are_refused(serve, sent):
    with serve(listen={"head_bytes": 4096}) as server:
        answer = talk(server.port, b"GET /health HTTP/1.1\r\nhost: x\r\n" + sent + b"\r\n\r\n")
        assert b" 431 " in answer or answer == b""  # the reset may overtake it
        assert httpx.get(server.base_url + "/health").status_code == 200


def talk(port: int, sent: bytes) -> bytes:
    """What comes until the other side closes."""
    with socket.create_connection(("127.0.0.1", port), timeout=10) as connection:
        received = b""
        with contextlib.suppress(ConnectionError):
            connection.sendall(sent)
            while data := connection.recv(65536):
                received += data
        return received


def test_a_full_queue_says_when_to_come_back(serve):
    with serve(["a"] * 500, seconds=0.01, max_queued_requests=2) as server:
        engine, serving = server.serving.engine, server.serving
        engine.stats = lambda: StubEngine.stats(_Idle)  # nothing runs, everything waits
        with contextlib.ExitStack() as stack:
            body = {"prompt": "a", "stream": True, "max_tokens": 200}
            for _ in range(2):
                url = server.base_url + "/v1/completions"
                stack.enter_context(httpx.stream("POST", url, json=body))
            refused = post(server, "/v1/completions", PROMPT)
            assert refused.status_code == 503
            assert refused.headers["retry-after"] == "1"
            assert "waiting" in refused.json()["error"]["message"]
        wait_until(lambda: serving.active == 0)
        assert post(server, "/v1/completions", {"prompt": "a", "max_tokens": 1}).status_code == 200
        told = httpx.get(server.base_url + "/metrics").text
        assert 'admission_rejections_total{engine="0",model_name="stub"} 1.0' in told


class _Idle:
    running = ()


@pytest.mark.parametrize("stream", [True, False])
def test_who_hangs_up_is_forgotten(serve, stream):
    with serve(["a"] * 2000, seconds=0.01) as server:
        engine = server.serving.engine
        body = {"prompt": ["a", "b"], "stream": stream, "max_tokens": 200}
        url = server.base_url + "/v1/completions"
        if stream:
            with httpx.stream("POST", url, json=body) as response:
                next(response.iter_raw())
        else:
            with pytest.raises(httpx.ReadTimeout):
                httpx.post(url, json=body, timeout=0.2)
        wait_until(lambda: len(engine.asked) == 2 and not engine.running)
        wait_until(lambda: server.serving.active == 0)


def test_who_breaks_off_is_no_failure(serve, caplog):
    caplog.set_level("INFO", logger="jaxgen.access")
    with serve() as server, socket.create_connection(("127.0.0.1", server.port)) as connection:
        head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
        connection.sendall(head + b"content-length: 500\r\n\r\n{")
        connection.close()
        wait_until(lambda: "/v1/completions 499" in caplog.text)
    assert "Traceback" not in caplog.text


def test_who_reads_nothing_is_given_up(serve, monkeypatch):
    monkeypatch.setattr("jaxgen.serving.connection._LOOK_SECONDS", 0.1)
    with serve(["a" * 10_000] * 5000, stalled_seconds=0.3) as server:
        engine = server.serving.engine
        with socket.create_connection(("127.0.0.1", server.port)) as connection:
            body = b'{"prompt": "a", "stream": true, "max_tokens": null}'
            head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
            connection.sendall(head + b"content-length: %d\r\n\r\n" % len(body) + body)
            wait_until(lambda: engine.asked and not engine.running)


def test_stopping_lets_answers_end(serve):
    with serve(["a"] * 40, seconds=0.01) as server:
        body = {"prompt": "a", "stream": True, "max_tokens": 200}
        with httpx.stream("POST", server.base_url + "/v1/completions", json=body) as response:
            server.stop()
            text = response.read().decode()
        assert text.count('"text":"a"') == 40
        assert '"finish_reason": "stop"' in text
        server.join()
        assert not server.serving.engine.healthy


def test_stopping_does_not_wait_for_ever(serve):
    with serve(["a"] * 5000, seconds=0.01, listen={"drain_seconds": 0.2}) as server:
        body = {"prompt": "a", "stream": True, "max_tokens": 200}
        with httpx.stream("POST", server.base_url + "/v1/completions", json=body) as response:
            server.stop()
            text = response.read().decode()
        assert "the server is stopping" in text
        assert text.endswith("data: [DONE]\n\n")


def test_health_follows_the_engine(ask):
    client = ask()
    engine = client.app.state.serving.engine
    assert client.get("/health").status_code == client.get("/ready").status_code == 200
    client.app.state.serving.draining = True
    assert client.get("/ready").status_code == 503
    assert client.get("/health").status_code == 200
    engine.healthy, engine.error = False, "it died"
    for path in ("/health", "/ready"):
        assert client.get(path).status_code == 503
    refused = client.post("/v1/completions", json=PROMPT)
    assert refused.status_code == 503
    assert "it died" in refused.json()["error"]["message"]


def test_not_ready_before_it_is_prepared(tokenizer):
    allowed = []

    def prepare():
        wait_until(lambda: allowed)

    app = create_app(StubEngine(tokenizer, ["a"]), ServerSettings(), prepare=prepare)
    from starlette.testclient import TestClient

    with TestClient(app) as client:
        assert client.get("/ready").status_code == client.get("/health").status_code == 503
        assert client.post("/v1/completions", json=PROMPT).headers["retry-after"] == "1"
        allowed.append(True)
        wait_until(lambda: client.get("/ready").status_code == 200)


def test_what_keeps_an_engine_from_starting_ends_the_server(tokenizer):
    from jaxgen.serving.server import ListenSettings, run_server

    def prepare():
        raise RefusedInput("no memory")

    app = create_app(StubEngine(tokenizer, ["a"]), prepare=prepare)
    with pytest.raises(RefusedInput, match="no memory"):
        run_server(app, ListenSettings(host="127.0.0.1", port=0))


def test_tls(serve, tmp_path):
    if shutil.which("openssl") is None:
        pytest.skip("no openssl to make a certificate with")
    key, certificate = tmp_path / "key.pem", tmp_path / "certificate.pem"
    words = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2"]
    words += ["-subj", "/CN=localhost", "-addext", "subjectAltName=IP:127.0.0.1"]
    words += ["-keyout", str(key), "-out", str(certificate)]
    subprocess.run(words, check=True, capture_output=True, timeout=60)
    app = create_app(StubEngine(None, ["a"]), ServerSettings())
    listen = {"ssl_keyfile": str(key), "ssl_certfile": str(certificate)}
    with live(app, **listen) as server:
        trusted = ssl.create_default_context(cafile=certificate)
        answer = httpx.get(f"https://127.0.0.1:{server.port}/version", verify=trusted)
        assert answer.status_code == 200
        with pytest.raises(httpx.HTTPError):
            httpx.get(server.base_url + "/version")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"enable_auto_tool_choice": True}, "tool_call_parser"),
        ({"api_keys": ("",)}, "api_keys"),
        ({"root_path": "llm"}, "root_path"),
        ({"max_json_depth": 0}, "max_json_depth"),
        ({"tool_call_parser": "none_such"}, "hermes"),
    ],
)
def test_settings_that_cannot_be(settings, message):
    with pytest.raises(ConfigError, match=message):
        ServerSettings(**settings)


def test_a_port_that_is_taken(serve):
    from jaxgen.serving.server import ListenSettings, bind

    began = time.monotonic()
    with serve() as server, pytest.raises(RefusedInput, match=str(server.port)):
        bind(ListenSettings(host="127.0.0.1", port=server.port))
    assert time.monotonic() - began < 20
