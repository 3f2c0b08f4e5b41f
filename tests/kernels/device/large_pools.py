"""Pools of more than 2^32 elements on a Hopper GPU: `python tests/kernels/device/large_pools.py`.

The same step in a small pool and at the end of a large one must be the same to the bit, for the
kernels and for what XLA makes of the portable code; and nothing else of the large one is touched.
"""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

import jax
import jax.numpy as jnp

from jaxgen.bench.kernels.rows import shuffled_rows as batch
from pallas_kernels.latent_attention import gpu as latent_gpu, portable as latent_portable
from pallas_kernels.latent_pages import LatentPages
from pallas_kernels.pages import KVPages, RaggedRows
from pallas_kernels.ragged_attention import gpu, portable
from pallas_kernels.rope_write import gpu as rope_write

ELEMENTS = 5 * 10**9
STEPS = {
    "decode": [(1, 70), (1, 1), (1, 200), (1, 300)],
    "prefill": [(200, 200), (70, 270), (1, 64)],
}
NO_OPTIONS = {"window": None, "soft_cap": None, "sinks": None, "alibi": None}

type Step = Callable[[Any, RaggedRows], tuple[jax.Array, Any]]


def check(name: str, step: Step, make: Callable[[int], Any], rows: RaggedRows, count: int) -> bool:
    """make(pages): a pool of so many. count: pages that the rows have."""
    one = jax.tree.leaves(jax.eval_shape(lambda: make(1)))[0]
    total = count + ELEMENTS // one.size
    moved = RaggedRows(
        rows.starts,
        rows.query_lengths,
        rows.kv_lengths,
        rows.block_table + (total - count),
        rows.num_rows,
    )
    run = jax.jit(step, donate_argnums=0)
    want, small = run(make(count), rows)
    got, large = run(make(total), moved)
    fine = bool(jnp.array_equal(want, got)) and bool(jnp.isfinite(want).all())
    for part, whole in zip(jax.tree.leaves(small), jax.tree.leaves(large), strict=True):
        fine &= bool(jnp.array_equal(part, whole[total - count :])) and bool(part.any())
        starts = range(0, total - count - 4096, 16_384)
        fine &= not any(bool(whole[start : start + 4096].any()) for start in starts)
    print("ok  " if fine else "FAIL", name, flush=True)
    return fine


def main() -> int:
    keys, fine = jax.random.split(jax.random.key(0), 4), True
    for name, lengths in STEPS.items():
        rows, count = batch(lengths, 128, 1)
        tokens = len(lengths) if name == "decode" else sum(q for q, _ in lengths) + 3

        def normal(index: int, *shape: int, tokens: int = tokens) -> jax.Array:
            return jax.random.normal(keys[index], (tokens, *shape), jnp.bfloat16)

        q, k, v, qkv = (
            normal(0, 32, 128),
            normal(1, 8, 128),
            normal(2, 8, 128),
            normal(3, 8, 6, 128),
        )

        def make(pages: int) -> KVPages:
            return KVPages(*(jnp.zeros((pages, 8, 128, 128), jnp.bfloat16) for _ in range(2)))

        steps: dict[str, Step] = {
            each.__name__: lambda pages, rows, each=each, q=q, k=k, v=v: each.run(
                q, k, v, pages, rows, scale=0.088, **NO_OPTIONS
            )
            for each in (gpu, portable)
        }
        steps[rope_write.__name__] = lambda pages, rows, qkv=qkv: rope_write.run(
            qkv, pages, rows, rotation=None, norms=None
        )
        for kernel, step in steps.items():
            fine &= check(f"{kernel}: {name}", step, make, rows, count)
        rows, count = batch(lengths, 64, 1)
        q, new = normal(0, 16, 576), normal(1, 576)

        def make_latents(pages: int) -> LatentPages:
            return LatentPages(jnp.zeros((pages, 64, 576), jnp.bfloat16))

        for each in (latent_gpu, latent_portable):
            fine &= check(
                f"{each.__name__}: {name}",
                lambda pages, rows, each=each, q=q, new=new: each.run(
                    q, new, pages, rows, latent=512, scale=0.07
                ),
                make_latents,
                rows,
                count,
            )
    return 0 if fine else 1


if __name__ == "__main__":
    sys.exit(main())
