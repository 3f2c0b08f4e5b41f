"""Check, time and tune products on a Hopper GPU: `python tests/kernels/device/product.py --check`.

A chain reads the weights of many layers, so that the L2 does not help; XLA's own product runs
beside the kernel. `--tune` stores what was fastest in pallas_kernels/tuned/<device kind>.json.
"""

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

import jax
import jax.numpy as jnp
import numpy as np

from jaxgen.bench.kernels.timing import median_call_seconds
from pallas_kernels.lowering import lower
from pallas_kernels.product import gpu, reference
from pallas_kernels.product.checks import ProductProblem, check
from pallas_kernels.product.gpu_plan import Plan, choose, fit
from pallas_kernels.tuning import file_name

TUNED = Path(__file__).resolve().parents[3] / "pallas_kernels" / "tuned"
SHAPES = {  # parts, outputs, inputs
    "llama-8b qkv": (1, 6144, 4096),
    "llama-8b out": (1, 4096, 4096),
    "llama-8b gate and up": (2, 14336, 4096),
    "llama-8b down": (1, 4096, 14336),
    "llama-8b logits": (1, 128256, 4096),
}
TOKENS = (1, 16, 64, 128, 256, 512, 1000, 2048)
_ROUNDS = 2


@dataclass(frozen=True)
class Work:
    """Tokens, and as many weights of one shape as outgrow the L2 several times."""

    name: str
    problem: ProductProblem
    x: jax.Array
    weights: list[jax.Array]

    @classmethod
    def make(cls, name: str, shape: tuple[int, int, int], tokens: int, few: bool) -> "Work":
        """Random data; few: one weight, for a check."""
        parts, _, inputs = shape
        count = 1 if few else max(3, min(16, int(600e6 / (2 * np.prod(shape)))))
        keys = jax.random.split(jax.random.key(time.time_ns() % 2**31), count + 1)
        scale = (2 / inputs) ** 0.5
        weights = [jax.random.normal(k, shape, jnp.bfloat16) * scale for k in keys[1:]]
        x = jax.random.normal(keys[0], (tokens, inputs), jnp.bfloat16)
        logits = jnp.float32 if "logits" in name else None
        activation = "silu" if parts == 2 else None
        problem = check(x, weights[0], out_dtype=logits, activation=activation)
        return cls(name, problem, x, weights)

    def compile(self, plan: Plan | None) -> Callable[..., Any]:
        """All products in a row; None: XLA's."""

        def one(x: Any, weight: Any) -> Any:
            if plan is None:
                return reference.run(x, weight, self.problem, weight_is_input=True)
            return gpu.run(x, weight, self.problem, weight_is_input=True, plan=plan)

        chain = lambda x, weights: [one(x, weight) for weight in weights]
        return lower(jax.jit(chain), self.x, self.weights).compile()

    def seconds(self, chain: Callable[..., Any]) -> float:
        """Of one product."""
        run = lambda: chain(self.x, self.weights)
        return median_call_seconds(run, len(self.weights), batches=7)

    def rates(self, seconds: float) -> str:
        """Bytes of the weight and operations in that time."""
        size = 2 * self.weights[0].size
        tokens = self.problem.tokens
        return f"{size / seconds / 1e12:.2f} TB/s, {size * tokens / seconds / 1e12:.0f} TFLOP/s"


def error(work: Work, plan: Plan) -> float:
    """Relative error of the norm against float32 at full precision."""
    got = work.compile(plan)(work.x, work.weights)[0].astype(jnp.float32)
    wide = check(
        work.x.astype(jnp.float32),
        work.weights[0].astype(jnp.float32),
        out_dtype=None,
        activation=work.problem.activation,
    )
    exact = jax.jit(lambda x, w: reference.run(x, w, wide, weight_is_input=True))
    want = exact(work.x.astype(jnp.float32), work.weights[0].astype(jnp.float32))
    return float(jnp.linalg.norm(got - want) / jnp.linalg.norm(want))


