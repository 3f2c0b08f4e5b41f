"""The ALiBi slopes, or biases, of the query heads that live on this shard."""

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from jaxgen_checkpoints.heads import HeadLayout
from jaxgen_models.alibi_config import AlibiConfig
from jaxgen_models.layers.collective import TENSOR_AXIS


def local_alibi(alibi: AlibiConfig, positions: int) -> Float[Array, "heads ..."]:
    """float32 slopes [heads], or where biases are rounded their table [heads, positions].

    Heads are in the order in which HeadLayout deals them; empty places get slope zero. To be called
    inside the step's shard_map: it asks for the shard it is on.
    """
    shards = jax.lax.axis_size(TENSOR_AXIS)
    order = HeadLayout(len(alibi.slopes), alibi.kv_heads, shards).query_rows()
    slopes = np.append(np.asarray(alibi.slopes, np.float32), np.float32(0))  # -1 takes the zero
    local = jnp.asarray(slopes[order].reshape(shards, -1))[jax.lax.axis_index(TENSOR_AXIS)]
    if alibi.rounded_scale is None:
        return local
    # float32 arithmetic rounded by reduce_precision: a plain cast and back may be optimised away.
    steps = _bfloat16(jnp.arange(positions, dtype=jnp.float32))
    return _bfloat16(_bfloat16(local)[:, None] * steps) * alibi.rounded_scale


def _bfloat16(x: Float[Array, "..."]) -> Float[Array, "..."]:
    return jax.lax.reduce_precision(x, exponent_bits=8, mantissa_bits=7)
