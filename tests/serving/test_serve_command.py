"""`jaxgen serve` as a process: refusals before anything is loaded, ready, answers, SIGTERM."""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from types import SimpleNamespace

import httpx
import pytest

from jaxgen.cli import main
from jaxgen.commands.opening import open_for
from jaxgen.commands.parser import build_parser
from jaxgen.commands.peer_options import ALWAYS_SO, REFUSED
from jaxgen.commands.serve import server_settings
from jaxgen.engine import build
from jaxgen.llm import LLM
from jaxgen.sampling import SamplingParams
from jaxgen.serving.server import ListenSettings, bind, start_listening
from tests.serving.live import wait_until

SMALL = ("--dtype", "float32", "--max-num-batched-tokens", "16", "--max-model-len", "96")
SMALL += ("--max-num-seqs", "2", "--host", "127.0.0.1")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--port", "99999"), "port must be"),
        (("--enable-auto-tool-choice",), "tool_call_parser"),
        (("--tool-call-parser", "nothing"), "hermes"),
        (("--ssl-keyfile", "x"), "ssl_certfile"),
        (("--root-path", "llm"), "root_path"),
        (("--data-parallel-size", "0"), "data_parallel_size"),
        (("--allowed-origins", "[nothing"), "JSON list"),
        (("--chat-template", "no/such/file"), "no/such/file"),
        (("--generation-config", "elsewhere"), "invalid choice"),
        (("--override-generation-config", "{"), "expected a JSON object"),
        (("--default-chat-template-kwargs", "[1]"), "JSON"),
        (("--default-chat-template-kwargs", '{"tools": 1}'), "chat_template_defaults"),
        (("--override-generation-config", "[1]"), "expected a JSON object"),
        (("--override-generation-config", '{"temperature": 9}'), "temperature must be"),
        (("--enable-expert-parallel",), "the model has no experts"),
        *(((option, "x"), why) for option, why in REFUSED.items()),
    ],
)
def test_refusals_are_one_line(golden_dir, capsys, monkeypatch, words, message):
    monkeypatch.setattr(build, "load", lambda *_: pytest.fail("weights were read"))
    port = [] if "--port" in words else ["--port", "0"]
    try:
        code = main(["serve", str(golden_dir("llama_plain")), *SMALL, *port, *words])
    except SystemExit as end:
        code = end.code
    assert code == 2
    lines = capsys.readouterr().err.splitlines()
    assert any(line.startswith("error: ") and message in line for line in lines)


def test_options_of_vllm_that_change_what_is_served():
    words = ["serve", "m", "-tp", "2", "-dp", "3", *ALWAYS_SO, "--return-tokens-as-token-ids"]
    words += ["--enable-force-include-usage", "--generation-config", "vllm"]
    words += ["--override-generation-config", '{"temperature": 0.6, "max_new_tokens": 5}']
    args = build_parser().parse_args(words)
    assert (args.tensor_parallel_size, args.data_parallel_size) == (2, 3)
    settings = server_settings(args, SimpleNamespace(sampling_defaults={"top_k": 5}))
    assert settings.sampling_defaults == {"temperature": 0.6, "max_tokens": 5}
    assert settings.return_tokens_as_token_ids
    assert settings.force_usage
    assert not any(key.replace("_", "-") in " ".join(ALWAYS_SO) for key in vars(args))


def test_a_port_in_use_is_told_first(capsys):
    with bind(ListenSettings(host="127.0.0.1", port=0)) as taken:  # it does not even listen yet
        port = str(taken.getsockname()[1])
        assert main(["serve", "no/such/model", "--host", "127.0.0.1", "--port", port]) == 2
    assert port in capsys.readouterr().err


def test_a_port_that_is_reserved_for_another():
    """A front reserves its replicas' ports; each listens on its own."""
    with bind(ListenSettings(host="127.0.0.1", port=0), shared=True) as reserved:
        port = reserved.getsockname()[1]
        with bind(ListenSettings(host="127.0.0.1", port=port)) as used:
            start_listening(used)
            with socket.create_connection(("127.0.0.1", port)):
                pass


def test_a_port_is_free_again_at_once():
    """Connections that a server has closed keep its port for a minute from others."""
    with bind(ListenSettings(host="127.0.0.1", port=0)) as first:
        start_listening(first)
        port = first.getsockname()[1]
        with socket.create_connection(("127.0.0.1", port)) as client:
            accepted, _ = first.accept()
            accepted.close()
            assert client.recv(1) == b""
    with bind(ListenSettings(host="127.0.0.1", port=port)) as second:
        start_listening(second)


