"""Attention from the raw QKV product as it is meant: heads in plain JAX, then the reference."""

from typing import Any

from jaxtyping import Array, Float

from pallas_kernels.pages import KVPages, RaggedRows
from pallas_kernels.ragged_attention import reference
from pallas_kernels.rope_write.heads import HeadNorms, Rotation
from pallas_kernels.rope_write.reference import heads_of


def unsupported(problem: Any) -> str | None:  # noqa: ANN401
    """Serves everything."""
    del problem
    return None


def run(
    qkv: Float[Array, "tokens kv_heads places head"],
    pages: KVPages,
    rows: RaggedRows,
    *,
    rotation: Rotation | None,
    norms: HeadNorms | None,
    **options: Any,  # noqa: ANN401
) -> tuple[Float[Array, "tokens heads head"], KVPages]:
    """As qkv_attention."""
    return reference.run(*heads_of(qkv, rotation, norms), pages, rows, **options)
