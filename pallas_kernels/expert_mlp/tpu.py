"""The experts' blocks on TPUs with Mosaic: tiles of one expert's tokens, and the shares' sum.

Few tokens: every touched expert serves all of them, and the kernel adds up. Many: each expert's own
tokens are gathered into tiles, and their results are added up afterwards.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.expert_mlp.checks import ExpertsProblem, Gate
from pallas_kernels.expert_mlp.shared import SharedExpert, visit
from pallas_kernels.expert_mlp.tpu_kernel import TPUPlan, serve_tiles, vmem_bytes
from pallas_kernels.expert_mlp.tpu_tiles import known, tiles_of_own_tokens, touched_experts

_FEW_TOKENS = 128
"""Up to here a product with all tokens takes no longer than to fetch its weights."""

_CHUNK_BYTES = 8 * 2**20
"""Of weights in one fetch: larger ones only make the first of them arrive later."""

_VMEM_PLANNED = 32 * 2**20
"""What plans may add up to: the compiler wants room for values between."""

_PARTS = 2
"""Cores that share the tiles, on chips that have so many; else one does both parts in turn."""


def plan_for(problem: ExpertsProblem) -> TPUPlan | None:
    """The tiles and fetches of a problem; None where vector memory cannot hold the least."""
    itemsize = problem.dtype.itemsize
    least = 8 * 4 // itemsize  # rows of one tile of the chip's memory
    gather = problem.tokens > _FEW_TOKENS
    rows = -(-problem.tokens // least) * least
    if gather:
        rows = next((each for each in (64, 128, 256) if problem.visits <= 0.8 * each), 512)
    while True:
        for chunk in _chunks(problem.ffn):
            plan = TPUPlan(rows, chunk, gather, _PARTS)
            small = 3 * chunk * problem.model * itemsize <= _CHUNK_BYTES or chunk <= 128
            if small and vmem_bytes(plan, problem.model, itemsize) <= _VMEM_PLANNED:
                return plan
        if not gather or rows == 64:
            return None
        rows //= 2


def _chunks(ffn: int) -> list[int]:
    """Parts of an expert's hidden layer that the chip's memory can be cut at, the largest first."""
    if ffn % 128:
        return [ffn]
    lanes = ffn // 128
    return [128 * n for n in range(lanes, 0, -1) if lanes % n == 0]


def unsupported(problem: ExpertsProblem) -> str | None:
    """Why the TPU kernel cannot serve this problem; None if it can."""
    if problem.dtype not in (jnp.bfloat16, jnp.float32) or problem.weight_dtype != problem.dtype:
        return "activations and weights must both be bfloat16 or both be float32"
    if problem.model % 128 or problem.ffn % 32:
        return "the model's width must be a multiple of 128, the experts' of 32"
    if plan_for(problem) is None:
        return "one block of weights does not fit the chip's vector memory"
    return None


def run(
    x: Float[Array, "tokens model"],
    experts: Int[Array, "tokens top_k"],
    shares: Float[Array, "tokens top_k"],
    gate_up: Float[Array, "experts 2 ffn model"],
    down: Float[Array, "experts model ffn"],
    *,
    gate: Gate,
    bias: Float[Array, "experts 2 ffn"] | None,
    shared: SharedExpert | None = None,
    top_k: int | None = None,
    spread: int = 1,
    interpret: Any = False,
    plan: TPUPlan | None = None,
) -> Float[Array, "tokens model"]:
    """As expert_mlp. interpret: parameters of Mosaic TPU's interpreter, for tests."""
    local, _, ffn, model = gate_up.shape
    experts, shares = experts[:, :top_k], shares[:, :top_k]
    if plan is None:
        tokens, visited = experts.shape
        sizes = tokens, visited, local, model, ffn
        problem = ExpertsProblem(*sizes, x.dtype, gate_up.dtype, gate, spread)
        plan = plan_for(problem)
        if plan is None:
            raise ValueError(f"expert_mlp: the implementation 'tpu' cannot serve {problem}.")
    mine = known(experts, local)
    # Whatever a token without experts holds, it is multiplied by a share of zero.
    x_known = jnp.where(mine.any(axis=1)[:, None], x, 0)
    routing = (experts, jnp.where(mine, shares, 0).astype(jnp.float32))
    serve = functools.partial(
        serve_tiles,
        gate_up=gate_up,
        down=down,
        bias=bias,
        gate=gate,
        plan=plan,
        interpret=interpret,
    )
    if plan.gather:
        out = _gathered(x_known, *routing, local, plan, serve)
    else:
        out = _together(x_known, *routing, local, plan, serve)
    out = out.astype(x.dtype)
    return out if shared is None else out + visit(x, shared, gate)


def _together(
    x: Float[Array, "tokens model"],
    experts: Int[Array, "tokens top_k"],
    shares: Float[Array, "tokens top_k"],
    num_experts: int,
    plan: TPUPlan,
    serve: Callable[..., Array],
) -> Float[Array, "tokens model"]:
    """A tile for each touched expert, whose rows are all tokens."""
    tokens = x.shape[0]
    lanes = -(-num_experts // 128) * 128
    chosen = experts[:, :, None] == jnp.arange(lanes, dtype=jnp.int32)
    table = jnp.where(chosen, shares[:, :, None], 0).sum(axis=1)
    padding = ((0, plan.rows - tokens), (0, 0))
    tiles = touched_experts(experts, num_experts)
    out = serve(jnp.pad(x, padding), tiles, jnp.pad(table, padding))
    return out.reshape(plan.parts, plan.rows, -1).sum(axis=0)[:tokens]


def _gathered(
    x: Float[Array, "tokens model"],
    experts: Int[Array, "tokens top_k"],
    shares: Float[Array, "tokens top_k"],
    num_experts: int,
    plan: TPUPlan,
    serve: Callable[..., Array],
) -> Float[Array, "tokens model"]:
    """Each expert's tokens in tiles of their own; a token's results are then found and added."""
    tiles, places = tiles_of_own_tokens(experts, num_experts, plan.rows)
    out = serve(x[places.token], tiles, None)
    mine, shares = known(experts, num_experts).T[:, :, None], shares.T[:, :, None]
    # Elsewhere `out` holds anything, so that it is left out rather than multiplied by zero.
    each = jnp.where(mine, out[places.place.T].astype(jnp.float32), 0)
    return (shares * each).sum(axis=0)
