"""The experts' blocks on Hopper GPUs with Mosaic GPU: tiles, two products, and the shares' sum."""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.expert_mlp import gpu_stream, gpu_wide
from pallas_kernels.expert_mlp.checks import ExpertsProblem, Gate
from pallas_kernels.expert_mlp.gpu_tiles import Tiles, tiles_of_all_tokens, tiles_of_sorted_tokens
from pallas_kernels.expert_mlp.shared import SharedExpert, visit

_SHARED_MEMORY = 227 * 1024
_SMS = 132  # of an H100 or H200; fewer work too, in more than one wave
_FEW_TOKENS = 16
"""Up to here each expert's tile holds all tokens: that costs less than to gather its own."""


@dataclass(frozen=True, slots=True)
class ExpertsPlan:
    """columns: rows of activations of a tile; gather: tiles hold only their expert's tokens.

    sms: blocks of threads. slots: steps in flight, None for as many as fit.
    """

    columns: int
    gather: bool
    sms: int = _SMS
    slots: int | None = None


def plan_for(problem: ExpertsProblem) -> ExpertsPlan:
    """Tiles about as high as the experts' shares of the tokens are likely to be."""
    if problem.tokens <= _FEW_TOKENS:
        return ExpertsPlan(columns=-(-problem.tokens // 8) * 8, gather=False)
    average = problem.tokens * problem.top_k / problem.experts
    for columns in (8, 16, 32, 64):
        if average <= 0.8 * columns:
            return ExpertsPlan(columns=columns, gather=True)
    return ExpertsPlan(columns=gpu_wide.ROWS, gather=True)


def unsupported(problem: ExpertsProblem) -> str | None:
    """Why the Hopper kernels cannot serve this problem; None if they can."""
    if jax.default_backend() == "gpu":
        capability = jax.local_devices()[0].compute_capability
        if capability != "9.0":
            return f"they are written for compute capability 9.0, this device has {capability}"
    if problem.dtype not in (jnp.bfloat16, jnp.float16) or problem.weight_dtype != problem.dtype:
        return "activations and weights must both be bfloat16 or both be float16"
    if problem.model % 64 or problem.ffn % 64:
        return "the model's and the experts' widths must be multiples of 64"
    one = jax.ShapeDtypeStruct((), jnp.float32)
    if "erf" in str(jax.make_jaxpr(problem.gate)(one, one)):
        return "the gate needs the error function"
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
    interpret: Any = None,
    plan: ExpertsPlan | None = None,
) -> Float[Array, "tokens model"]:
    """As expert_mlp. interpret: parameters of Mosaic GPU's interpreter, for tests."""
    local, _, ffn, model = gate_up.shape
    tokens, top_k = experts.shape
    if plan is None:
        problem = ExpertsProblem(tokens, top_k, local, model, ffn, x.dtype, gate_up.dtype, gate)
        plan = plan_for(problem)
    wide = plan.columns == gpu_wide.ROWS
    apart = None
    if shared is not None and (wide or bias is not None or shared.down.shape[1] % ffn):
        apart, shared = visit(x, shared, gate), None
    if shared is not None:
        experts, shares = _with_shared(experts, shares, shared, local, ffn)
        local += shared.down.shape[1] // ffn
    tiles, rows = _tiles(x, experts, local, plan)
    if wide:
        each = gpu_wide.WidePlan(plan.sms, plan.slots or 4)
        hidden = gpu_wide.gated_product(
            rows, gate_up, bias, tiles, gate=gate, plan=each, interpret=interpret
        )
        out = gpu_wide.product(hidden, down, tiles, plan=each, interpret=interpret)
    else:
        parts = (None, None) if shared is None else (shared.gate_up, shared.down)
        up, back = (_stream_plan(plan, inputs) for inputs in (model, ffn))
        hidden = gpu_stream.gated_product(
            rows, gate_up, parts[0], bias, tiles, gate=gate, plan=up, interpret=interpret
        )
        out = gpu_stream.product(hidden, down, parts[1], tiles, plan=back, interpret=interpret)
    # Elsewhere `out` holds anything, so that it is left out rather than multiplied by zero.
    weighted = shares[:, :, None] * out[tiles.place].astype(jnp.float32)
    summed = jnp.where(tiles.mine[:, :, None], weighted, 0).sum(axis=1)
    if apart is not None:
        summed = summed + apart.astype(jnp.float32)
    return summed.astype(x.dtype)


def _with_shared(
    experts: Int[Array, "tokens top_k"],
    shares: Float[Array, "tokens top_k"],
    shared: SharedExpert,
    num_experts: int,
    ffn: int,
) -> tuple[Int[Array, "tokens choices"], Float[Array, "tokens choices"]]:
    """The shared expert cut into parts as wide as an expert, which every token chooses too."""
    parts = shared.down.shape[1] // ffn
    shape = (experts.shape[0], parts)
    known = (experts >= 0) & (experts < num_experts)
    numbers = jnp.broadcast_to(num_experts + jnp.arange(parts, dtype=jnp.int32), shape)
    share = jnp.ones(shape, shares.dtype)
    if shared.share is not None:
        share = jnp.broadcast_to(shared.share[:, None], shape)
    return (
        jnp.concatenate([jnp.where(known, experts, -1), numbers], axis=1),
        jnp.concatenate([shares, share], axis=1),
    )


def _tiles(
    x: Float[Array, "tokens model"],
    experts: Int[Array, "tokens top_k"],
    num_experts: int,
    plan: ExpertsPlan,
) -> tuple[Tiles, Float[Array, "rows model"]]:
    """The work list, and the rows of activations that it speaks of."""
    if plan.gather:
        tiles = tiles_of_sorted_tokens(experts, num_experts, plan.columns)
        return tiles, x[tiles.token]
    tiles = tiles_of_all_tokens(experts, num_experts, plan.columns)
    return tiles, jnp.pad(x, ((0, plan.columns - x.shape[0]), (0, 0)))


def _stream_plan(plan: ExpertsPlan, inputs: int) -> gpu_stream.StreamPlan:
    found = gpu_stream.stream_plan(plan.columns, inputs, plan.sms, _SHARED_MEMORY)
    if plan.slots is None:
        return found
    return gpu_stream.StreamPlan(found.sms, found.columns, found.depth, plan.slots)
