"""The mixture chain's kernel on a GPU: right against float32, the same bits twice, and its time.

    python tests/kernels/device/mixture_chain.py

One line a check: relative errors of the residual stream and of the next layer's first product;
then, over a chain of layers with weights of their own, microseconds a layer and the rate at which
weights are read.
"""

import argparse
import sys
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp

ROOT = Path(__file__).parents[3]
sys.path[:0] = [str(ROOT), str(ROOT / "models"), str(ROOT / "checkpoints")]

from jaxgen.bench.kernels.timing import median_call_seconds  # noqa: E402
from pallas_kernels.expert_mlp.choice import ChoiceProblem  # noqa: E402
from pallas_kernels.mixture_chain import MixtureWeights, mixture_chain, mixture_state  # noqa: E402


def choice(experts: int, top_k: int, softmax: bool, normalise: bool) -> ChoiceProblem:
    return ChoiceProblem(1, experts, top_k, softmax, 1, 1, 1, normalise, 1.0)


SHAPES = {
    "v2-lite": (
        choice(64, 6, True, False),
        {"inner": 2048, "model": 2048, "ffn": 1408, "shared": 2816, "fused": 3648},
    ),
    "qwen3-30b": (
        choice(128, 8, True, True),
        {"inner": 4096, "model": 2048, "ffn": 768, "shared": 0, "fused": 5120},
    ),
    "few, sigmoid, last layer": (
        choice(64, 3, False, True),
        {"inner": 1024, "model": 1536, "ffn": 192, "shared": 192, "fused": None},
    ),
}
OPTIONS = {"eps": 1e-6, "activation": "silu"}


@partial(jax.jit, static_argnums=(1, 2, 3, 4, 5, 6))
def random_layer(
    key: jax.Array, experts: int, inner: int, model: int, ffn: int, shared: int, fused: int | None
) -> MixtureWeights:
    keys = iter(jax.random.split(key, 8))

    def normal(*shape: int) -> jax.Array:
        return jax.random.normal(next(keys), shape, jnp.bfloat16) * shape[-1] ** -0.5

    return MixtureWeights(
        out=normal(model, inner),
        mlp_norm=jnp.ones((model,), jnp.bfloat16),
        router=normal(experts, model),
        gate_up=normal(experts, 2, ffn, model),
        down=normal(experts, model, ffn),
        shared_gate_up=normal(2, shared, model) if shared else None,
        shared_down=normal(model, shared) if shared else None,
        next_norm=None if fused is None else jnp.ones((model,), jnp.bfloat16),
        following=None if fused is None else normal(fused, model),
    )


def made(name: str, seed: int) -> MixtureWeights:
    problem, sizes = SHAPES[name]
    return random_layer(jax.random.key(seed), problem.experts, *sizes.values())


def check(name: str) -> bool:
    """One layer against float32, twice."""
    problem, sizes = SHAPES[name]
    good = True
    for seed in range(3):
        weights = made(name, seed)
        attended, residual = (
            jax.random.normal(jax.random.key(10 * seed + i), (1, sizes[width]), jnp.bfloat16)
            for i, width in enumerate(("inner", "model"))
        )

        def run(*args: jax.Array, **options: str) -> tuple[jax.Array, ...]:
            state = mixture_state(sizes["model"], problem.experts)
            found = mixture_chain(*args, state, choice=problem, **options, **OPTIONS)
            return tuple(each for each in found[:2] if each is not None)

        args = attended, residual, weights
        kernel = jax.jit(partial(run, implementation="gpu"))
        first, second = kernel(*args), kernel(*args)
        wide = jax.tree.map(lambda leaf: leaf.astype(jnp.float32), args)
        wanted = jax.jit(partial(run, implementation="reference"))(*wide)
        errors = [
            float(jnp.linalg.norm(got - want) / jnp.linalg.norm(want))
            for got, want in zip(first, wanted, strict=True)
        ]
        same = all(bool((a == b).all()) for a, b in zip(first, second, strict=True))
        good = good and same and all(error < 2e-2 for error in errors)
        print(f"{name}: errors {errors} {'same bits' if same else 'OTHER BITS'}", flush=True)
    return good


def clock(name: str, depth: int) -> None:
    """Time of a chain of layers; the experts differ from layer to layer."""
    problem, sizes = SHAPES[name]
    layers = [made(name, seed) for seed in range(depth)]

    def chain(x: jax.Array, fused: jax.Array, layers: list[MixtureWeights]) -> jax.Array:
        state = mixture_state(sizes["model"], problem.experts)
        for weights in layers:
            attended = fused[:, : sizes["inner"]]
            x, fused, state = mixture_chain(
                attended, x, weights, state, choice=problem, implementation="gpu", **OPTIONS
            )
        return x, fused

    keys = jax.random.split(jax.random.key(7))
    x = jax.random.normal(keys[0], (1, sizes["model"]), jnp.bfloat16)
    fused = jax.random.normal(keys[1], (1, sizes["fused"]), jnp.bfloat16)
    run = jax.jit(chain).lower(x, fused, layers).compile()
    seconds = median_call_seconds(lambda: run(x, fused, layers), depth, queued=20, batches=5)
    expert = 3 * sizes["model"] * sizes["ffn"]
    others = sizes["inner"] + problem.experts + sizes["fused"]
    read = 2 * (problem.top_k * expert + sizes["model"] * (3 * sizes["shared"] + others))
    print(f"{name}: {seconds * 1e6:.1f} us a layer, {read / seconds / 1e12:.2f} TB/s", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shapes", nargs="*", default=list(SHAPES))
    parser.add_argument("--layers", type=int, default=8, help="0: no timing")
    args = parser.parse_args()
    good = [check(name) for name in args.shapes]
    for name in args.shapes:
        if args.layers and SHAPES[name][1]["fused"] is not None:
            clock(name, args.layers)
    return 0 if all(good) else 1


if __name__ == "__main__":
    sys.exit(main())
