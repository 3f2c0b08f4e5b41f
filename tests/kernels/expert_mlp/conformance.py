"""What the experts' blocks must do, as cases that every implementation runs against float64."""

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.expert_mlp import SharedExpert

NOWHERE = 2**30


@dataclass(frozen=True)
class Case:
    """routing: "random", "one" (all tokens to the same experts), "nowhere" or "shard".

    shard: most chosen experts belong to other shards. padding: tokens without any expert, at the
    end, which hold NaN.
    """

    tokens: int
    top_k: int
    experts: int
    model: int = 64
    ffn: int = 64
    padding: int = 0
    routing: str = "random"
    bias: bool = False
    shared: int = 0  # its width


CASES = {
    "one_token": Case(1, 2, 5),
    "few": Case(7, 3, 12, padding=1),
    "all_to_one": Case(40, 1, 6, routing="one"),
    "more_than_a_tile": Case(150, 2, 4, padding=5),
    "nothing_live": Case(0, 2, 4, padding=4),
    "shard": Case(20, 4, 3, routing="shard", padding=2),
    "bias": Case(9, 2, 4, bias=True),
    "shared": Case(9, 2, 4, shared=128),
    "odd_sizes": Case(5, 2, 3, model=33, ffn=7, bias=True, shared=5),
}


class Inputs(NamedTuple):
    x: jax.Array
    experts: jax.Array
    shares: jax.Array
    gate_up: jax.Array
    down: jax.Array
    bias: jax.Array | None
    shared: SharedExpert | None


def gate(one: jax.Array, two: jax.Array) -> jax.Array:
    """An activated gate as the families have it."""
    return jax.nn.silu(one) * two


def make(case: Case, dtype: Any, seed: int = 0) -> Inputs:
    rng = np.random.default_rng(seed)
    everywhere = case.experts * 4 if case.routing == "shard" else case.experts
    order = np.argsort(rng.random((case.tokens + case.padding, everywhere)), axis=1)
    experts = order[:, : case.top_k].astype(np.int32)
    if case.routing == "one":
        experts[:] = np.arange(case.top_k) + case.experts // 2
    experts = np.where(experts < case.experts, experts, NOWHERE)
    if case.routing == "shard":  # as they come from the layer: before and behind this shard's
        experts = np.where(order[:, : case.top_k] % 2 == 0, experts, -experts - 1)
        experts = np.where(experts < -case.experts, -7, experts).astype(np.int32)
        experts = np.where((experts < 0) & (experts >= -case.experts), -1, experts)
    experts[case.tokens :] = case.experts
    x = rng.standard_normal((case.tokens + case.padding, case.model))
    x[case.tokens :] = np.nan
    shares = rng.random(experts.shape)
    shares[case.tokens :] = np.nan
    draw = lambda *shape: jnp.asarray(rng.standard_normal(shape) / np.sqrt(shape[-1]), dtype)
    return Inputs(
        x=jnp.asarray(x, dtype),
        experts=jnp.asarray(experts, jnp.int32),
        shares=jnp.asarray(shares, jnp.float32),
        gate_up=draw(case.experts, 2, case.ffn, case.model),
        down=draw(case.experts, case.model, case.ffn),
        bias=draw(case.experts, 2, case.ffn) if case.bias else None,
        shared=None
        if not case.shared
        else SharedExpert(
            draw(2, case.shared, case.model),
            draw(case.model, case.shared),
            jnp.asarray(rng.random(len(x)), jnp.float32),
        ),
    )


def oracle(inputs: Inputs) -> np.ndarray:
    """In float64, token by token."""
    *plain, bias, shared = jax.tree.map(lambda a: np.asarray(a).astype(np.float64), inputs)
    x, experts, shares, gate_up, down = plain

    def block(row: np.ndarray, up: np.ndarray, down: np.ndarray, bias: Any = 0) -> np.ndarray:
        one, two = up @ row + bias
        return down @ (one / (1 + np.exp(-one)) * two)

    out = np.zeros_like(x)
    for token, row in enumerate(experts.astype(int)):
        for choice, expert in enumerate(row):
            if 0 <= expert < len(gate_up):
                added = 0 if bias is None else bias[expert]
                each = block(x[token], gate_up[expert], down[expert], added)
                out[token] += shares[token, choice] * each
        if shared is not None:
            out[token] += shared.share[token] * block(x[token], shared.gate_up, shared.down)
    return out


def assert_conforms(run: Any, case: Case, dtype: Any, tolerance: float) -> None:
    """run(x, ..., gate=, bias=, shared=) is near the oracle, and zero for padding."""
    inputs = make(case, dtype)
    *arrays, bias, shared = inputs
    got = run(*arrays, gate=gate, bias=bias, shared=shared)
    assert got.dtype == dtype
    got, want = np.asarray(got).astype(np.float64), oracle(inputs)
    assert np.linalg.norm(got - want) <= tolerance * np.linalg.norm(want)  # NaN is not less
    assert not got[case.tokens :].any()