def candidates(problem: ProductProblem) -> Iterator[Plan]:
    """Plans worth measuring: even shares in as few rounds as columns allow, and a few more; of many
    tokens, tiles of all widths.
    """
    if problem.tokens > 256:
        for columns in range(256 // problem.parts, 64 // problem.parts, -16):
            plan = fit(problem, columns=columns, depth=64, cluster=2, shares_weights=True)
            if plan is not None and plan.slots >= 3:
                yield plan
        return
    most = (256 if problem.tokens <= 128 else 128) // problem.parts
    for cluster in (1, 2):  # larger clusters were slower for every shape
        shares = []
        for rounds in range(1, 16):
            columns = -(-problem.outputs // (132 * rounds * 8)) * 8
            if columns <= most and columns not in shares and len(shares) < _ROUNDS:
                shares.append(columns)
        for columns in shares:
            for depth in (64, 128):
                plan = fit(problem, columns=columns, depth=depth, cluster=cluster)
                if plan is not None and plan.slots >= 3:
                    yield plan


def sizes(plan: Plan) -> dict[str, int | bool]:
    """What is stored of a plan; the rest follows from the problem."""
    names = ("columns", "depth", "cluster", "shares_weights")
    return {name: getattr(plan, name) for name in names}


def tune(work: Work) -> dict[str, Any]:
    """The fastest way to do the work, as tuned/ holds it."""
    plans = [None, *candidates(work.problem)]
    with ThreadPoolExecutor(8) as pool:
        chains = list(pool.map(work.compile, plans))
    for chain in chains:  # warms the clocks up: whoever came first would look slow
        work.seconds(chain)
    measured = [(work.seconds(chain), plan) for chain, plan in zip(chains, plans, strict=True)]
    theirs = measured[0][0]
    best, plan = min(measured, key=lambda each: each[0])
    print(
        f"{work.name} {work.problem.tokens}: {work.rates(best)}, XLA {work.rates(theirs)}, {plan}"
    )
    stored: dict[str, Any] = {"tokens": work.problem.tokens, "by": "xla" if plan is None else "gpu"}
    if plan is not None:
        stored["plan"] = sizes(plan)
    return {**stored, "us": round(best * 1e6, 2), "xla_us": round(theirs * 1e6, 2)}


def store(results: dict[str, list[dict[str, Any]]]) -> None:
    """Put the results into this device kind's file, beside what else it holds."""
    path = TUNED / file_name(jax.devices()[0].device_kind)
    held = json.loads(path.read_text()) if path.is_file() else {}
    held["product"] = {**held.get("product", {}), **results}
    path.write_text(json.dumps(held, indent=1) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--time", action="store_true")
    parser.add_argument("--tune", action="store_true")
    parser.add_argument("--tokens", type=int, nargs="*", default=TOKENS)
    parser.add_argument("--shapes", nargs="*", default=list(SHAPES))
    options = parser.parse_args()
    results: dict[str, list[dict[str, Any]]] = {}
    for name in options.shapes:
        for tokens in options.tokens:
            work = Work.make(name, SHAPES[name], tokens, few=options.check)
            plan = choose(work.problem)
            if options.check and isinstance(plan, Plan):
                off = error(work, plan)
                print(f"{'ok  ' if off < 1e-2 else 'FAIL'} {name} {tokens}: {off:.1e}", flush=True)
            if options.time:
                for way in (None, plan) if isinstance(plan, Plan) else (None,):
                    rates = work.rates(work.seconds(work.compile(way)))
                    print(f"{name} {tokens}: {rates}, {way or 'XLA'}", flush=True)
            if options.tune:
                key = "x".join(map(str, SHAPES[name]))
                results.setdefault(key, []).append(tune(work))
    if options.tune:
        store(results)


if __name__ == "__main__":
    main()