@pytest.mark.filterwarnings("ignore:an in-memory checkpoint has no tokenizer")
def test_random_weights_need_no_checkpoint(tmp_path, golden_dir):
    """For load tests: a config alone, prompts as token ids, or a tokenizer from elsewhere."""
    folder = golden_dir("llama_plain")
    shape = tmp_path / "config.json"
    shape.write_text((folder / "config.json").read_text())
    for more, has_one in (((), False), (("--tokenizer", str(folder)), True)):
        words = ["serve", str(shape), "--load-format", "dummy", *SMALL, "--port", "0", *more]
        opened = open_for(build_parser().parse_args(words), sequences=2)
        assert (opened.tokenizer is not None) == has_one
    params = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True)
    (output,) = LLM.of(opened).generate([[5, 6, 7]], params)
    assert len(output.outputs[0].token_ids) == 3


def test_without_the_extra_one_line_says_what_to_install():
    program = "import sys; sys.modules['starlette'] = None; from jaxgen.cli import main; "
    words = [sys.executable, "-c", program + "sys.exit(main(['serve', 'model', '--port', '0']))"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=120)
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert line.startswith("error: a server needs starlette")
    assert "pip install 'jaxgen[serve]'" in line


@pytest.mark.slow
def test_a_server_from_start_to_end(golden_dir, tmp_path):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    words = [sys.executable, "-m", "jaxgen", "serve", str(golden_dir("llama_plain")), *SMALL]
    words += ["--port", str(port), "--served-model-name", "tiny", "small", "--api-key", "key"]
    log = tmp_path / "log"
    environment = os.environ | {"XDG_CACHE_HOME": str(tmp_path)}
    with log.open("w") as errors, subprocess.Popen(words, stderr=errors, env=environment) as server:
        try:
            url, headers = f"http://127.0.0.1:{port}", {"authorization": "Bearer key"}
            statuses = _until_ready(url, server)
            assert 503 in statuses  # it answered while it compiled
            body = {"model": "small", "prompt": "hello", "max_tokens": 60, "ignore_eos": True}
            whole = httpx.post(f"{url}/v1/completions", json=body, headers=headers, timeout=60)
            assert whole.json()["usage"]["completion_tokens"] == 60
            assert httpx.get(f"{url}/status.json").json()["late_compiles"] == 0
            asked = {"json": body | {"stream": True}, "headers": headers, "timeout": 60}
            with httpx.stream("POST", f"{url}/v1/completions", **asked) as answer:
                pieces = answer.iter_raw()
                first = next(pieces)
                server.send_signal(signal.SIGTERM)
                text = (first + b"".join(pieces)).decode()
            assert text.endswith("data: [DONE]\n\n")
            assert '"error"' not in text
            assert server.wait(60) == 0
        finally:
            server.kill()
    written = log.read_text()
    assert "ready: serving tiny, small" in written
    assert "Traceback" not in written
    assert "hello" not in written
    assert json.dumps("key") not in written


@pytest.mark.slow
def test_a_server_that_compiles_can_be_stopped(golden_dir, tmp_path):
    """With what takes minutes to compile here."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    words = [sys.executable, "-m", "jaxgen", "serve", str(golden_dir("llama_plain"))]
    words += ["--host", "127.0.0.1", "--port", str(port), "--max-num-batched-tokens", "2048"]
    environment = os.environ | {"XDG_CACHE_HOME": str(tmp_path)}
    with subprocess.Popen(words, stderr=subprocess.DEVNULL, env=environment) as server:
        try:
            wait_until(lambda: _answers(port), 120)
            time.sleep(1)
            server.send_signal(signal.SIGTERM)
            assert server.wait(20) == 0
        finally:
            server.kill()


def _answers(port):
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
        return True
    return False


def _until_ready(url, server):
    statuses, end = set(), time.monotonic() + 300
    while 200 not in statuses:
        assert server.poll() is None
        assert time.monotonic() < end
        try:
            statuses.add(httpx.get(f"{url}/ready").status_code)
        except httpx.TransportError:
            time.sleep(0.1)
        time.sleep(0.05)
    return statuses
