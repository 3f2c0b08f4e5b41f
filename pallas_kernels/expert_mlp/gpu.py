"""The experts' blocks on Hopper GPUs with Mosaic GPU: tiles, two products, and the shares' sum."""

import math
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.expert_mlp import gpu_stream, gpu_wide
from pallas_kernels.expert_mlp.checks import ExpertsProblem, Gate
from pallas_kernels.expert_mlp.gpu_sort import sort_rows, sorts
from pallas_kernels.expert_mlp.gpu_stream_items import StreamPlan
from pallas_kernels.expert_mlp.gpu_tiles import (
    Tiles,
    tiles_of_all_tokens,
    tiles_of_one_token,
    tiles_of_sorted_tokens,
)
from pallas_kernels.expert_mlp.shared import SharedExpert, visit
from pallas_kernels.hopper import SMS, multiprocessors, wrong_device

_SHARED_MEMORY = 227 * 1024
_HIGH = 128  # rows of activations that one product takes where an expert has many
_FEW_TOKENS = 64
"""Up to here each expert's tile holds all tokens: that costs less than to gather its own."""


@dataclass(frozen=True, slots=True)
class ExpertsPlan:
    """columns: rows of activations of a tile; gather: tiles hold only their expert's tokens.

    together: tiles of one expert that are multiplied at once, at most. sms: blocks of threads.
    depth: elements of a weight row that a step takes, slots: steps in flight; None for the most
    that fit. chained: see StreamPlan.
    """

    columns: int
    gather: bool
    together: int = 1
    sms: int = SMS
    depth: int | None = None
    slots: int | None = None
    chained: bool = True


def plan_for(problem: ExpertsProblem) -> ExpertsPlan:
    """Tiles about as high as the experts' shares of the tokens are likely to be."""
    sms = min(SMS, multiprocessors())  # blocks of threads that wait for each other's results
    if problem.tokens <= _FEW_TOKENS:
        return ExpertsPlan(columns=-(-problem.tokens // 8) * 8, gather=False, sms=sms)
    for columns in (8, 16, 32, 64):
        if problem.visits <= 0.8 * columns:
            return ExpertsPlan(columns, gather=True, together=_HIGH // columns, sms=sms)
    return ExpertsPlan(columns=gpu_wide.ROWS, gather=True, sms=sms)


def unsupported(problem: ExpertsProblem) -> str | None:
    """Why the Hopper kernels cannot serve this problem; None if they can."""
    wrong = wrong_device()
    if wrong is not None:
        return wrong
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
    top_k: int | None = None,
    spread: int = 1,
    interpret: Any = None,
    plan: ExpertsPlan | None = None,
) -> Float[Array, "tokens model"]:
    """As expert_mlp. interpret: parameters of Mosaic GPU's interpreter, for tests."""
    local, _, ffn, model = gate_up.shape
    tokens, top_k = experts.shape[0], top_k or experts.shape[1]
    listed, experts, shares = experts, experts[:, :top_k], shares[:, :top_k]
    if plan is None:
        sizes = tokens, top_k, local, model, ffn
        plan = plan_for(ExpertsProblem(*sizes, x.dtype, gate_up.dtype, gate, spread))
    wide = plan.columns == gpu_wide.ROWS
    apart = None
    if shared is not None and (wide or bias is not None or shared.down.shape[1] % ffn):
        apart, shared = visit(x, shared, gate), None
    if shared is not None:
        experts, shares = _with_shared(experts, shares, shared, local, ffn)
        local += shared.down.shape[1] // ffn
    if wide and interpret is None and sorts(tokens, local, top_k, plan.sms):
        rows, tiles = sort_rows(x, experts, num_experts=local, columns=plan.columns, sms=plan.sms)
    else:
        tiles = _tiles(experts, local, plan)
        rows = _rows(x, tiles, plan, interpret)
    in_list = None
    if tokens == 1 and not plan.gather:
        # The list is the router's as it is: to put another one together takes a kernel.
        in_list, tiles = top_k, tiles._replace(expert=listed[0])
    if wide:
        each = gpu_wide.WidePlan(plan.sms, plan.slots or 4)
        hidden = gpu_wide.gated_product(
            rows, gate_up, bias, tiles, gate=gate, plan=each, interpret=interpret
        )
        out = gpu_wide.product(hidden, down, tiles, plan=each, interpret=interpret)
    else:
        out = gpu_stream.few_rows(
            rows,
            gate_up,
            down,
            tiles,
            gate=gate,
            plan=_stream_plan(plan, math.gcd(model, ffn), chained=interpret is None),
            bias=bias,
            shared=shared,
            listed=in_list,
            interpret=interpret,
        )
    summed = _sum(out, shares, tiles)
    if apart is not None:
        summed = summed + apart.astype(jnp.float32)
    return summed.astype(x.dtype)


def _sum(
    out: Float[Array, "places model"], shares: Float[Array, "tokens choices"], tiles: Tiles
) -> Float[Array, "tokens model"]:
    """Each token's share of each of its places, in float32."""
    place, mine = tiles.place, tiles.mine
    if tiles.token is not None:  # or XLA finds each place anew for every element of the sum
        place, mine, shares = jax.lax.optimization_barrier((place, mine, shares))
    # Elsewhere `out` holds anything, so that it is left out rather than multiplied by zero.
    weighted = shares[:, :, None] * out[place].astype(jnp.float32)
    return jnp.where(mine[:, :, None], weighted, 0).sum(axis=1)


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


def _tiles(experts: Int[Array, "tokens choices"], num_experts: int, plan: ExpertsPlan) -> Tiles:
    if plan.gather:
        return tiles_of_sorted_tokens(experts, num_experts, plan.columns, plan.together)
    if experts.shape[0] == 1:
        return tiles_of_one_token(experts, num_experts, plan.columns)
    return tiles_of_all_tokens(experts, num_experts, plan.columns)


def _rows(
    x: Float[Array, "tokens model"], tiles: Tiles, plan: ExpertsPlan, interpret: Any
) -> Float[Array, "rows model"]:
    """The rows of activations that the first product reads."""
    if tiles.token is not None:
        return x[tiles.token]
    missing = plan.columns - x.shape[0]
    if missing and x.shape[0] < 8 and interpret is None:
        return x  # the copy engine fills the rest of the one box of 8 rows with zeros
    return jnp.pad(x, ((0, missing), (0, 0)))


def _stream_plan(plan: ExpertsPlan, inputs: int, *, chained: bool) -> StreamPlan:
    """inputs: what a step's depth must divide. The interpreter has no counters in memory."""
    high = plan.columns * plan.together
    depth = plan.depth or (128 if inputs % 128 == 0 else 64)
    slots = plan.slots or gpu_stream.slots(high, depth, _SHARED_MEMORY)
    chained = chained and plan.chained
    return StreamPlan(plan.sms, plan.columns, high, depth, slots, chained)
