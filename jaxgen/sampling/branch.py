"""A part of the step that not every batch needs: decided on the host, or by a device branch."""

from collections.abc import Callable

from jax import lax
from jaxtyping import Array, Bool


def when[T](
    known: bool | None,
    predicate: Bool[Array, ""],
    then: Callable[[], T],
    otherwise: Callable[[], T],
) -> T:
    """`then` or `otherwise`, as `known` says; by `predicate`, on the device, where it is None.

    `then` must be right for rows that do not need it.
    """
    if known is None:
        return lax.cond(predicate, then, otherwise)
    return then() if known else otherwise()
