"""`jaxgen serve --data-parallel-size 2` as processes: they share the work, and end together."""

import os
import signal
import subprocess
import sys

import httpx
import pytest

from tests.serving.live import wait_until

pytestmark = pytest.mark.slow
KEY = {"authorization": "Bearer key"}


def front_of_processes(golden_dir, tmp_path) -> subprocess.Popen:
    """`jaxgen serve --data-parallel-size 2`; it writes to tmp_path / "log"."""
    words = [sys.executable, "-m", "jaxgen", "serve", str(golden_dir("llama_plain"))]
    words += ["--dtype", "float32", "--max-num-batched-tokens", "16", "--max-model-len", "96"]
    words += ["--max-num-seqs", "1", "--host", "127.0.0.1", "--port", "0", "--api-key", "key"]
    words += ["--served-model-name", "tiny", "--data-parallel-size", "2"]
    environment = os.environ | {"XDG_CACHE_HOME": str(tmp_path)}
    with (tmp_path / "log").open("w") as log:
        return subprocess.Popen(words, stderr=log, env=environment)


def url_when_ready(server, log) -> str:
    wait_until(lambda: server.poll() is not None or "listening on" in log.read_text(), 120)
    assert server.poll() is None, log.read_text()
    url = log.read_text().partition("listening on ")[2].split()[0]
    wait_until(lambda: httpx.get(url + "/ready").status_code == 200, 300)
    return url


def gone(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return False


def test_processes_from_start_to_end(golden_dir, tmp_path):
    log = tmp_path / "log"
    body = {"model": "tiny", "prompt": "hello", "max_tokens": 8, "temperature": 0}
    with front_of_processes(golden_dir, tmp_path) as server:
        try:
            url = url_when_ready(server, log)

            def ask():
                return httpx.post(f"{url}/v1/completions", json=body, headers=KEY, timeout=60)

            texts = {ask().json()["choices"][0]["text"] for _ in range(4)}
            assert len(texts) == 1
            replicas = httpx.get(url + "/health").json()["replicas"]
            assert [each["served"] for each in replicas] == [2, 2]
            os.kill(replicas[0]["pid"], signal.SIGKILL)
            assert ask().status_code == 200
            wait_until(lambda: httpx.get(url + "/health").json()["status"] == "degraded")
            assert ask().status_code == 200
            server.send_signal(signal.SIGTERM)
            assert server.wait(60) == 0
            wait_until(lambda: gone(replicas[1]["pid"]))
        finally:
            server.kill()
    assert "Traceback" not in log.read_text()


def test_replicas_do_not_outlive_their_front(golden_dir, tmp_path):
    with front_of_processes(golden_dir, tmp_path) as server:
        try:
            url = url_when_ready(server, tmp_path / "log")
            pids = [each["pid"] for each in httpx.get(url + "/health").json()["replicas"]]
        finally:
            server.kill()
    wait_until(lambda: all(gone(pid) for pid in pids))


def test_a_model_that_is_not_there(tmp_path):
    words = ["serve", str(tmp_path / "none"), "--port", "0", "--data-parallel-size", "2"]
    # As a process: the front has never loaded JAX, which does not like to be forked.
    ended = subprocess.run(
        [sys.executable, "-m", "jaxgen", *words], capture_output=True, text=True, timeout=120
    )
    assert ended.returncode == 2
    assert "did not start: its process ended with code 2" in ended.stderr
