"""A step traced and lowered from shapes alone: nothing is allocated, nothing runs.

The runner warms up with it; the planner compiles with it for machines that are not there.
"""

from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec
from jax.stages import Lowered

from jaxgen import sampling
from jaxgen.engine.model import Model
from jaxgen.engine.pages import abstract_pages
from jaxgen.engine.step import sampling_step
from jaxgen.ragged.batch import packed_size
from jaxgen.ragged.buckets import Bucket
from jaxgen.sampling import Demand


def step_arguments(
    model: Model,
    bucket: Bucket,
    *,
    num_blocks: tuple[int, ...],
    block_size: int,
    num_slots: int,
    samples: bool,
) -> list[Any]:
    """Shapes, with shardings, of what a step takes: leaves, pages, packed metadata.

    samples: between pages and metadata the sampler's state, which steps that sample take.
    """
    replicated = NamedSharding(model.mesh, PartitionSpec())
    vocab = model.config.vocab_size
    size = packed_size(bucket, len(num_blocks))
    return [
        model.leaves,
        abstract_pages(model, num_blocks, block_size),
        *([sampling.abstract_state(num_slots, vocab, replicated)] if samples else []),
        jax.ShapeDtypeStruct((size,), np.int32, sharding=replicated),
    ]


def lower_sampling_step(
    model: Model,
    bucket: Bucket,
    demand: Demand,
    *,
    num_blocks: tuple[int, ...],
    block_size: int,
    num_slots: int,
) -> Lowered:
    """The lowering of a step that samples, for arguments of these sizes on the model's mesh."""
    arguments = step_arguments(
        model,
        bucket,
        num_blocks=num_blocks,
        block_size=block_size,
        num_slots=num_slots,
        samples=True,
    )
    return sampling_step(model, bucket, demand).lower(*arguments)
