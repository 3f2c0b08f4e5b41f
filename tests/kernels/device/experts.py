"""Check and time the experts' blocks on a Hopper GPU: `python tests/kernels/device/experts.py`.

Every check compares with products in float32 on the host. Timings come from a compiled chain of
calls, each with experts of its own, so that weights come from memory, not from the cache.
"""

import argparse
import json
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

import jax
import jax.numpy as jnp
import numpy as np

from jaxgen.bench.kernels.timing import Chain
from pallas_kernels.expert_mlp import SharedExpert, gpu
from pallas_kernels.lowering import lower
from tests.kernels.device.profiled import kernel_times

RESULTS: list[dict[str, Any]] = []
BANDWIDTH, MATRIX_RATE = 4.29e12, 766e12  # measured on an H200: docs/performance.md


@dataclass(frozen=True)
class Shape:
    """One layer's experts."""

    experts: int
    top_k: int
    model: int
    ffn: int
    shared: int = 0  # width of the expert that all tokens visit


SHAPES = {
    "v2-lite": Shape(64, 6, 2048, 1408, 2816),
    "qwen3-30b": Shape(128, 8, 2048, 768),
    "mixtral": Shape(8, 2, 4096, 14336),
    "v3": Shape(256, 8, 7168, 2048, 2048),
    "gpt-oss": Shape(32, 4, 2880, 2880),
}


def gate(one: jax.Array, two: jax.Array) -> jax.Array:
    return jax.nn.silu(one) * two


def clamped_gate(one: jax.Array, two: jax.Array) -> jax.Array:
    one, two = jnp.minimum(one, 7.0), jnp.clip(two, -7.0, 7.0)
    return one * jax.nn.sigmoid(1.702 * one) * (two + 1)


Held = tuple[jax.Array, jax.Array, SharedExpert | None]


def weights(shape: Shape, seed: int = 0) -> Held:
    """gate/up, down and the shared expert."""
    keys = jax.random.split(jax.random.key(seed), 4)

    @partial(jax.jit, static_argnums=(1, 2))
    def draw(key: jax.Array, shape: tuple[int, ...], inputs: int) -> jax.Array:
        return jax.random.uniform(key, shape, jnp.bfloat16, -1, 1) * inputs**-0.5

    up = draw(keys[0], (shape.experts, 2, shape.ffn, shape.model), shape.model)
    down = draw(keys[1], (shape.experts, shape.model, shape.ffn), shape.ffn)
    if not shape.shared:
        return up, down, None
    wide = draw(keys[2], (2, shape.shared, shape.model), shape.model)
    return up, down, SharedExpert(wide, draw(keys[3], (shape.model, shape.shared), shape.shared))


def route(shape: Shape, tokens: int, routing: str, rng: np.random.Generator) -> np.ndarray:
    """Chosen experts [tokens, top_k]; routing: random, one, skewed or shard (most elsewhere)."""
    scores = rng.random((tokens, shape.experts * (4 if routing == "shard" else 1)))
    if routing == "one":
        scores = np.broadcast_to(scores[:1], scores.shape)
    if routing == "skewed":
        scores[:, : shape.top_k + 1] -= 0.8
    return np.argsort(scores, axis=1)[:, : shape.top_k].astype(np.int32)


