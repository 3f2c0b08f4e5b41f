"""An int that remembers the config fields it follows from: a refused shape explains itself."""

import operator
from collections.abc import Callable, Sequence
from typing import Self

_SUM, _PRODUCT, _ATOM = 1, 2, 3


class Dim(int):
    """A size with its formula: `Dim(4, "num_attention_heads") * Dim(64, "head_dim")`.

    It is an int everywhere an int is wanted and prints as one. `+ - * //` with ints and other
    Dims keep the formula; every other operation gives a plain int.
    """

    formula: str
    _binding: int

    def __new__(cls, value: int, formula: str) -> Self:
        """Make a size that comes straight from the config field `formula`."""
        return cls._combined(int(value), formula, _ATOM)

    @classmethod
    def _combined(cls, value: int, formula: str, binding: int) -> Self:
        dim = super().__new__(cls, value)
        dim.formula = formula
        dim._binding = binding
        return dim

    def __reduce__(self) -> tuple[Callable[..., Self], tuple[int, str, int]]:
        return type(self)._combined, (int(self), self.formula, self._binding)

    def __add__(self, other: int) -> "Dim":
        return self._with("+", other, operator.add)

    def __radd__(self, other: int) -> "Dim":
        return self._with("+", other, operator.add, swap=True)

    def __sub__(self, other: int) -> "Dim":
        return self._with("-", other, operator.sub)

    def __rsub__(self, other: int) -> "Dim":
        return self._with("-", other, operator.sub, swap=True)

    def __mul__(self, other: int) -> "Dim":
        return self._with("*", other, operator.mul)

    def __rmul__(self, other: int) -> "Dim":
        return self._with("*", other, operator.mul, swap=True)

    def __floordiv__(self, other: int) -> "Dim":
        return self._with("//", other, operator.floordiv)

    def __rfloordiv__(self, other: int) -> "Dim":
        return self._with("//", other, operator.floordiv, swap=True)

    def _with(
        self, sign: str, other: int, operation: Callable[[int, int], int], *, swap: bool = False
    ) -> "Dim":
        if not isinstance(other, int):
            # Lists and tuples repeat, floats scale: their own methods know how.
            return NotImplemented
        left, right = (other, self) if swap else (self, other)
        binding = _SUM if sign in "+-" else _PRODUCT
        # `a - (b + c)` and `a // (b * c)` need their parentheses, `a + (b + c)` does not.
        needed_right = binding + 1 if sign in ("-", "//") else binding
        text = f"{_wrapped(left, binding)} {sign} {_wrapped(right, needed_right)}"
        return Dim._combined(operation(int(left), int(right)), text, binding)


def formula(size: int) -> str:
    """Return what `size` follows from: the formula of a Dim, the digits of a plain int."""
    return size.formula if isinstance(size, Dim) else str(int(size))


def explain_shape(shape: Sequence[int]) -> str:
    """Return `[8, 16] = [num_key_value_heads * head_dim, hidden_size]`; plain ints as numbers."""
    numbers = str([int(size) for size in shape])
    if not any(isinstance(size, Dim) for size in shape):
        return numbers
    return f"{numbers} = [{', '.join(formula(size) for size in shape)}]"


def _wrapped(size: int, needed: int) -> str:
    binding = size._binding if isinstance(size, Dim) else _ATOM
    return formula(size) if binding >= needed else f"({formula(size)})"
