"""What a step's programs take, as shapes: they can be lowered with nothing allocated, nothing run.

The runner warms up so; the planner compiles so for machines that are not there.
"""

from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec
from jax.typing import DTypeLike

from jaxgen import sampling
from jaxgen.engine.model import Model
from jaxgen.engine.pages import abstract_pages
from jaxgen.engine.step import Drawing
from jaxgen.ragged.batch import packed_size
from jaxgen.ragged.buckets import Bucket, Buckets


def forward_arguments(
    model: Model,
    bucket: Bucket,
    *,
    num_blocks: tuple[int, ...],
    block_size: int,
    num_slots: int,
    drawn: bool = True,
    scored: bool = False,
) -> tuple[Any, ...]:
    """Shapes, with shardings, of what a forward takes: leaves, pages, spent logits, last tokens,
    metadata.

    drawn: it gives logits to draw from. scored: and the tokens whose log-probabilities are wanted.
    """
    size = packed_size(bucket, len(num_blocks))
    return (
        model.leaves,
        abstract_pages(model, num_blocks, block_size),
        abstract_logits(model, bucket.rows) if drawn else (),
        _everywhere(model, (num_slots,), np.int32),
        _everywhere(model, (size,), np.int32),
        *([_everywhere(model, (bucket.tokens,), np.int32)] if scored else []),
    )


def draw_arguments(model: Model, rows: int, *, num_slots: int) -> tuple[Any, ...]:
    """The same of what a draw takes: the sampler's state, and a forward's logits."""
    replicated = NamedSharding(model.mesh, PartitionSpec())
    vocab = int(model.config.vocab_size)
    drawing = Drawing(
        abstract_logits(model, rows),
        _everywhere(model, (rows,), np.int32),
        _everywhere(model, (rows,), np.bool_),
    )
    return sampling.abstract_state(num_slots, vocab, replicated), drawing


def abstract_logits(model: Model, rows: int) -> Any:  # noqa: ANN401
    """float32 [rows, padded vocab]."""
    shards = model.tensor_shards
    vocab = -(-int(model.config.vocab_size) // shards) * shards
    return _everywhere(model, (rows, vocab), np.float32)


def kept_logits_bytes(model: Model, buckets: Buckets) -> int:
    """On each device, of the logits that stay: the last of each number of rows."""
    kept = [abstract_logits(model, rows) for rows in {bucket.rows for bucket in buckets}]
    return sum(logits.size * logits.dtype.itemsize for logits in kept)


def _everywhere(model: Model, shape: tuple[int, ...], dtype: DTypeLike) -> Any:  # noqa: ANN401
    """Stands for an array that every device holds whole."""
    sharding = NamedSharding(model.mesh, PartitionSpec())
    return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)