CHECKS: dict[str, dict[str, Any]] = {
    "1 token": dict(tokens=1),
    "7 tokens, bias": dict(tokens=7, bias=True, gate=clamped_gate),
    "16 tokens, half padding": dict(tokens=16, dead=8),
    "40 tokens": dict(tokens=40, dead=3),
    "64 tokens to one": dict(tokens=64, routing="one"),
    "100 tokens, shard": dict(tokens=100, routing="shard"),
    "333 tokens, skewed, bias": dict(tokens=333, routing="skewed", bias=True, gate=clamped_gate),
    "3001 tokens": dict(tokens=3001, dead=70),
    "2000 tokens, skewed, bias": dict(tokens=2000, routing="skewed", bias=True),
    "nothing live": dict(tokens=8, dead=8),
    "1 token, shared": dict(tokens=1, shape=Shape(24, 4, 512, 384, 768)),
    "13 tokens, shared": dict(tokens=13, dead=2, shape=Shape(24, 4, 512, 384, 384)),
    "60 tokens, shared": dict(tokens=60, dead=2, shape=Shape(24, 4, 512, 384, 768)),
    "900 tokens, shared": dict(tokens=900, dead=2, shape=Shape(24, 4, 512, 384, 768)),
    "2880 wide, 9 tokens": dict(tokens=9, bias=True, shape=Shape(6, 2, 2880, 2880)),
    "2880 wide, 900 tokens": dict(tokens=900, bias=True, shape=Shape(6, 2, 2880, 2880)),
}


def oracle(
    x: np.ndarray,
    shares: np.ndarray,
    up: np.ndarray,
    down: np.ndarray,
    experts: np.ndarray,
    gate: Callable[..., Any],
    bias: jax.Array | None,
    shared: SharedExpert | None,
) -> np.ndarray:
    """In float32 on the host, expert by expert."""

    def block(rows: np.ndarray, up: np.ndarray, down: np.ndarray, bias: Any = (0, 0)) -> np.ndarray:
        one, two = (rows @ up[i].T + np.asarray(bias[i], np.float32) for i in range(2))
        with jax.default_device(jax.devices("cpu")[0]):
            return np.asarray(gate(jnp.asarray(one), jnp.asarray(two))) @ down.T

    out = np.zeros_like(x)
    for expert in range(len(up)):
        token, choice = np.nonzero(experts == expert)
        mine = block(x[token], up[expert], down[expert], (0, 0) if bias is None else bias[expert])
        out[token] += shares[token, choice, None] * mine
    if shared is not None:
        out += block(x, *(np.asarray(each, np.float32) for each in (shared.gate_up, shared.down)))
    return out


def check(
    name: str,
    tokens: int,
    shape: Shape = Shape(24, 4, 512, 384),
    routing: str = "random",
    dead: int = 0,
    bias: bool = False,
    gate: Callable[..., Any] = gate,
    plan: gpu.ExpertsPlan | None = None,
) -> str:
    rng = np.random.default_rng(time.time_ns())
    experts = route(shape, tokens, routing, rng)
    experts[tokens - dead :] = shape.experts
    x = rng.standard_normal((tokens, shape.model)).astype(np.float32)
    if not shape.shared:
        x[tokens - dead :] = np.nan
    up, down, shared = weights(shape, int(rng.integers(2**31)))
    biases = None
    if bias:
        biases = jnp.asarray(rng.standard_normal((shape.experts, 2, shape.ffn)), jnp.bfloat16)
    shares = jnp.asarray(rng.random(experts.shape), jnp.float32)
    args = (jnp.asarray(x, jnp.bfloat16), jnp.asarray(experts), shares, up, down)
    run = jax.jit(lambda *a: gpu.run(*a, gate=gate, bias=biases, shared=shared, plan=plan))
    got = lower(run, *args).compile()(*args)
    want = oracle(*(np.asarray(each, np.float32) for each in (args[0], shares, up, down)),
                  experts, gate, biases, shared)  # fmt: skip
    got = np.asarray(got, np.float32)
    error = float(np.linalg.norm(got - want) / max(np.linalg.norm(want), 1e-9))
    fine = error < 1e-2 and (shape.shared > 0 or not got[tokens - dead :].any())
    RESULTS.append({"check": name, "error": error, "ok": fine})
    return f"{'ok  ' if fine else 'FAIL'} {name}: error {error:.2e}"


