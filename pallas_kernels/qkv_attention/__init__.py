"""Everything between the QKV product and the output product: heads turned, written, attended."""

from jaxtyping import Array, Float

from pallas_kernels.dispatch import Operation
from pallas_kernels.pages import KVPages, RaggedRows
from pallas_kernels.qkv_attention.checks import QKVProblem, check
from pallas_kernels.rope_write.heads import HeadNorms, Rotation

# Under the name of the operation that it contains: who chooses that one's implementation, means
# this one's too.
_OPERATION = Operation(
    name="ragged_attention",
    modules={
        "reference": "pallas_kernels.qkv_attention.reference",
        "portable": "pallas_kernels.qkv_attention.portable",
        "gpu": "pallas_kernels.qkv_attention.gpu",
    },
    kernels={"cuda": ("gpu",)},
    fallback="portable",
)


def qkv_attention(
    qkv: Float[Array, "tokens kv_heads places head"],
    pages: KVPages,
    rows: RaggedRows,
    *,
    scale: float,
    rotation: Rotation | None = None,
    norms: HeadNorms | None = None,
    window: int | None = None,
    soft_cap: float | None = None,
    sinks: Float[Array, " heads"] | None = None,
    alibi: Float[Array, "heads ..."] | None = None,
    implementation: str | None = None,
) -> tuple[Float[Array, "tokens heads head"], KVPages]:
    """ragged_attention of the heads that rope_write makes of qkv. One layer, one shard.

    The arguments are theirs, and so are the errors.
    """
    options = {"window": window, "soft_cap": soft_cap, "sinks": sinks, "alibi": alibi}
    problem = check(qkv, pages, rows, rotation=rotation, norms=norms, **options)
    chosen = _OPERATION.choose(problem, implementation)
    return chosen.run(qkv, pages, rows, rotation=rotation, norms=norms, scale=scale, **options)


def has_kernel(
    qkv: Float[Array, "tokens kv_heads places head"],
    pages: KVPages,
    rows: RaggedRows,
    *,
    rotation: Rotation | None = None,
    norms: HeadNorms | None = None,
    window: int | None = None,
    soft_cap: float | None = None,
    sinks: Float[Array, " heads"] | None = None,
    alibi: Float[Array, "heads ..."] | None = None,
) -> bool:
    """Whether qkv_attention would run a kernel: where not, a model turns its heads its own way."""
    options = {"window": window, "soft_cap": soft_cap, "sinks": sinks, "alibi": alibi}
    problem = check(qkv, pages, rows, rotation=rotation, norms=norms, **options)
    return _OPERATION.has_kernel(problem)


__all__ = ["HeadNorms", "QKVProblem", "Rotation", "has_kernel", "qkv_attention"]
