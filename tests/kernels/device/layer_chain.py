"""The chain's kernel on a GPU: right against float64, the same bits twice, and its time.

    python tests/kernels/device/layer_chain.py --rows 1 2 3 5 8

One line a case: relative errors of the residual stream and of the fused QKV, both after one layer;
then, over a chain of layers with weights of their own, microseconds a layer and the rate at which
weights are read, beside XLA's own.
"""

import argparse
import sys
from pathlib import Path

import jax
import jax.numpy as jnp

ROOT = Path(__file__).parents[3]
sys.path[:0] = [str(ROOT), str(ROOT / "models"), str(ROOT / "checkpoints")]

from pallas_kernels.layer_chain import ChainWeights, chain_state, layer_chain  # noqa: E402
from pallas_kernels.lowering import lower  # noqa: E402
from tests.kernels.device.profiled import timed  # noqa: E402
from tests.kernels.layer_chain.conformance import difference, make, oracle  # noqa: E402

LLAMA_8B = {"inner": 4096, "model": 4096, "ffn": 14336, "fused": 6144}
SHAPES = {
    "llama-3.1-8b": LLAMA_8B,
    "qwen2.5-7b": {"inner": 3584, "model": 3584, "ffn": 18944, "fused": 4608, "bias": True},
    "last layer": {**LLAMA_8B, "fused": None},
    "llama-3.2-1b": {"inner": 2048, "model": 2048, "ffn": 8192, "fused": 3072},
}
OPTIONS = {"eps": 1e-5, "activation": "silu"}


def check(rows: int, shape: str) -> bool:
    """One layer against float64, twice."""
    attended, residual, weights = make(rows, **SHAPES[shape])
    run = jax.jit(lambda *a: layer_chain(*a, chain_state(), implementation="gpu", **OPTIONS)[:2])
    first, second = run(attended, residual, weights), run(attended, residual, weights)
    wanted = oracle(attended, residual, weights, **OPTIONS)
    errors = [difference(g, w) for g, w in zip(first, wanted, strict=True) if w is not None]
    same = all(
        bool((a == b).all()) for a, b in zip(*map(jax.tree.leaves, (first, second)), strict=True)
    )
    good = same and all(error < 1e-2 for error in errors)
    print(
        f"{shape} rows {rows}: errors {errors} {'same bits' if same else 'OTHER BITS'}", flush=True
    )
    return good


def random_layer(key: jax.Array) -> ChainWeights:
    """One layer of LLAMA_8B."""
    model, ffn, fused = (LLAMA_8B[name] for name in ("model", "ffn", "fused"))
    keys = iter(jax.random.split(key, 4))

    def normal(*shape: int) -> jax.Array:
        return jax.random.normal(next(keys), shape, jnp.bfloat16) * shape[-1] ** -0.5

    return ChainWeights(
        out=normal(model, model),
        mlp_norm=jnp.ones((model,), jnp.bfloat16),
        gate_up=normal(2, ffn, model),
        down=normal(model, ffn),
        next_norm=jnp.ones((model,), jnp.bfloat16),
        qkv=normal(fused, model),
    )


def measure(rows: int, layers: list[ChainWeights], implementation: str) -> None:
    """Time of a chain of layers."""

    def chain(x: jax.Array, layers: list[ChainWeights]) -> tuple[jax.Array, list[jax.Array]]:
        state, outs = chain_state(), []
        for weights in layers:
            x, fused, state = layer_chain(
                x, x, weights, state, implementation=implementation, **OPTIONS
            )
            outs.append(fused)
        return x, outs

    x = jax.random.normal(jax.random.key(rows), (rows, LLAMA_8B["model"]), jnp.bfloat16)
    run = lower(jax.jit(chain), x, layers).compile()
    us, clock = timed(lambda: run(x, layers), len(layers))
    read = sum(leaf.nbytes for leaf in jax.tree.leaves(layers[0]))
    rate = f"{read / us / 1e6:.2f} TB/s"
    print(
        f"{implementation} rows {rows}: {us:.1f} us a layer, {rate}, {clock:.1f} us by the clock",
        flush=True,
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--shapes", nargs="*", default=list(SHAPES))
    parser.add_argument("--layers", type=int, default=16, help="0: no timing")
    args = parser.parse_args()
    good = [check(rows, shape) for shape in args.shapes for rows in args.rows]
    layers = [random_layer(key) for key in jax.random.split(jax.random.key(0), args.layers)]
    for rows in args.rows if layers else ():
        for implementation in ("reference", "gpu"):
            measure(rows, layers, implementation)
    return 0 if all(good) else 1


if __name__ == "__main__":
    sys.exit(main())
