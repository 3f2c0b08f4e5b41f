"""Which tokens a slot may draw next, as packed bits: written before a step, read in it.

The bits lie in the sampler's state, so that a step is the same program whether a row is masked or
not; what travels is the masks of those rows alone.
"""

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, UInt

from jaxgen.sampling.branch import when
from jaxgen.sampling.state import SamplerState

_SIZES = (1, 8, 64)


def mask_sizes(num_slots: int) -> tuple[int, ...]:
    """How many masks are written at once: few numbers, each a program of its own."""
    return (*(size for size in _SIZES if size < num_slots), num_slots)


def write_masks(state: SamplerState, slots: Sequence[int], masks: np.ndarray) -> SamplerState:
    """Gives slots their masks, int32 [len(slots), words]; `state` is donated."""
    num_slots, words = state.masks.shape
    size = next(size for size in mask_sizes(num_slots) if size >= len(slots))
    places = np.full(size, num_slots, np.int32)
    places[: len(slots)] = slots
    padded = np.zeros((size, words), np.uint32)
    padded[: len(slots)] = masks.view(np.uint32)
    return _writing(state.generated.sharding)(state, places, padded)


def compile_mask_sizes(state: SamplerState) -> Iterator[SamplerState]:
    """The state again and again, each time after another size of `write_masks` has been compiled.

    Nothing is changed: all the masks are of a slot that does not exist.
    """
    num_slots, words = state.masks.shape
    for size in mask_sizes(num_slots):
        state = write_masks(state, [num_slots] * size, np.zeros((size, words), np.int32))
        yield state


@functools.cache
def _writing(sharding: jax.sharding.Sharding) -> Callable[..., SamplerState]:
    return jax.jit(_write, donate_argnums=0, out_shardings=sharding)


def _write(
    state: SamplerState, slots: Int[Array, " some"], masks: UInt[Array, "some words"]
) -> SamplerState:
    return replace(state, masks=state.masks.at[slots].set(masks, mode="drop"))


def keep_allowed(
    logits: Float[Array, "rows vocab"],
    masks: UInt[Array, "rows words"],
    masked: Bool[Array, " rows"],
    known: bool | None,
) -> Float[Array, "rows vocab"]:
    """Forbids what the masks of masked rows do not have. known: as in `when`."""

    def forbid() -> Float[Array, "rows vocab"]:
        vocab = logits.shape[-1]
        bits = (masks[:, :, None] >> jnp.arange(32, dtype=jnp.uint32)) & 1
        allowed = bits.reshape(masks.shape[0], -1)[:, :vocab] == 1
        return jnp.where(allowed | ~masked[:, None], logits, -jnp.inf)

    return when(known, jnp.any(masked), forbid, lambda: logits)
