"""The ALiBi slopes of the query heads that live on this shard."""

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from jaxgen_checkpoints.heads import HeadLayout
from jaxgen_models.alibi_config import AlibiConfig
from jaxgen_models.layers.collective import TENSOR_AXIS


def local_slopes(alibi: AlibiConfig) -> Float[Array, " heads"]:
    """float32, in the order in which HeadLayout deals the heads; empty places get slope zero.

    To be called inside the step's shard_map: it asks for the shard it is on.
    """
    shards = jax.lax.axis_size(TENSOR_AXIS)
    order = HeadLayout(len(alibi.slopes), alibi.kv_heads, shards).query_rows()
    slopes = np.append(np.asarray(alibi.slopes, np.float32), np.float32(0))  # -1 takes the zero
    return jnp.asarray(slopes[order].reshape(shards, -1))[jax.lax.axis_index(TENSOR_AXIS)]
