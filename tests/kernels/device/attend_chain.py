"""Attention with the chain behind it on a GPU: right against float32, the same bits, its time.

    python tests/kernels/device/attend_chain.py --time 128 2048 8192

One line a case: relative errors of the residual stream and of the next fused QKV, and the largest
difference of the pages; then, over a chain of layers with weights and pages of their own,
microseconds a layer, beside attention in kernels of its own.
"""

import argparse
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

ROOT = Path(__file__).parents[3]
sys.path[:0] = [str(ROOT), str(ROOT / "models"), str(ROOT / "checkpoints")]

from jaxgen.bench.kernels.rows import shuffled_rows  # noqa: E402
from pallas_kernels.attend_chain import AttentionOptions, attend_chain  # noqa: E402
from pallas_kernels.layer_chain import chain_state, layer_chain  # noqa: E402
from pallas_kernels.lowering import lower  # noqa: E402
from pallas_kernels.pages import KVPages  # noqa: E402
from pallas_kernels.qkv_attention import HeadNorms, Rotation, qkv_attention  # noqa: E402
from tests.kernels.device.layer_chain import LLAMA_8B, random_layer  # noqa: E402
from tests.kernels.device.profiled import timed  # noqa: E402
from tests.kernels.layer_chain.conformance import difference, make  # noqa: E402

HEAD, PAGE = 128, 64
NORM = {"eps": 1e-5, "activation": "silu"}


@dataclass(frozen=True)
class Case:
    """One row's only token, with so many KV tokens."""

    length: int
    heads: int = 32
    kv_heads: int = 8
    norms: bool = False
    interleaved: bool = False
    window: int | None = None
    soft_cap: float | None = None
    sinks: bool = False

    @property
    def width(self) -> int:
        """Columns of the raw product."""
        return (self.heads + 2 * self.kv_heads) * HEAD


CHECKS = {
    "70": Case(70),
    "its first token": Case(1),
    "64, a page is full": Case(64),
    "300": Case(300),
    "4000": Case(4000),
    "norms, window": Case(900, norms=True, window=70),
    "interleaved, cap, sinks": Case(1290, interleaved=True, soft_cap=2.0, sinks=True),
    "group of 2": Case(129, kv_heads=16),
    "group of 8": Case(2000, heads=8, kv_heads=1),
}


