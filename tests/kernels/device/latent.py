"""Check and time latent attention on a Hopper GPU: `python tests/kernels/device/latent.py`.

Every shape is first compared with plain products in float32, with everything poisoned that no row
owns, then timed by the profiler's sums over the kernels of queued calls.
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
import numpy as np

from pallas_kernels.latent_attention import gpu, reference
from pallas_kernels.latent_attention.unabsorbed import attend_unabsorbed
from pallas_kernels.latent_pages import LatentPages
from pallas_kernels.lowering import lower
from pallas_kernels.pages import RaggedRows
from tests.kernels.device.attention import batch
from tests.kernels.device.profiled import kernel_times

LATENT, WIDTH, PAGE, PLAIN, VALUE = 512, 576, 64, 128, 128
SCALE = 192**-0.5


@dataclass(frozen=True)
class Case:
    """lengths: (query, kv) of each row; plain: queries that are not absorbed yet."""

    lengths: tuple[tuple[int, int], ...]
    heads: int = 16
    plain: bool = False
    spare: int = 1
    padding: int = 3

    @property
    def tokens(self) -> int:
        return sum(n for n, _ in self.lengths) + self.padding


def uneven(rows: int, most: int) -> tuple[tuple[int, int], ...]:
    rng = np.random.default_rng(time.time_ns() % 2**31)
    return tuple((1, int(n)) for n in rng.integers(1, most + 1, rows))


MIXED = ((70, 70), (1, 1), (0, 0), (300, 900), (64, 64), (33, 4097))
CHECKS = {
    "decode": Case(uneven(100, 4000)),
    "decode, rows of one length": Case(((1, 1000),) * 128, spare=0, padding=0),
    "decode, one long row": Case(((1, 50000),), spare=0, padding=0),
    "decode, 8 heads": Case(uneven(20, 900), heads=8),
    "decode, 20 heads": Case(uneven(20, 900), heads=20),
    "decode, 40 heads": Case(uneven(20, 900), heads=40),
    "decode, 128 heads": Case(uneven(50, 2000), heads=128),
    "prompts": Case(MIXED),
    "prompts, more parts than rows": Case(((1, 700), (90, 333))),
    "prompts, 20 heads": Case(MIXED, heads=20),
    "prompts, 128 heads": Case(((40, 70), (1, 900)), heads=128),
    "expanded prompts": Case(((2000, 2000), (300, 900)), plain=True),
    "prompts of both kinds": Case((*MIXED, (1, 700)), plain=True),
}
TIMES = {
    "16 heads, 128 x 4096": Case(((1, 4096),) * 128, spare=0, padding=0),
    "16 heads, 256 x 1024": Case(((1, 1024),) * 256, spare=0, padding=0),
    "16 heads, 128 x 1024": Case(((1, 1024),) * 128, spare=0, padding=0),
    "16 heads, 1 x 131072": Case(((1, 131072),), spare=0, padding=0),
    "128 heads, 128 x 4096": Case(((1, 4096),) * 128, heads=128, spare=0, padding=0),
    "128 heads, 32 x 8192": Case(((1, 8192),) * 32, heads=128, spare=0, padding=0),
    "16 heads, absorbed prompt 1 x 8192": Case(((8192, 8192),), spare=0, padding=0),
    "16 heads, prompt 1 x 8192": Case(((8192, 8192),), plain=True, spare=0, padding=0),
    "16 heads, chunk 2048 of 8192": Case(((2048, 8192),), plain=True, spare=0, padding=0),
}


def make(case: Case, poisoned: bool) -> tuple[Any, ...]:
    """Queries, new latents, pages, rows, weights; NaN in what no row owns."""
    rows, count = batch(list(case.lengths), PAGE, case.spare)
    keys = jax.random.split(jax.random.key(time.time_ns() % 2**31), 4)
    width = PLAIN + WIDTH - LATENT if case.plain else WIDTH
    q = jax.random.normal(keys[0], (case.tokens, case.heads, width), jnp.bfloat16)
    new = jax.random.normal(keys[1], (case.tokens, WIDTH), jnp.bfloat16)
    pool = jax.random.normal(keys[2], (count, PAGE, WIDTH), jnp.bfloat16)
    up = 0.05 * jax.random.normal(keys[3], (case.heads, PLAIN + VALUE, LATENT), jnp.bfloat16)
    if poisoned:
        owned = np.zeros((count, PAGE), bool)
        table = np.asarray(rows.block_table)
        for row, (_, kv) in enumerate(case.lengths):
            position = np.arange(kv)
            owned[table[row, position // PAGE], position % PAGE] = True
        pool = jnp.where(jnp.asarray(owned)[..., None], pool, jnp.nan)
        live = rows.token_places(case.tokens).valid
        q, new = jnp.where(live[:, None, None], q, jnp.nan), jnp.where(live[:, None], new, jnp.nan)
    return q, new, LatentPages(pool), rows, up


def compiled(case: Case) -> Any:
    """The step's attention, compiled, with the pages given away."""

    def step(q: Any, new: Any, pages: LatentPages, rows: RaggedRows, up: Any) -> Any:
        if case.plain:
            return attend_unabsorbed(q, new, pages, rows, up, scale=SCALE)
        return gpu.run(q, new, pages, rows, latent=LATENT, scale=SCALE)

    shapes = jax.eval_shape(lambda: make(case, False))
    return lower(jax.jit(step, donate_argnums=2), *shapes).compile()


