"""How a sampling parameter is refused: by its name."""

from jaxgen_checkpoints.errors import RefusedInput


class InvalidParameter(RefusedInput):
    """A sampling parameter is outside its range, or not supported; `param` is its name."""

    def __init__(self, param: str, message: str) -> None:
        super().__init__(f"{param} {message}")
        self.param = param
