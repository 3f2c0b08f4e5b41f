"""How a sampling parameter is refused: by its name."""

from collections.abc import Mapping

from jaxgen_checkpoints.errors import RefusedInput


class InvalidParameter(RefusedInput):
    """A sampling parameter is outside its range, or not supported; `param` is its name."""

    def __init__(self, param: str, message: str) -> None:
        super().__init__(f"{param} {message}")
        self.param = param

    def under(self, names: Mapping[str, str]) -> "InvalidParameter":
        """The same by the name that the asker knows the parameter by, if that is another."""
        message = str(self).removeprefix(f"{self.param} ")
        return InvalidParameter(names.get(self.param, self.param), message)
