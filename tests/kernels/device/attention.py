"""Check and time ragged attention on a Hopper GPU: `python tests/kernels/device/attention.py`.

Every shape is first compared with the reference in float32 on poisoned pages, then timed inside one
compiled chain of calls: the kernels by the profiler, which gives the rate, and all by the clock.
"""

import argparse
import json
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "checkpoints"))
sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "models"))
sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

import jax
import jax.numpy as jnp
import numpy as np

from jaxgen.bench.kernels.rows import shuffled_rows as batch
from jaxgen.bench.kernels.timing import Chain
from jaxgen.engine.compiler_options import compiler_options
from pallas_kernels.lowering import lower
from pallas_kernels.pages import KVPages, RaggedRows
from pallas_kernels.ragged_attention import gpu, reference
from tests.kernels.device.profiled import kernel_times, ours

RESULTS: list[dict[str, Any]] = []


def arrays(
    tokens: int, heads: int, kv_heads: int, dim: int, pages: int, page: int, dtype: Any
) -> tuple[Any, ...]:
    keys = jax.random.split(jax.random.key(time.time_ns() % 2**31), 5)
    shape = (pages, kv_heads, page, dim)
    pool = KVPages(*(jax.random.normal(k, shape, dtype) for k in keys[:2]))
    q = jax.random.normal(keys[2], (tokens, heads, dim), dtype)
    new = [jax.random.normal(k, (tokens, kv_heads, dim), dtype) for k in keys[3:]]
    return q, *new, pool


def compiled(run: Any, *args: Any) -> Any:
    """As the engine compiles: above all, nothing is timed on the device while others run there."""
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:1]), "x")
    return lower(jax.jit(run), *args).compile(compiler_options=compiler_options(mesh))


def check(
    name: str,
    lengths: list[tuple[int, int]],
    heads: int = 8,
    kv_heads: int = 2,
    dim: int = 128,
    page: int = 64,
    spare: int = 1,
    tokens: int | None = None,
    dtype: Any = jnp.bfloat16,
    **options: Any,
) -> str:
    rows, pages = batch(lengths, page, spare)
    tokens = tokens or sum(q for q, _ in lengths) + 3
    args = arrays(tokens, heads, kv_heads, dim, pages, page, dtype)
    for key in ("sinks", "alibi"):
        if options.get(key):
            options[key] = jnp.abs(jax.random.normal(jax.random.key(1), (heads,)))
    full = {"window": None, "soft_cap": None, "sinks": None, "alibi": None, **options}
    scale = dim**-0.5
    exact = jax.tree.map(lambda x: x.astype(jnp.float32), args)
    kernel = compiled(lambda *a: gpu.run(*a, scale=scale, **full), *args, rows)
    plain = compiled(lambda *a: reference.run(*a, scale=scale, **full), *exact, rows)
    (got, pages_got), (want, _) = kernel(*args, rows), plain(*exact, rows)
    wrote = args[3].write(args[1], args[2], rows)
    same = jax.tree.map(lambda a, b: bool((a == b).all()), pages_got, wrote)
    got = got.astype(jnp.float32)
    error = float(jnp.linalg.norm(got - want) / jnp.linalg.norm(want))
    worst = float(jnp.abs(got - want).max())
    fine = error < 1e-2 and all(jax.tree.leaves(same))
    RESULTS.append({"check": name, "error": error, "worst": worst, "ok": fine})
    if not fine:  # which of the two, and is it so each time?
        for what, run, inputs, before in (
            ("kernel", kernel, args, got),
            ("reference", plain, exact, want),
        ):
            off = jnp.linalg.norm(run(*inputs, rows)[0].astype(jnp.float32) - before, axis=(1, 2))
            print(f"     {name}: the {what} again differs by {off.tolist()}", flush=True)
    return f"{'ok  ' if fine else 'FAIL'} {name}: error {error:.2e}, worst {worst:.2e}"


