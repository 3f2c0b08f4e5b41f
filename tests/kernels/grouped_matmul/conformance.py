"""What grouped products must do, as cases that every implementation runs against float64."""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.grouped_matmul import grouped_matmul


@dataclass(frozen=True)
class Case:
    """sizes: rows of each group; padding: rows that belong to none."""

    sizes: tuple[int, ...]
    padding: int = 0
    outputs: int = 24
    inputs: int = 16


CASES = {
    "one_row": Case((0, 1, 0)),
    "one_group": Case((13,)),
    "nothing_live": Case((0, 0, 0), padding=5),
    "decode": Case((1, 0, 2, 1, 0, 0, 3, 1), padding=2),
    "skewed": Case((0, 97, 0, 1, 30), padding=7),
    "even": Case((32, 32, 32, 32)),
    "many_groups": Case((1,) * 60 + (0,) * 60, padding=3),
    "odd_sizes": Case((5, 3, 11), outputs=7, inputs=33),
    "aligned": Case((64, 3, 0, 130), padding=1, outputs=256, inputs=128),
}


def assert_conforms(
    case: Case, implementation: str, dtype: Any = np.float32, tolerance: float = 1e-5
) -> None:
    """Right products, and zeros for rows of no group, which hold NaN."""
    rng = np.random.default_rng(0)
    live = sum(case.sizes)
    x = rng.standard_normal((live + case.padding, case.inputs)).astype(dtype)
    weight = rng.standard_normal((len(case.sizes), case.outputs, case.inputs)).astype(dtype)
    x[live:] = np.nan
    weight[[size == 0 for size in case.sizes]] = 1e30  # finite: the oracle multiplies it by zeros
    group = np.repeat(np.arange(len(case.sizes)), case.sizes)
    wide, mine = x[:live].astype(np.float64), weight[group].astype(np.float64)
    want = np.einsum("ri,roi->ro", wide, mine)
    run = jax.jit(grouped_matmul, static_argnames="implementation")
    got = run(x, weight, jnp.asarray(case.sizes, jnp.int32), implementation=implementation)
    assert got.dtype == dtype
    got = np.asarray(got).astype(np.float64)
    assert not got[live:].any()
    np.testing.assert_allclose(got[:live], want, rtol=tolerance, atol=tolerance * 10)
