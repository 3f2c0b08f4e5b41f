"""A step traced and lowered from shapes alone: nothing is allocated, nothing runs.

The runner warms up with it; the planner compiles with it for machines that are not there.
"""

from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec
from jax.stages import Lowered
from jax.typing import DTypeLike

from jaxgen import sampling
from jaxgen.engine.model import Model
from jaxgen.engine.pages import abstract_pages
from jaxgen.engine.step import Drawing, draw_step, forward_step
from jaxgen.ragged.batch import packed_size
from jaxgen.ragged.buckets import Bucket
from jaxgen.sampling import Demand


def forward_arguments(
    model: Model,
    bucket: Bucket,
    *,
    num_blocks: tuple[int, ...],
    block_size: int,
    num_slots: int,
    scored: bool = False,
) -> tuple[Any, ...]:
    """Shapes, with shardings, of what a forward takes: leaves, pages, last tokens, metadata.

    scored: and the tokens whose log-probabilities are wanted.
    """
    size = packed_size(bucket, len(num_blocks))
    return (
        model.leaves,
        abstract_pages(model, num_blocks, block_size),
        _everywhere(model, (num_slots,), np.int32),
        _everywhere(model, (size,), np.int32),
        *([_everywhere(model, (bucket.tokens,), np.int32)] if scored else []),
    )


def draw_arguments(model: Model, rows: int, *, num_slots: int) -> tuple[Any, ...]:
    """The same of what a draw takes: the sampler's state, and a forward's logits."""
    replicated = NamedSharding(model.mesh, PartitionSpec())
    shards = model.tensor_shards
    vocab = int(model.config.vocab_size)
    drawing = Drawing(
        _everywhere(model, (rows, -(-vocab // shards) * shards), np.float32),
        _everywhere(model, (rows,), np.int32),
        _everywhere(model, (rows,), np.bool_),
    )
    return sampling.abstract_state(num_slots, vocab, replicated), drawing


def lower_forward(
    model: Model,
    bucket: Bucket,
    *,
    num_blocks: tuple[int, ...],
    block_size: int,
    num_slots: int,
) -> Lowered:
    """The lowering of a forward, for arguments of these sizes on the model's mesh."""
    arguments = forward_arguments(
        model, bucket, num_blocks=num_blocks, block_size=block_size, num_slots=num_slots
    )
    return forward_step(model, bucket).lower(*arguments)


def lower_draw(model: Model, rows: int, demand: Demand, *, num_slots: int) -> Lowered:
    """The lowering of the draw that follows it."""
    return draw_step(model, demand).lower(*draw_arguments(model, rows, num_slots=num_slots))


def _everywhere(model: Model, shape: tuple[int, ...], dtype: DTypeLike) -> Any:  # noqa: ANN401
    """Stands for an array that every device holds whole."""
    sharding = NamedSharding(model.mesh, PartitionSpec())
    return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)