DECODE_CHECKS: dict[str, dict[str, Any]] = {
    "gqa": dict(lengths=[(1, 70), (1, 1), (1, 200), (1, 64), (1, 4097)]),
    "many": dict(lengths=[(1, 10 + 37 * i) for i in range(150)], heads=32, kv_heads=8),
    "long alone": dict(lengths=[(1, 50000)], heads=32, kv_heads=8, spare=0),
    "page 128": dict(lengths=[(1, 70), (2, 400), (1, 129)], page=128),
    "mqa 7": dict(lengths=[(1, 70), (1, 900)], heads=7, kv_heads=1),
    "group 3, d 64": dict(lengths=[(1, 70), (1, 900)], heads=9, kv_heads=3, dim=64),
    "mha, d 80": dict(lengths=[(1, 70), (1, 900)], heads=4, kv_heads=4, dim=80),
    "d 96": dict(lengths=[(1, 70), (1, 900)], dim=96),
    "d 192": dict(lengths=[(1, 70), (1, 900)], dim=192),
    "d 256": dict(lengths=[(1, 70), (1, 900)], dim=256),
    "float16": dict(lengths=[(1, 70), (1, 900)], dtype=jnp.float16),
    "all options": dict(
        lengths=[(1, 70), (1, 900), (1, 3)], window=100, soft_cap=2.0, sinks=True, alibi=True
    ),
    "sinks": dict(lengths=[(1, 70), (1, 9000)], sinks=True),
}


PREFILL_CHECKS: dict[str, dict[str, Any]] = {
    "prefill": dict(lengths=[(70, 70), (1, 1), (300, 900), (64, 64), (33, 4097)]),
    "prefill long": dict(lengths=[(3000, 3000)], heads=32, kv_heads=8, spare=0),
    "prefill many": dict(lengths=[(3 + 5 * i, 10 + 37 * i) for i in range(60)], heads=16),
    "prefill page 128": dict(lengths=[(70, 70), (129, 400)], page=128),
    "prefill mqa 7": dict(lengths=[(70, 70), (40, 900)], heads=7, kv_heads=1),
    "prefill group 3, d 64": dict(lengths=[(70, 70), (40, 900)], heads=9, kv_heads=3, dim=64),
    "prefill mha, d 80": dict(lengths=[(70, 70), (40, 900)], heads=4, kv_heads=4, dim=80),
    "prefill mha, d 96": dict(lengths=[(70, 70), (40, 900)], heads=4, kv_heads=4, dim=96),
    "prefill d 192": dict(lengths=[(70, 70), (40, 900)], dim=192),
    "prefill d 256": dict(lengths=[(70, 70), (40, 900)], dim=256),
    "prefill float16": dict(lengths=[(70, 70), (40, 900)], dtype=jnp.float16),
    "prefill all options": dict(
        lengths=[(70, 70), (40, 900), (3, 3)], window=100, soft_cap=2.0, sinks=True, alibi=True
    ),
    "prefill window": dict(lengths=[(700, 1900), (40, 900)], window=300),
}
FEW_CHECKS: dict[str, dict[str, Any]] = {
    "few": dict(lengths=[(4, 70), (3, 3), (1, 4097), (2, 200), (4, 64), (90, 900)]),
    "few, many": dict(lengths=[(1 + i % 4, 10 + 37 * i) for i in range(150)], heads=32, kv_heads=8),
    "few, long alone": dict(lengths=[(4, 50000)], heads=32, kv_heads=8, spare=0, tokens=4),
    "few, page 128": dict(lengths=[(16, 70), (5, 400), (17, 129)], page=128, tokens=64, spare=3),
    "few, mqa 7": dict(lengths=[(8, 70), (3, 900)], heads=7, kv_heads=1),
    "few, group 3, d 64": dict(lengths=[(4, 70), (2, 900)], heads=9, kv_heads=3, dim=64),
    "few, mha, d 80": dict(lengths=[(4, 70), (3, 900)], heads=4, kv_heads=4, dim=80),
    "few, d 256": dict(lengths=[(4, 70), (3, 900)], dim=256),
    "few, all options": dict(
        lengths=[(4, 70), (3, 900), (3, 3), (40, 300)],
        **dict(window=100, soft_cap=2.0, sinks=True, alibi=True),
    ),
    "few, window": dict(lengths=[(4, 1900), (3, 9000)], window=300),
}
CHECKS = DECODE_CHECKS | FEW_CHECKS | PREFILL_CHECKS


@dataclass(frozen=True)
class Rate:
    """A chain of calls, and what one call does: `amount` bytes or operations."""

    chain: Chain
    amount: float
    unit: str

    def measure(self) -> str:
        """A line; RESULTS gets more."""
        chain = self.chain
        times = [1e6 * seconds for seconds in chain.seconds()]
        clock = float(np.median(times))
        kernels = kernel_times(lambda: chain.run(*chain.args), chain.calls)
        us = ours(kernels) or sum(kernels.values())
        rate = self.amount / us / 1e6
        RESULTS.append(
            {"name": chain.name, "us": us, self.unit: rate, "clock_us": times, "kernels": kernels}
        )
        return f"{chain.name}: {us:.1f} us, {rate:.2f} {self.unit}; {clock:.1f} us by the clock"