def attention_of(case: Case, seed: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The raw product, pages, rows, and attention's options by name; NaN in what no row owns."""
    rows, count = shuffled_rows([(1, case.length)], PAGE)
    keys = jax.random.split(jax.random.key(seed), 7)
    owned = np.zeros((count, PAGE), bool)
    position = np.arange(case.length - 1)
    owned[np.asarray(rows.block_table)[0, position // PAGE], position % PAGE] = True
    pool = (count, case.kv_heads, PAGE, HEAD)
    mine = jnp.asarray(owned)[:, None, :, None]
    pages = KVPages(
        *(
            jnp.where(mine, jax.random.normal(key, pool), jnp.nan).astype(jnp.bfloat16)
            for key in keys[:2]
        )
    )
    angle = jax.random.uniform(keys[2], (1, HEAD // 2)) * 6
    vectors = (jax.random.uniform(k, (HEAD,), jnp.bfloat16, 0.5, 1.5) for k in keys[4:6])
    attention = AttentionOptions(
        scale=HEAD**-0.5,
        rotation=Rotation(jnp.cos(angle), jnp.sin(angle), case.interleaved),
        norms=HeadNorms(*vectors, eps=1e-6) if case.norms else None,
        window=case.window,
        soft_cap=case.soft_cap,
        sinks=jax.random.normal(keys[3], (case.heads,)) if case.sinks else None,
    )
    fused = jax.random.normal(keys[6], (1, case.width), jnp.bfloat16)
    return (fused, pages, rows), {"attention": attention}


def arguments(case: Case, seed: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Arguments and options of attend_chain, with a layer of Llama-8B's other sizes."""
    (fused, pages, rows), options = attention_of(case, seed)
    shape: dict[str, Any] = {**LLAMA_8B, "inner": case.heads * HEAD, "fused": case.width}
    _, residual, weights = make(1, **shape)
    return (fused, residual, weights, pages, rows, chain_state()), options


def largest_difference(pages: KVPages, others: KVPages) -> float:
    """Of what is in the pages; infinite unless they hold NaN in the same places."""
    return max(
        float(np.nanmax(np.abs(np.asarray(a, np.float32) - np.asarray(b, np.float32))))
        if np.array_equal(np.isnan(a), np.isnan(b))
        else np.inf
        for a, b in zip(*map(jax.tree.leaves, (pages, others)), strict=True)
    )


def check(name: str, case: Case) -> bool:
    """Twice with the kernel, once in parts."""
    inputs, options = arguments(case, len(name))

    def run(implementation: str) -> Callable[..., Any]:
        return jax.jit(
            lambda *inputs: attend_chain(*inputs, implementation=implementation, **NORM, **options)
        )

    kernel = run("gpu")
    first, second = kernel(*inputs), kernel(*inputs)
    want = run("reference")(*inputs)
    errors = [
        difference(one, np.asarray(other, np.float64))
        for one, other in zip(first[:2], want[:2], strict=True)
    ]
    pages = largest_difference(first[2], want[2])
    same = all(bool((a == b).all()) for a, b in zip(first[:2], second[:2], strict=True))
    good = same and pages < 0.1 and all(error < 1e-2 for error in errors)
    print(
        f"{'ok  ' if good else 'FAIL'} {name}: {errors}, pages {pages:.1e}, same {same}", flush=True
    )
    return good


def measure(length: int, layers: list[Any]) -> None:
    """Time of a chain of layers at this length."""
    case = Case(length)
    (fused, x, _, pages, rows, _), options = arguments(case, 0)
    pages = jax.tree.map(jnp.nan_to_num, pages)

    def together(x: Any, fused: Any, weights: Any, pages: Any, state: Any, rows: Any) -> Any:
        return attend_chain(
            fused, x, weights, pages, rows, state, implementation="gpu", **NORM, **options
        )

    def apart(x: Any, fused: Any, weights: Any, pages: Any, state: Any, rows: Any) -> Any:
        raw = fused.reshape(1, case.kv_heads, -1, HEAD)
        attended, pages = qkv_attention(raw, pages, rows, **options["attention"].by_name())
        x, fused, state = layer_chain(attended.reshape(1, -1), x, weights, state, **NORM)
        return x, fused, pages, state

    for name, layer in (("together", together), ("apart", apart)):

        def chain(x: Any, fused: Any, layers: Any, all_pages: Any, rows: Any, layer=layer) -> Any:
            state, written = chain_state(), []
            for weights, pages in zip(layers, all_pages, strict=True):
                x, fused, pages, state = layer(x, fused, weights, pages, state, rows)
                written.append(pages)
            return written, x

        held = [jax.tree.map(jnp.copy, pages) for _ in layers]
        run = lower(jax.jit(chain, donate_argnums=3), x, fused, layers, held, rows).compile()

        def step(run=run, box=[held]) -> Any:  # noqa: B006
            box[0], out = run(x, fused, layers, box[0], rows)
            return out

        us, clock = timed(step, len(layers))
        print(f"{length} {name}: {us:.1f} us a layer, {clock:.1f} by the clock", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", nargs="*", default=list(CHECKS))
    parser.add_argument("--time", type=int, nargs="*", default=[])
    args = parser.parse_args()
    good = [check(name, CHECKS[name]) for name in args.check]
    if args.time:
        layers = [random_layer(key) for key in jax.random.split(jax.random.key(0), 16)]
        following = [layer.out for layer in [*layers[1:], layers[0]]]
        layers = [replace(w, ahead=out) for w, out in zip(layers, following, strict=True)]
        for length in args.time:
            measure(length, layers)
    return 0 if all(good) else 1


if __name__ == "__main__":
    sys.exit(main())