@jax.jit
def wanted(q: Any, new: Any, pages: LatentPages, rows: RaggedRows, up: Any) -> Any:
    """The outputs in float32, by the reference."""
    q, up = q.astype(jnp.float32), up.astype(jnp.float32)
    plain = q.shape[-1] < WIDTH
    if plain:
        wide = jnp.einsum("thn,hnl->thl", q[..., :PLAIN], up[:, :PLAIN], precision="highest")
        q = jnp.concatenate([wide, q[..., PLAIN:]], axis=-1)
    out, _ = reference.run(q, new, pages, rows, latent=LATENT, scale=SCALE)
    return jnp.einsum("thl,hvl->thv", out, up[:, PLAIN:], precision="highest") if plain else out


def check(name: str, case: Case, run: Any) -> str:
    q, new, pages, rows, up = make(case, poisoned=True)
    want = wanted(q, new, pages, rows, up)
    wrote = pages.write(new, rows).latents
    poison = jnp.full(want.shape, jnp.nan, q.dtype)  # where the outputs may come to lie
    jax.block_until_ready(poison)
    del poison
    got, after = run(q, new, LatentPages(pages.latents + 0), rows, up)
    got = got.astype(jnp.float32)
    error = float(jnp.linalg.norm(got - want) / jnp.linalg.norm(want))
    padding = ~rows.token_places(case.tokens).valid
    fine = error < 1e-2 and not got[padding].any()
    fine &= bool(jnp.array_equal(after.latents, wrote, equal_nan=True))
    return f"{'ok  ' if fine else 'FAIL'} {name}: error {error:.2e}"


def measure(name: str, case: Case, run: Any) -> str:
    q, new, pages, rows, up = make(case, poisoned=False)
    held = [pages]

    def call() -> Any:
        out, held[0] = run(q, new, held[0], rows, up)
        return out

    sums = kernel_times(call)
    total = sum(sums.values())
    ours = sum(us for kernel, us in sums.items() if "latent" in kernel) or total
    moved = sum(kv for _, kv in case.lengths) * WIDTH * 2
    channels = PLAIN + WIDTH - LATENT + VALUE if case.plain else WIDTH + LATENT
    pairs = sum(n * kv - n * (n - 1) / 2 for n, kv in case.lengths)
    flops = 2 * case.heads * channels * pairs
    us = total if case.plain else ours
    rates = f"{moved / us / 1e6:.2f} TB/s, {flops / us / 1e6:.0f} TFLOP/s"
    return f"{name}: {us:.1f} us ({total:.1f} with the schedule and the write), {rates}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", nargs="*", help="names of checks; none given: all of them")
    parser.add_argument("--time", nargs="*", help="names of shapes; none given: all of them")
    options = parser.parse_args()
    print(jax.__version__, jax.devices()[0].device_kind, flush=True)
    jobs = [(check, n, CHECKS[n]) for n in options.check or CHECKS if options.check is not None]
    jobs += [(measure, n, TIMES[n]) for n in options.time or TIMES if options.time is not None]
    with ThreadPoolExecutor(8) as pool:
        programs = [pool.submit(compiled, case) for _, _, case in jobs]
        for (job, name, case), program in zip(jobs, programs, strict=True):
            print(job(name, case, program.result()), flush=True)


if __name__ == "__main__":
    main()
