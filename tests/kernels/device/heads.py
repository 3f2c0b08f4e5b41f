"""Check heads turned, written and attended on a Hopper GPU: `python tests/kernels/device/heads.py`.

From the raw QKV product: queries and pages are compared with what the reference makes of it, the
attention over them with the reference's in float32.
"""

import argparse
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

import jax
import jax.numpy as jnp

from pallas_kernels.lowering import lower
from pallas_kernels.pages import KVPages, RaggedRows
from pallas_kernels.qkv_attention import gpu, reference
from pallas_kernels.rope_write import gpu as turning, reference as turned
from pallas_kernels.rope_write.heads import HeadNorms, Rotation
from tests.kernels.device.attention import NO_OPTIONS, batch

PAGE = 64


@dataclass(frozen=True)
class Case:
    """lengths: (query, kv) of each row; half: of the turning channels, 0 for none."""

    lengths: tuple[tuple[int, int], ...]
    kv_heads: int
    group: int
    head_dim: int
    half: int
    interleaved: bool = False
    norms: bool = False

    @property
    def tokens(self) -> int:
        return sum(n for n, _ in self.lengths) + 2


DECODE = tuple((1, 10 + 37 * i) for i in range(150))
MIXED = ((70, 70), (1, 1), (3, 900), (64, 4097))
CHECKS = {
    "decode": Case(DECODE, 8, 4, 128, 64),
    "mixed": Case(MIXED, 8, 4, 128, 64),
    "norms": Case(MIXED, 4, 8, 128, 64, norms=True),
    "a part turns": Case(MIXED, 8, 1, 64, 16),
    "mqa": Case(MIXED, 1, 7, 64, 32),
    "wide heads": Case(MIXED, 16, 1, 256, 32),
    "nothing turns": Case(MIXED, 2, 4, 128, 0),
    "interleaved": Case(MIXED, 8, 4, 128, 64, interleaved=True),
    "interleaved decode": Case(DECODE, 16, 1, 256, 32, interleaved=True),
    "interleaved with norms": Case(MIXED, 3, 3, 64, 20, interleaved=True, norms=True),
}


def make(case: Case) -> tuple[Any, ...]:
    """The product, pages, rows, rotation and norms."""
    rows, count = batch(list(case.lengths), PAGE, 1)
    keys = iter(jax.random.split(jax.random.key(time.time_ns() % 2**31), 6))
    shape = (case.tokens, case.kv_heads, case.group + 2, case.head_dim)
    qkv = jax.random.normal(next(keys), shape, jnp.bfloat16)
    shape = (count, case.kv_heads, PAGE, case.head_dim)
    pages = KVPages(*(jax.random.normal(next(keys), shape, jnp.bfloat16) for _ in range(2)))
    rotation = norms = None
    if case.half:
        angle = jax.random.uniform(next(keys), (case.tokens, case.half), maxval=6.0)
        rotation = Rotation(jnp.cos(angle), jnp.sin(angle), case.interleaved)
    if case.norms:
        weights = [jax.random.uniform(next(keys), (case.head_dim,), jnp.bfloat16) for _ in range(2)]
        norms = HeadNorms(*weights, eps=1e-6, offset=1.0)
    return qkv, pages, rows, rotation, norms


def error(got: Any, want: Any) -> float:
    """Of the norm."""
    got, want = got.astype(jnp.float32), want.astype(jnp.float32)
    return float(jnp.linalg.norm(got - want) / jnp.linalg.norm(want))


def check(name: str, case: Case) -> bool:
    scale = case.head_dim**-0.5

    def kernels(qkv: Any, pages: KVPages, rows: RaggedRows, rotation: Any, norms: Any) -> Any:
        queries, _ = turning.run(qkv, pages, rows, rotation=rotation, norms=norms)
        options = {"scale": scale, **NO_OPTIONS}
        out, written = gpu.run(qkv, pages, rows, rotation=rotation, norms=norms, **options)
        return queries, out, written

    def plain(qkv: Any, pages: KVPages, rows: RaggedRows, rotation: Any, norms: Any) -> Any:
        queries, written = turned.run(qkv, pages, rows, rotation=rotation, norms=norms)
        qkv, pages = jax.tree.map(lambda x: x.astype(jnp.float32), (qkv, pages))
        options = {"scale": scale, **NO_OPTIONS}
        out, _ = reference.run(qkv, pages, rows, rotation=rotation, norms=norms, **options)
        return queries, out, written

    args = make(case)
    (queries, out, pages), (queries_want, out_want, pages_want) = (
        lower(jax.jit(run), *args).compile()(*args) for run in (kernels, plain)
    )
    live = args[2].token_places(case.tokens).valid
    errors = {
        "queries": error(queries[live], queries_want[live]),
        "pages": error(pages.keys, pages_want.keys),
        "out": error(out, out_want),
    }
    fine = max(errors.values()) < 1e-2 and bool((pages.values == pages_want.values).all())
    shown = ", ".join(f"{what} {value:.1e}" for what, value in errors.items())
    print(f"{'ok  ' if fine else 'FAIL'} {name}: errors {shown}", flush=True)
    return fine


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", nargs="*", default=list(CHECKS), help="names of checks")
    options = parser.parse_args()
    print(jax.__version__, jax.devices()[0].device_kind, flush=True)
    with ThreadPoolExecutor(8) as pool:
        results = list(pool.map(check, options.check, [CHECKS[name] for name in options.check]))
    sys.exit(not all(results))


if __name__ == "__main__":
    main()
