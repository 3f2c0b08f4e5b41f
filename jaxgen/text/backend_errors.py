"""`tokenizers` raises bare Exceptions; here alone they become refusals that name the file."""

from collections.abc import Generator
from contextlib import contextmanager

from jaxgen_checkpoints.errors import CheckpointError


@contextmanager
def refused(what: str) -> Generator[None]:
    """Within, whatever `tokenizers` raises becomes CheckpointError: `what` and its reason."""
    try:
        yield
    except Exception as error:
        raise CheckpointError(f"{what}: {error}") from error
