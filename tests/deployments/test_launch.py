"""Real processes: started, found again by name, asked, and ended."""

import os

import httpx
import pytest

import jaxgen
from jaxgen.deployments import DeploymentNotFound, client, serve
from jaxgen_checkpoints.errors import RefusedInput

OPTIONS = {
    "dtype": "float32",
    "max_num_batched_tokens": 16,
    "max_num_seqs": 1,
    "max_model_len": 96,
    "port": 0,
}

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def own_records(tmp_path, monkeypatch):
    monkeypatch.setenv("JAXGEN_CACHE_PATH", str(tmp_path))


def test_two_replicas_from_start_to_end(golden_dir):
    folder = golden_dir("llama_plain")
    greedy = {"do_sample": False, "max_new_tokens": 5}
    expected = jaxgen.pipeline(folder, dtype="float32", max_model_len=96)(["a", "b"], **greedy)
    started = serve(folder, "two", replica_num=2, **OPTIONS)
    replicas = httpx.get(started.url + "/health").json()["replicas"]
    pids = [replica["pid"] for replica in replicas]
    assert len(set(pids)) == 2
    try:
        assert started(["a", "b"], **greedy) == expected
        with client("two") as found:
            assert found("a", **greedy) == expected[:1]
    finally:
        started.terminate_server()
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)
    with pytest.raises(DeploymentNotFound):
        client("two")


def test_a_server_that_does_not_start_says_why(tmp_path):
    with pytest.raises(RefusedInput, match=r"ended before it was ready: error: .*nowhere"):
        serve(tmp_path / "nowhere", "none", **OPTIONS)
