"""The mixture chain's kernel on a GPU: right against float32, the same bits twice, and its time.

    python tests/kernels/device/mixture_chain.py --time 128 2048 8192

One line a check: relative errors of the residual stream and of the next layer's first product;
then, over a chain of layers with weights of their own, microseconds a layer and the rate at which
weights are read. The same of the kernel that attention begins, beside attention in kernels of its
own, at each length of `--time`.
"""

import argparse
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

ROOT = Path(__file__).parents[3]
sys.path[:0] = [str(ROOT), str(ROOT / "models"), str(ROOT / "checkpoints")]

from pallas_kernels.attend_mixture import attend_mixture  # noqa: E402
from pallas_kernels.expert_mlp.choice import ChoiceProblem  # noqa: E402
from pallas_kernels.lowering import lower  # noqa: E402
from pallas_kernels.mixture_chain import MixtureWeights, mixture_chain, mixture_state  # noqa: E402
from pallas_kernels.qkv_attention import qkv_attention  # noqa: E402
from tests.kernels.device.attend_chain import (  # noqa: E402
    HEAD,
    Case,
    attention_of,
    largest_difference,
)
from tests.kernels.device.profiled import timed  # noqa: E402
from tests.kernels.mixture_chain.conformance import difference  # noqa: E402


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
QWEN = Case(128, heads=32, kv_heads=4, norms=True)
ATTENDED = {
    "its first token": replace(QWEN, length=1),
    "70": replace(QWEN, length=70),
    "64, a page is full": replace(QWEN, length=64),
    "300": replace(QWEN, length=300),
    "2048": replace(QWEN, length=2048),
    "8191": replace(QWEN, length=8191),
    "window": replace(QWEN, length=900, window=70),
    "interleaved, cap, sinks": replace(
        QWEN, length=1290, interleaved=True, soft_cap=2.0, sinks=True
    ),
    "group of 2": Case(129, heads=32, kv_heads=16),
    "group of 8, one KV head": Case(2000, heads=8, kv_heads=1),
}


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


def measure(name: str, depth: int) -> None:
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
    run = lower(jax.jit(chain), x, fused, layers).compile()
    us, clock = timed(lambda: run(x, fused, layers), depth)
    expert = 3 * sizes["model"] * sizes["ffn"]
    others = sizes["inner"] + problem.experts + sizes["fused"]
    read = 2 * (problem.top_k * expert + sizes["model"] * (3 * sizes["shared"] + others))
    rate = f"{read / us / 1e6:.2f} TB/s"
    print(f"{name}: {us:.1f} us a layer, {rate}, {clock:.1f} us by the clock", flush=True)


def check_attended(name: str) -> bool:
    """The kernel that attention begins, twice, beside its parts, over three layers' calls."""
    case, problem = ATTENDED[name], SHAPES["qwen3-30b"][0]
    sizes = SHAPES["qwen3-30b"][1] | {"inner": case.heads * HEAD, "fused": case.width}
    (fused, pages, rows), options = attention_of(case, len(name))
    x = jax.random.normal(jax.random.key(len(name)), (1, sizes["model"]), jnp.bfloat16)
    layers = [random_layer(jax.random.key(s), problem.experts, *sizes.values()) for s in range(2)]

    def run(fused: Any, x: Any, layers: Any, pages: Any, rows: Any, implementation: str) -> Any:
        state, found = mixture_state(sizes["model"], problem.experts, sizes["inner"]), []
        for weights in layers:  # of the same input: what one gives is not the other's error
            *outputs, state = attend_mixture(
                *(fused, x, weights, pages, rows, state),
                choice=problem,
                implementation=implementation,
                **options,
                **OPTIONS,
            )
            found.append(outputs)
        return found

    args = fused, x, layers, pages, rows
    kernel = jax.jit(partial(run, implementation="gpu"))
    first, second = kernel(*args), kernel(*args)
    wanted = jax.jit(partial(run, implementation="reference"))(*args)
    errors, written, same = [], 0.0, True
    for one, other, want in zip(first, second, wanted, strict=True):
        pairs = zip(one[:2], want[:2], strict=True)
        errors += [difference(got, np.asarray(right, np.float64)[0]) for got, right in pairs]
        written = max(written, largest_difference(one[2], want[2]))
        same = same and all(bool((a == b).all()) for a, b in zip(one[:2], other[:2], strict=True))
    good = same and written < 0.1 and all(error < 2e-2 for error in errors)
    shown = " ".join(f"{error:.1e}" for error in errors)
    print(f"{'ok  ' if good else 'FAIL'} {name}: errors {shown}, pages {written:.1e}, same {same}")
    return good


def measure_attended(length: int, layers: list[MixtureWeights]) -> None:
    """Time of a chain of layers with attention over so many tokens, both ways."""
    problem, sizes = SHAPES["qwen3-30b"]
    (fused, pages, rows), options = attention_of(replace(QWEN, length=length), 0)
    pages = jax.tree.map(jnp.nan_to_num, pages)
    x = jax.random.normal(jax.random.key(7), (1, sizes["model"]), jnp.bfloat16)
    chained: dict[str, Any] = {"choice": problem, "implementation": "gpu", **OPTIONS}

    def together(x: Any, fused: Any, weights: Any, pages: Any, state: Any, rows: Any) -> Any:
        return attend_mixture(fused, x, weights, pages, rows, state, **chained, **options)

    def apart(x: Any, fused: Any, weights: Any, pages: Any, state: Any, rows: Any) -> Any:
        raw = fused.reshape(1, QWEN.kv_heads, -1, HEAD)
        attended, pages = qkv_attention(raw, pages, rows, **options["attention"].by_name())
        x, fused, state = mixture_chain(attended.reshape(1, -1), x, weights, state, **chained)
        return x, fused, pages, state

    for name, layer in (("together", together), ("apart", apart)):

        def chain(x: Any, fused: Any, layers: Any, all_pages: Any, rows: Any, layer=layer) -> Any:
            state, written = mixture_state(sizes["model"], problem.experts, sizes["inner"]), []
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
    parser.add_argument("--shapes", nargs="*", default=list(SHAPES))
    parser.add_argument("--attended", nargs="*", default=list(ATTENDED))
    parser.add_argument("--layers", type=int, default=8, help="0: no timing")
    parser.add_argument("--time", type=int, nargs="*", default=[])
    args = parser.parse_args()
    good = [check(name) for name in args.shapes]
    good += [check_attended(name) for name in args.attended]
    for name in args.shapes:
        if args.layers and SHAPES[name][1]["fused"] is not None:
            measure(name, args.layers)
    if args.time:
        layers = [made("qwen3-30b", seed) for seed in range(args.layers)]
        following = [layer.out for layer in [*layers[1:], layers[0]]]
        layers = [replace(w, ahead=out) for w, out in zip(layers, following, strict=True)]
        for length in args.time:
            measure_attended(length, layers)
    return 0 if all(good) else 1


if __name__ == "__main__":
    sys.exit(main())
