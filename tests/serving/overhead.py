"""What serving costs: tokens a second over loopback, on a device, or an engine, that costs nothing.

Run by hand, or by test_overhead.py: the server is a process of its own on one core, the client on
another, so that the server's seconds of CPU can be told from the client's.
"""

import argparse
import asyncio
import json
import multiprocessing
import os
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

STREAMS, TOKENS = 256, 400
ROOTS = (".", "models", "checkpoints")
STEP_SECONDS = 0.0128
SCENES = {
    "alone": "server before a stub engine whose next step waits for all readers",
    "shared": "server before a stub engine that steps whoever reads",
    "whole": "engine and server, a device that costs nothing",
    "timed": f"engine and server, a device whose steps take {STEP_SECONDS} s",
}


def _engine(scene: str):
    if scene in {"alone", "shared"}:
        from tests.serving.stepping_engine import SteppingEngine

        return SteppingEngine(None, wait=scene == "alone")
    from jaxgen.bench.host import stub_engine, stub_tokenizer
    from jaxgen.engine.loop import GenerationLoop
    from jaxgen.serving.async_engine import AsyncEngine

    tokenizer, engine = stub_tokenizer(), stub_engine(STREAMS, 2 * TOKENS, 0)
    if scene == "timed":
        instant = engine.runner.read

        def read(results):
            time.sleep(STEP_SECONDS)
            return instant(results)

        engine.runner.read = read
    return AsyncEngine(GenerationLoop(engine, tokenizer), name="stub", tokenizer=tokenizer)


def serve(port_out, scene: str, core: int) -> None:
    """The server's process: tells its port, serves until it is told to stop."""
    os.environ["JAX_PLATFORMS"] = "cpu"
    sys.path[:0] = [str(Path(__file__).parents[2] / root) for root in ROOTS]
    from jaxgen.serving.app import create_app
    from jaxgen.serving.process import settle_process
    from jaxgen.serving.server import ListenSettings, Server, bind
    from jaxgen.serving.settings import ServerSettings

    listen = ListenSettings(host="127.0.0.1", port=0, drain_seconds=0)
    settings = ServerSettings(access_log=False)
    app = create_app(_engine(scene), settings, prepare=settle_process)
    os.sched_setaffinity(0, {core})
    with bind(listen) as bound:
        port_out.send(bound.getsockname()[1])
        Server(app, listen).run([bound])


async def _one(port: int, path: str, body: bytes) -> int:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    writer.write(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
    chunks, last = 0, b""
    while b"[DONE]" not in last + (data := await reader.read(1 << 16)):
        if not data:
            raise ConnectionError("the server hung up")
        chunks, last = chunks + data.count(b"data: "), data[-6:]
    writer.close()
    return chunks + data.count(b"data: ")


async def _load(port: int) -> int:
    body = {"max_tokens": TOKENS, "stream": True, "stream_options": {"include_usage": True}}
    body |= {"prompt": [1, 2, 3], "ignore_eos": True, "temperature": 0}
    sent = json.dumps(body).encode()
    streams = [_one(port, "/v1/completions", sent) for _ in range(STREAMS)]
    return sum(await asyncio.gather(*streams))


def measure(scene: str, profile: str | None = None) -> dict[str, float]:
    """Tokens a second of wall time and of the server's own CPU time, and chunks a token.

    profile: a file for py-spy's samples of the server, `thread;frame;frame count` a line.
    """
    cores = sorted(os.sched_getaffinity(0))
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    server = context.Process(target=serve, args=(theirs, scene, cores[0]), daemon=True)
    server.start()
    os.sched_setaffinity(0, {cores[-1]})
    try:
        port = ours.recv()
        for _ in range(200):
            try:
                urllib.request.urlopen(f"http://127.0.0.1:{port}/ready").close()
                break
            except OSError:
                time.sleep(0.05)
        asyncio.run(_one(port, "/v1/completions", b'{"prompt":[1],"stream":true}'))
        with _profiled(server.pid, profile):
            return _measured(server.pid, port)
    finally:
        os.kill(server.pid, 15)
        server.join(20)
        os.sched_setaffinity(0, cores)


def _measured(pid: int, port: int) -> dict[str, float]:
    cpu, began = _cpu_seconds(pid), time.perf_counter()
    chunks = asyncio.run(_load(port))
    wall, cpu = time.perf_counter() - began, _cpu_seconds(pid) - cpu
    tokens = STREAMS * TOKENS
    return {
        "tokens_per_second": round(tokens / wall),
        "tokens_per_cpu_second": round(tokens / cpu),
        "chunks_per_token": round(chunks / tokens, 2),
    }


@contextmanager
def _profiled(pid: int, file: str | None) -> Generator[None]:
    if file is None:
        yield
        return
    command = ["py-spy", "record", "--pid", str(pid), "--threads", "--gil", "--format", "raw"]
    sampler = subprocess.Popen([*command, "--nonblocking", "--rate", "500", "--output", file])
    time.sleep(1)
    yield
    sampler.send_signal(signal.SIGINT)
    sampler.wait(30)


def _cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--scene", choices=SCENES, action="append")
    parser.add_argument("--profile", help="a file; needs py-spy, and slows the server down")
    options = parser.parse_args()
    for name in options.scene or SCENES:
        sys.stdout.write(f"{SCENES[name]}: {measure(name, options.profile)}\n")
