"""The errors of this floor: what a user's input can cause, and what only a developer can.

`RefusedInput` and its children become one printed sentence and exit code 2; `MappingError` is a
mistake in code and keeps its traceback.
"""


class RefusedInput(ValueError):
    """A file, a config or an argument of the user is refused; the message says what to do."""


class CheckpointError(RefusedInput):
    """A checkpoint file, one of its tensors, or their mapping is not as it must be."""


class ConfigError(RefusedInput):
    """A config.json or generation_config.json says something that cannot be served."""


class MappingError(TypeError):
    """A Parameter, LayerContainer or ContainerMap is defined wrongly; raised as it is made."""


class CheckpointWarning(UserWarning):
    """The checkpoint was loaded, but there is something its owner should know."""
