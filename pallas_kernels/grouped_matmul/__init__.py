"""Grouped products: each row of a matrix times the weight of the group that it belongs to."""

from jaxtyping import Array, Float, Int

from pallas_kernels.dispatch import Operation
from pallas_kernels.grouped_matmul.checks import GroupedProblem, check

_OPERATION = Operation(
    name="grouped_matmul",
    modules={
        "reference": "pallas_kernels.grouped_matmul.reference",
        "portable": "pallas_kernels.grouped_matmul.portable",
    },
    kernels={},
    fallback="portable",
)


def grouped_matmul(
    x: Float[Array, "rows in"],
    weight: Float[Array, "groups out in"],
    group_sizes: Int[Array, " groups"],
    *,
    implementation: str | None = None,
) -> Float[Array, "rows out"]:
    """x[i] @ weight[g].T for every row i of group g, in x's dtype, accumulated in float32.

    Rows are sorted by group: the first group_sizes[0] rows belong to group 0, the next
    group_sizes[1] to group 1, and so on. What rows past their sum hold is not looked at, not even
    NaN; their results are zeros. Weights of empty groups are not read by the kernels.

    implementation: "reference", "portable" or a kernel's name; None chooses by platform. Raises
    ValueError for shapes that do not fit together, UnsupportedShape for a named implementation that
    cannot serve them.
    """
    problem = check(x, weight, group_sizes)
    return _OPERATION.choose(problem, implementation).run(x, weight, group_sizes)


__all__ = ["GroupedProblem", "grouped_matmul"]
