"""A step traced and lowered from shapes alone: nothing is allocated, nothing runs.

The runner warms up with it; the planner compiles with it for machines that are not there.
"""

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec
from jax.stages import Lowered, Wrapped

from jaxgen import sampling
from jaxgen.engine.model import Model
from jaxgen.engine.pages import abstract_pages
from jaxgen.engine.step import sampling_step
from jaxgen.ragged.batch import packed_size
from jaxgen.ragged.buckets import Bucket
from jaxgen.sampling import Demand


def lower_sampling_step(
    model: Model,
    bucket: Bucket,
    demand: Demand,
    *,
    num_blocks: tuple[int, ...],
    block_size: int,
    num_slots: int,
) -> tuple[Wrapped, Lowered]:
    """The jitted step and its lowering, for arguments of these sizes on the model's mesh."""
    replicated = NamedSharding(model.mesh, PartitionSpec())
    jitted = sampling_step(model, bucket, demand)
    lowered = jitted.lower(
        model.leaves,
        abstract_pages(model, num_blocks, block_size),
        sampling.abstract_state(num_slots, model.config.vocab_size, replicated),
        jax.ShapeDtypeStruct(
            (packed_size(bucket, len(num_blocks)),), np.int32, sharding=replicated
        ),
    )
    return jitted, lowered