NO_OPTIONS = {"window": None, "soft_cap": None, "sinks": None, "alibi": None}


def attention_case(
    name: str,
    lengths: list[tuple[int, int]],
    heads: int = 32,
    kv_heads: int = 8,
    dim: int = 128,
    calls: int = 8,
    write: bool = False,
    plans: Any = None,
    compiler_options: dict[str, Any] | None = None,
) -> Rate:
    """Calls of attention, with the KV write or alone, each on the outputs of the one before. The
    amount is that of keys and values read, or of operations where rows have many tokens.
    """
    rows, pages = batch(lengths, 64)
    tokens = sum(n for n, _ in lengths)
    q, k, v, pool = arrays(tokens, heads, kv_heads, dim, pages, 64, jnp.bfloat16)

    def chain(q: Any, k: Any, v: Any, pool: KVPages, rows: RaggedRows) -> Any:
        for _ in range(calls):
            if write:
                pool = pool.write(k, v, rows)
            q = gpu.attend(q, pool, rows, scale=dim**-0.5, plans=plans, **NO_OPTIONS)
        return q

    args = (q, k, v, pool, rows)
    run = lower(jax.jit(chain), *args).compile(compiler_options=compiler_options)
    if all(n <= 16 for n, _ in lengths):
        moved = sum(kv for _, kv in lengths) * kv_heads * dim * 2 * 2
        return Rate(Chain(name, run, args, calls), moved, "TB/s")
    flops = 4 * heads * dim * sum(n * kv - n * n / 2 for n, kv in lengths)
    return Rate(Chain(name, run, args, calls), flops, "TFLOP/s")


def read_case() -> Rate:
    """Sums of 2 GiB: the read bandwidth to compare with."""
    x = jax.random.normal(jax.random.key(0), (1 << 30,), jnp.bfloat16)

    def chain(x: Any) -> Any:
        total = jnp.float32(0)
        for i in range(4):
            total = total + (x + total.astype(x.dtype) * i).astype(jnp.float32).sum()
        return total

    return Rate(Chain("read", lower(jax.jit(chain), x).compile(), (x,), 4), 2**31, "TB/s")


def product_case() -> Rate:
    """bf16 products of 8192 x 8192 matrices: the matrix rate to compare with."""
    a, b = (jax.random.normal(jax.random.key(i), (8192, 8192), jnp.bfloat16) for i in (1, 2))

    def chain(a: Any, b: Any) -> Any:
        for _ in range(4):
            a = (a @ b) * 0.01
        return a

    run = lower(jax.jit(chain), a, b).compile()
    return Rate(Chain("product", run, (a, b), 4), 2 * 8192**3, "TFLOP/s")


SHAPES: dict[str, list[tuple[int, int]]] = {
    "decode 64 x 4096": [(1, 4096)] * 64,
    "decode 64 x 2048": [(1, 2048)] * 64,
    "decode 128 x 1024": [(1, 1024)] * 128,
    "decode 256 x 1024": [(1, 1024)] * 256,
    "decode 1 x 131072": [(1, 131072)],
    "decode 8 x 1024": [(1, 1024)] * 8,
    "decode 1 x 128": [(1, 128)],
    "4 tokens, 64 x 4096": [(4, 4096)] * 64,
    "4 tokens, 64 x 1024": [(4, 1024)] * 64,
    "prefill 1 x 8192": [(8192, 8192)],
    "prefill 8 x 1024": [(1024, 1024)] * 8,
    "prefill 8 uneven": [(n, n) for n in (1500, 300, 1100, 700, 1024, 200, 1272, 500)],
    "prefill 1 x 2048": [(2048, 2048)],
    "prefill 1 x 512": [(512, 512)],
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", nargs="*", help="names of checks; none given: all of them")
    parser.add_argument("--time", nargs="*", help="names of shapes; none given: all of them")
    parser.add_argument("--json")
    options = parser.parse_args()
    if options.check is not None:
        with ThreadPoolExecutor(8) as pool:
            for line in pool.map(lambda name: check(name, **CHECKS[name]), options.check or CHECKS):
                print(line, flush=True)
    if options.time is not None:
        print(jax.__version__, jax.devices()[0].device_kind, flush=True)
        builders = [partial(attention_case, n, SHAPES[n]) for n in options.time or SHAPES]
        builders += [read_case, product_case]
        with ThreadPoolExecutor(8) as pool:
            for case in list(pool.map(lambda build: build(), builders)):
                print(case.measure(), flush=True)
    if options.json:
        Path(options.json).write_text(json.dumps(RESULTS, indent=1))


if __name__ == "__main__":
    main()
