"""Mixed traffic for a given time against one tiny server; memory and KV blocks are sampled.

    python tests/serving/soak.py --seconds 900 --every 30 --out soak.jsonl

Each sample is a JSON line, taken while nobody is served: resident memory of the server's process,
KV blocks in use (of none that runs: 0), requests so far, Python objects. Ends with 1 if something
is left behind, or if memory grew by more than --most-growth MiB after the first third.
"""

import argparse
import asyncio
import json
import multiprocessing
import os
import random
import sys
import time
from collections import Counter
from pathlib import Path

import httpx

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT / part) for part in (".", "models", "checkpoints")]

MODEL = ROOT / "tests/fixtures/golden/llama_plain"
CONCURRENT = 24


def serve(port_out, model: str) -> None:
    """The server's process, which has a KV cache that is too small for all."""
    from jaxgen.llm import LLM
    from jaxgen.serving import AsyncEngine, ListenSettings, Server, ServerSettings, bind, create_app

    options = {"dtype": "float32", "max_num_seqs": 4, "max_num_batched_tokens": 16}
    llm = LLM(model, block_size=16, max_model_len=96, num_gpu_blocks_override=12, **options)
    app = create_app(
        AsyncEngine.of(llm, name="soak"), ServerSettings(access_log=False), prepare=llm.warm_up
    )
    listen = ListenSettings(host="127.0.0.1", port=0)
    with bind(listen) as bound:
        port_out.send(bound.getsockname()[1])
        Server(app, listen).run([bound])


async def traffic(
    client: httpx.AsyncClient, options: argparse.Namespace, chance: random.Random
) -> Counter:
    """CONCURRENT clients of every kind for a stretch of time; what became of their requests."""
    from tests.serving.test_robustness import KINDS

    end, told = time.monotonic() + options.every, Counter[str]()

    async def one() -> None:
        while time.monotonic() < end:
            told[await chance.choice(KINDS)(client, chance)] += 1
            await asyncio.sleep(chance.uniform(0, 2 * options.pause))

    await asyncio.gather(*(one() for _ in range(CONCURRENT)))
    return told


async def quiet(client: httpx.AsyncClient) -> dict:
    """The status when nobody is served any more; fails after a minute."""
    async with asyncio.timeout(60):
        while True:
            status = (await client.get("/status.json")).json()
            if not status["running"] and not status["waiting"]:
                return status
            await asyncio.sleep(0.1)


def resident(pid: int) -> float:
    """MiB."""
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


async def soak(port: int, pid: int, options: argparse.Namespace) -> list[dict]:
    """Samples, one after each stretch of traffic."""
    samples: list[dict] = []
    chance, total = random.Random(options.seed), Counter[str]()
    # What idles longer may be closed by the server while a request is on its way to it.
    limits = httpx.Limits(max_connections=None, keepalive_expiry=1)
    url = f"http://127.0.0.1:{port}"
    async with httpx.AsyncClient(base_url=url, timeout=300, limits=limits) as client:
        while (await client.get("/ready")).status_code != httpx.codes.OK:
            await asyncio.sleep(0.2)
        began = time.monotonic()
        while not samples or time.monotonic() - began < options.seconds:
            total += await traffic(client, options, chance)
            status = await quiet(client)
            sample = {
                "seconds": round(time.monotonic() - began),
                "rss_mib": round(resident(pid), 1),
                "kv_used_blocks": status["kv_used_blocks"],
                "kv_total_blocks": status["kv_total_blocks"],
                "preemptions": status["preemptions"],
                "generation_tokens": status["generation_tokens"],
                "late_compiles": status["late_compiles"],
                "health": (await client.get("/health")).status_code,
                "requests": dict(sorted(total.items())),
            }
            samples.append(sample)
            line = json.dumps(sample)
            sys.stdout.write(line + "\n")
            sys.stdout.flush()
            if options.out is not None:
                with options.out.open("a") as out:
                    out.write(line + "\n")
    return samples


def verdict(samples: list[dict], most_growth: float) -> list[str]:
    """What is wrong; [] if nothing is."""
    wrong = [
        f"after {each['seconds']} s: {name} is {each[name]}, not {wanted}"
        for each in samples
        for name, wanted in (("kv_used_blocks", 0), ("health", 200), ("late_compiles", 0))
        if each[name] != wanted
    ]
    settled = samples[len(samples) // 3 :]
    growth = settled[-1]["rss_mib"] - settled[0]["rss_mib"]
    if growth > most_growth:
        wrong.append(f"resident memory grew by {growth:.0f} MiB, at most {most_growth:.0f} may it")
    return wrong


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=900)
    parser.add_argument("--every", type=float, default=30, help="seconds from sample to sample")
    parser.add_argument("--pause", type=float, default=0, help="mean seconds a client rests")
    parser.add_argument("--most-growth", type=float, default=32, help="MiB")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--model", default=str(MODEL))
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    server = context.Process(target=serve, args=(theirs, options.model), daemon=True)
    server.start()
    assert server.pid is not None
    try:
        samples = asyncio.run(soak(ours.recv(), server.pid, options))
    finally:
        server.terminate()
        server.join(30)
    wrong = verdict(samples, options.most_growth)
    sys.stdout.write("".join(f"{line}\n" for line in wrong) or "nothing was left behind\n")
    return 1 if wrong or server.exitcode != 0 else 0


if __name__ == "__main__":
    sys.exit(main())