@dataclass(frozen=True)
class Share:
    """A chain of calls, and the time that the bytes or operations of one must take."""

    chain: Chain
    touched: float
    roofline_us: float

    def measure(self) -> str:
        """A line; RESULTS gets more."""
        us = 1e6 * float(np.median(self.chain.seconds()))
        share = self.roofline_us / us
        RESULTS.append({"name": self.chain.name, "us": us, "roofline_us": self.roofline_us})
        return (
            f"{self.chain.name}: {us:.1f} us, {self.touched:.1f} experts, roofline "
            f"{self.roofline_us:.1f} us, {100 * share:.0f}%"
        )


def timing(
    name: str,
    shape: Shape,
    held: Held,
    tokens: int,
    plan: gpu.ExpertsPlan | None = None,
    routing: str = "random",
) -> Share:
    """Calls on the outputs of the one before, each with its own routing."""
    calls = 8 if tokens < 1024 else 2
    rng = np.random.default_rng(0)
    routes = np.stack([route(shape, tokens, routing, rng) for _ in range(calls)])
    if tokens == 1:  # the calls' experts differ as long as there are enough
        routes.flat[:] = np.resize(rng.permutation(shape.experts), routes.size)
    x = jax.random.normal(jax.random.key(1), (tokens, shape.model), jnp.bfloat16)
    shares = jnp.full(routes.shape[1:], 1.0, jnp.float32)

    def chain(x: Any, routes: Any, shares: Any, up: Any, down: Any, shared: Any) -> Any:
        for i in range(calls):
            args = (x, routes[i], shares, up, down)
            x = x + gpu.run(*args, gate=gate, bias=None, shared=shared, plan=plan)
        return x

    args = (x, jnp.asarray(routes), shares, *held)
    touched = float(np.mean([len(np.unique(each)) for each in routes]))
    weights_of_one = 3 * shape.model * shape.ffn
    parts = shape.shared / shape.ffn
    moved = 2 * (touched + parts) * weights_of_one + 4 * tokens * shape.model
    rate = 2 * tokens * (shape.top_k + parts) * weights_of_one / MATRIX_RATE
    roofline = max(moved / BANDWIDTH, rate) * 1e6
    run = lower(jax.jit(chain), *args).compile()
    return Share(Chain(name, run, args, calls), touched, roofline)


def kernels(case: Chain) -> str:
    """Time of a case's kernels, the longest first."""
    found = kernel_times(lambda: case.run(*case.args), case.calls)
    longest = sorted(found.items(), key=lambda pair: -pair[1])[:14]
    return f"  {case.name}: {', '.join(f'{name[:26]} {us:.1f}' for name, us in longest)}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", nargs="*", help="names of checks; none given: all of them")
    parser.add_argument("--time", nargs="*", help="shapes; none given: v2-lite and qwen3-30b")
    parser.add_argument("--tokens", nargs="*", type=int, default=[1, 8, 64, 256, 8192])
    parser.add_argument("--profile", action="store_true", help="each kernel's time too")
    parser.add_argument("--json")
    options = parser.parse_args()
    if options.check is not None:
        with ThreadPoolExecutor(8) as pool:
            found = [pool.submit(check, n, **CHECKS[n]) for n in options.check or CHECKS]
            for each in found:
                print(each.result(), flush=True)
    if options.time is not None:
        print(jax.__version__, jax.devices()[0].device_kind, flush=True)
        for name in options.time or ("v2-lite", "qwen3-30b"):
            shape, held = SHAPES[name], weights(SHAPES[name])
            builders = [
                partial(timing, f"{name} x {tokens}", shape, held, tokens)
                for tokens in options.tokens
            ]
            with ThreadPoolExecutor(8) as pool:
                cases = list(pool.map(lambda build: build(), builders))
            for case in cases:
                print(case.measure(), flush=True)
            if options.profile:
                for case in cases:
                    print(kernels(case.chain), flush=True)
    if options.json:
        Path(options.json).write_text(json.dumps(RESULTS, indent=1))


if __name__ == "__main__":
    main()
