"""Masks: which tokens a slot may draw, whoever else is in the batch."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxgen.sampling import (
    Demand,
    SamplingParams,
    admit,
    compile_mask_sizes,
    init,
    sample,
    slot_row,
    write_masks,
)
from jaxgen.sampling.masks import mask_sizes

VOCAB = 24
step = jax.jit(sample, static_argnums=4)


@pytest.mark.parametrize("demand", [Demand.ANY, Demand.ADJUSTED])
def test_masks_say_what_may_come(demand):
    """Bit i of a slot's mask is token i; only slots that asked for a mask look at theirs."""
    masked = SamplingParams(bad_words=["x"], logit_bias={3: 5.0}, temperature=0)
    state = init(4, VOCAB)
    for slot, params in enumerate((masked, SamplingParams(temperature=0))):
        state = admit(state, slot, slot_row(params, vocab_size=VOCAB, seed=0))
    masks = np.array([[1 << 3 | 1 << 20], [1 << 5]], np.uint32).view(np.int32)
    state = write_masks(state, [0, 1], masks)
    logits = np.zeros((4, VOCAB + 8), np.float32)  # the shapes of test_sample, compiled once
    logits[:, 20], logits[:, 22] = 6, 9
    slots = jnp.arange(4)
    emit = slots < 2
    state, drawn = step(logits, state, slots, emit, demand)
    np.testing.assert_array_equal(drawn.tokens[:2], [20, 22])
    state = write_masks(state, [0], masks[:1] & ~(1 << 20))
    state, drawn = step(logits, state, slots, emit, demand)
    np.testing.assert_array_equal(drawn.tokens[:2], [3, 22])
    state = write_masks(state, [0], masks[:1] * 0)
    _, drawn = step(logits, state, slots, emit, demand)
    np.testing.assert_array_equal(drawn.bad[:2], [True, False])


def test_sizes_cover_any_number_of_rows_and_compiling_them_changes_nothing():
    assert mask_sizes(4) == (1, 4)
    assert mask_sizes(256) == (1, 8, 64, 256)
    state = init(4, 70)
    state = write_masks(state, [2], np.array([[1, 2, 3]], np.int32))
    before = np.asarray(state.masks).copy()
    *_, state = compile_mask_sizes(state)
    np.testing.assert_array_equal(state.masks, before)
    state = write_masks(state, [0, 1, 3], np.full((3, 3), 7, np.int32))
    np.testing.assert_array_equal(np.asarray(state.masks)[[0, 1, 3]], np.full((3, 3), 7))
    np.testing.assert_array_equal(np.asarray(state.masks)[2], [1, 2, 3])
