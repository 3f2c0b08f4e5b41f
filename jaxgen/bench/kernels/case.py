"""One operation at one shape: compiled, compared with its reference, and timed."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from jaxgen.bench.kernels.timing import median_call_seconds
from jaxgen.engine.cost import Ceilings
from pallas_kernels.lowering import lower

WORST_ERROR = 1e-2
"""Relative error of the norm that bfloat16 may have against float32."""

type Inputs = tuple[list[Any], Any]
"""What each call of a chain is given, and what the first one gets to write on and hands on."""


@dataclass(frozen=True, slots=True)
class Case:
    """operation(given, carried, implementation) -> (outputs, carried).

    checked, timed: make the inputs from a random key, under jit. parts: what one call does so many
    of; times, bytes_read and flops are of one.
    """

    kernel: str
    name: str
    operation: Callable[[Any, Any, str | None], tuple[Any, Any]]
    checked: Callable[[jax.Array], Inputs]
    timed: Callable[[jax.Array], Inputs]
    bytes_read: float
    flops: float
    parts: int = 1


@dataclass(frozen=True, slots=True)
class Measured:
    """seconds: of one part. error: relative, of the norm; the largest of the outputs'."""

    case: Case
    error: float
    seconds: float

    @property
    def ok(self) -> bool:
        """Whether the reference says the same. NaN is not the same."""
        return self.error < WORST_ERROR

    def roofline(self, ceilings: Ceilings) -> float:
        """Seconds that no kernel could do with less."""
        needed = self.case.bytes_read / ceilings.bandwidth, self.case.flops / ceilings.matrix_rate
        return max(needed)


class Compiled:
    """A case's programs; compiling needs no arrays, so that many can be compiled at once."""

    def __init__(self, case: Case) -> None:
        self.case = case
        key = jax.eval_shape(lambda: _key(0))
        given, carried = jax.eval_shape(case.timed, key)
        self._calls = len(given) * case.parts
        self._check = lower(jax.jit(self._error), key).compile()
        self._make = lower(jax.jit(case.timed), key).compile()
        self._chain = lower(jax.jit(self._run, donate_argnums=1), given, carried).compile()

    def measure(self, seed: int) -> Measured:
        """Checks, then times; whatever it needed on the device is free again afterwards."""
        key = _key(seed)
        error = float(self._check(key))
        given, carried = self._make(key)

        def run() -> Any:  # noqa: ANN401
            nonlocal carried
            outputs, carried = self._chain(given, carried)
            return outputs

        return Measured(self.case, error, median_call_seconds(run, self._calls))

    def _run(self, given: list[Any], carried: Any) -> tuple[list[Any], Any]:  # noqa: ANN401
        outputs = []
        for each in given:
            output, carried = self.case.operation(each, carried, None)
            outputs.append(output)
        return outputs, carried

    def _error(self, key: jax.Array) -> jax.Array:
        (given, *_), carried = self.case.checked(key)
        got, _ = self.case.operation(given, carried, None)
        given, carried = jax.tree.map(_wide, (given, carried))
        want, _ = self.case.operation(given, carried, "reference")
        errors = [
            jnp.linalg.norm((g.astype(jnp.float32) - w).ravel()) / jnp.linalg.norm(w.ravel())
            for g, w in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True)
        ]
        return jnp.max(jnp.stack(errors))


def _key(seed: int) -> jax.Array:
    """Of the generator whose programs compile fastest."""
    return jax.random.key(seed, impl="rbg")


def _wide(leaf: jax.Array) -> jax.Array:
    return leaf.astype(jnp.float32) if jnp.issubdtype(leaf.dtype, jnp.floating) else leaf
