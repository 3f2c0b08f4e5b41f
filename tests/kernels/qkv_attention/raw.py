"""Raw QKV products for the cases of ragged attention, whose oracle then sees the turned heads."""

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.rope_write import HeadNorms, Rotation
from pallas_kernels.rope_write.reference import heads_of
from tests.kernels.ragged_attention.conformance import Case, Inputs


def raw_product(
    case: Case, inputs: Inputs, *, half: int, norms: bool, interleaved: bool = False
) -> tuple[Any, Rotation | None, HeadNorms | None, Inputs]:
    """The product of these inputs, how its heads turn, and the inputs of attention behind that."""
    tokens = inputs.q.shape[0]
    rng = np.random.default_rng(5)
    queries = np.asarray(inputs.q).reshape(tokens, case.kv_heads, -1, case.head_dim)
    new = (np.asarray(each)[:, :, None] for each in (inputs.k_new, inputs.v_new))
    qkv = jnp.asarray(np.concatenate([queries, *new], axis=2))
    rotation, head_norms = None, None
    if half:
        angle = rng.uniform(0, 6, (tokens, half)).astype(np.float32)
        rotation = Rotation(*map(jnp.asarray, (np.cos(angle), np.sin(angle))), interleaved)
    if norms:
        weights = (rng.uniform(-0.5, 0.5, case.head_dim).astype(np.float32) for _ in range(2))
        weights = [jnp.asarray(each.astype(qkv.dtype)) for each in weights]
        head_norms = HeadNorms(*weights, eps=1e-6, offset=1.0)
    q, k, _ = jax.jit(heads_of)(qkv, rotation, head_norms)
    starts, keys = np.asarray(inputs.rows.starts), np.asarray(k)
    for row, (query, kv) in enumerate(case.lengths):
        inputs.context[row][0][kv - query :] = keys[starts[row] : starts[row] + query]
    return qkv, rotation, head_norms, replace(inputs, q=q, k_new=k)
