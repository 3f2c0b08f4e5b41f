"""What the server itself costs: tokens a second over loopback, from an engine that costs nothing.

Run by hand, or by test_overhead.py: the server is a process of its own, so that its seconds of
CPU can be told from the client's.
"""

import argparse
import asyncio
import cProfile
import json
import multiprocessing
import os
import pstats
import sys
import time
from pathlib import Path

STREAMS, TOKENS = 256, 400
ROOTS = (".", "models", "checkpoints")


def serve(port_out, wait: bool, profile: str | None) -> None:
    """The server's process: tells its port, serves until it is told to stop."""
    sys.path[:0] = [str(Path(__file__).parents[2] / root) for root in ROOTS]
    from jaxgen.serving.app import create_app
    from jaxgen.serving.server import ListenSettings, Server, bind
    from jaxgen.serving.settings import ServerSettings
    from tests.serving.stepping_engine import SteppingEngine

    listen = ListenSettings(host="127.0.0.1", port=0, drain_seconds=0)
    app = create_app(SteppingEngine(None, wait=wait), ServerSettings(access_log=False))
    with bind(listen) as bound:
        port_out.send(bound.getsockname()[1])
        server = Server(app, listen)
        profiler = cProfile.Profile()
        if profile is not None:
            profiler.enable()
        server.run([bound])
        if profile is not None:
            profiler.disable()
            pstats.Stats(profiler).sort_stats("tottime").print_stats(35)


async def _one(port: int, path: str, body: bytes) -> int:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    writer.write(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
    chunks = 0
    while b"[DONE]" not in (data := await reader.read(1 << 16)):
        if not data:
            raise ConnectionError("the server hung up")
        chunks += data.count(b"data: ")
    writer.close()
    return chunks + data.count(b"data: ")


async def _load(port: int) -> int:
    body = {"max_tokens": TOKENS, "stream": True, "stream_options": {"include_usage": True}}
    body |= {"prompt": [1, 2, 3]}
    sent = json.dumps(body).encode()
    streams = [_one(port, "/v1/completions", sent) for _ in range(STREAMS)]
    return sum(await asyncio.gather(*streams))


def measure(*, wait: bool, profile: str | None = None) -> dict[str, float]:
    """Tokens a second of wall time and of the server's own CPU time, and chunks a token."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    server = context.Process(target=serve, args=(theirs, wait, profile), daemon=True)
    server.start()
    port = ours.recv()
    for _ in range(200):
        try:
            asyncio.run(_one(port, "/v1/completions", b'{"prompt":[1],"stream":true}'))
            break
        except OSError:
            time.sleep(0.05)
    cpu, began = _cpu_seconds(server.pid), time.perf_counter()
    chunks = asyncio.run(_load(port))
    wall, cpu = time.perf_counter() - began, _cpu_seconds(server.pid) - cpu
    os.kill(server.pid, 15)
    server.join(20)
    tokens = STREAMS * TOKENS
    return {
        "tokens_per_second": tokens / wall,
        "tokens_per_cpu_second": tokens / cpu,
        "chunks_per_token": chunks / tokens,
    }


def _cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--profile", action="store_true")
    options = parser.parse_args()
    for waits in (True, False):
        told = measure(wait=waits, profile="tottime" if options.profile else None)
        sys.stdout.write(f"{'each token alone' if waits else 'backlog shares'}: {told}\n")
