"""Everything between the QKV product and attention: head norms, rotation, KV write, in one pass."""

from jaxtyping import Array, Float

from pallas_kernels.dispatch import Operation
from pallas_kernels.pages import KVPages, RaggedRows
from pallas_kernels.rope_write.checks import TurnProblem, check
from pallas_kernels.rope_write.heads import HeadNorms, Rotation

_OPERATION = Operation(
    name="rope_write",
    modules={
        "reference": "pallas_kernels.rope_write.reference",
        "gpu": "pallas_kernels.rope_write.gpu",
    },
    kernels={"cuda": ("gpu",)},
    fallback="reference",
)


def rope_write(
    qkv: Float[Array, "tokens kv_heads places head"],
    pages: KVPages,
    rows: RaggedRows,
    *,
    rotation: Rotation | None = None,
    norms: HeadNorms | None = None,
    implementation: str | None = None,
) -> tuple[Float[Array, "tokens heads head"], KVPages]:
    """Queries ready for attention, and the pages with the step's keys and values in place.

    qkv: for each KV head `group` query heads, then its key head, then its value head. Queries and
    keys are normalised, then turned, in float32; values are written as they are. The pages are
    updated in place if the caller donates them; padding tokens touch none, and their queries are
    of no meaning.

    implementation: "reference" or a kernel's name; None chooses by platform. Raises ValueError for
    shapes that do not fit together, UnsupportedShape for a named implementation that cannot serve.
    """
    problem = check(qkv, pages, rotation, norms)
    chosen = _OPERATION.choose(problem, implementation)
    return chosen.run(qkv, pages, rows, rotation=rotation, norms=norms)


__all__ = ["HeadNorms", "Rotation", "TurnProblem", "rope_write"]
