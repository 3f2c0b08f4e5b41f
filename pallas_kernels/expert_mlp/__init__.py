"""The gated feed-forward blocks of routed experts: every token visits the experts it has chosen."""

from jaxtyping import Array, Float, Int

from pallas_kernels.dispatch import Operation
from pallas_kernels.expert_mlp.checks import ExpertsProblem, Gate, check
from pallas_kernels.expert_mlp.shared import SharedExpert

_OPERATION = Operation(
    name="expert_mlp",
    modules={
        "reference": "pallas_kernels.expert_mlp.reference",
        "portable": "pallas_kernels.expert_mlp.portable",
        "gpu": "pallas_kernels.expert_mlp.gpu",
        "tpu": "pallas_kernels.expert_mlp.tpu",
    },
    kernels={"cuda": ("gpu",), "tpu": ("tpu",)},
    fallback="portable",
)


def expert_mlp(
    x: Float[Array, "tokens model"],
    experts: Int[Array, "tokens top_k"],
    shares: Float[Array, "tokens top_k"],
    gate_up: Float[Array, "experts 2 ffn model"],
    down: Float[Array, "experts model ffn"],
    *,
    gate: Gate,
    bias: Float[Array, "experts 2 ffn"] | None = None,
    shared: SharedExpert | None = None,
    top_k: int | None = None,
    spread: int = 1,
    implementation: str | None = None,
) -> Float[Array, "tokens model"]:
    """The sum over a token's experts e of share * down[e] @ gate(gate_up[e, 0] @ x, ... 1] @ x).

    experts: numbers outside 0 .. experts - 1 mean no expert (padding, or an expert of another
    shard): they add nothing and no weight is read for them, whatever x and the share hold. The
    experts of a token must differ from each other. gate: elementwise and hashable, given the two
    products, to which bias is added. The sum is made in float32 and returned in x's dtype.
    shared: an expert without bias that every token visits, padding too; its output is added.
    top_k: columns of experts that mean anything, None for all. spread: of how many shards this is
    one that has as many experts; a hint, by which tiles are made about as high as there are rows.

    implementation: "reference", "portable" or a kernel's name; None chooses by platform. Raises
    ValueError for shapes that do not fit together, UnsupportedShape for a named implementation that
    cannot serve them.
    """
    problem = check(x, experts, shares, gate_up, down, bias, gate, spread)
    run = _OPERATION.choose(problem, implementation).run
    options = {"gate": gate, "bias": bias, "shared": shared, "top_k": top_k or experts.shape[1]}
    return run(x, experts, shares, gate_up, down, **options, spread=spread)


__all__ = ["ExpertsProblem", "Gate", "SharedExpert", "expert_mlp"]
