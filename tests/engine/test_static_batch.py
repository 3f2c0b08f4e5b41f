"""`init_inference`: padded arrays in, padded arrays out, and no error that passes for an answer."""

import numpy as np
import pytest

import jaxgen
from jaxgen.engine.outputs import FinishReason
from jaxgen.ragged.buckets import Buckets
from jaxgen_checkpoints.errors import RefusedInput

PAD = 0


@pytest.fixture(scope="module")
def engine(golden_dir):
    """Every step has one shape: one compile will do."""
    made = jaxgen.init_inference(golden_dir("llama_tied"), dtype="float32", max_out_tokens=64)
    (shape, *_) = [bucket for bucket in made.llm.engine.buckets.mixed if bucket.tokens == 64]
    made.llm.engine.buckets = Buckets((shape,), (shape,))
    return made


def test_rows_are_padded_on_either_side(engine, golden):
    case = golden("llama_tied")
    first, second = case.prompts[:2]
    width = max(len(first), len(second)) + 2
    ids, mask = np.full((2, width), PAD), np.zeros((2, width), int)
    for row, prompt, begin in ((0, first, 0), (1, second, width - len(second))):
        ids[row, begin : begin + len(prompt)] = prompt
        mask[row, begin : begin + len(prompt)] = 1
    told = engine.generate(ids, mask, max_new_tokens=8, pad_token_id=PAD)
    assert told.shape == (2, width + 8)
    assert np.array_equal(told[:, :width], ids)
    assert told[:, width:].tolist() == [greedy[:8] for greedy in case.greedy[:2]]


def test_a_row_that_fails_is_no_answer(engine, monkeypatch):
    real = engine.llm.generate

    def failing(rows, params):
        outputs = real(rows, params)
        outputs[1].outputs[0].finish_reason = FinishReason.ERROR
        outputs[1].outputs[0].error = "the model's logits are not finite"
        return outputs

    monkeypatch.setattr(engine.llm, "generate", failing)
    with pytest.raises(RuntimeError, match=r"row 1: .*not finite"):
        engine.generate([[5, 6], [7, 8]], max_new_tokens=2)


@pytest.mark.parametrize(
    ("ids", "options", "words"),
    [
        ([5, 6], {}, "must be .batch, length."),
        (np.zeros((0, 4), int), {}, "must be .batch, length."),
        ([[5, 6]], {"num_beams": 2}, "beam search"),
        ([[5, 6]], {"max_new_tokens": 63}, "exceeds max_out_tokens = 64"),
        ([[5, 6]], {"attention_mask": [[1]]}, "attention_mask has shape"),
        ([[5, 6]], {"attention_mask": [[0, 0]]}, "token ids"),
        ([[5, -1]], {}, "outside the vocabulary"),
        ([[5, 512]], {}, "outside the vocabulary"),
        ([[5.0, 6.0]], {}, "token ids"),
        ([[5, 6]], {"pad_token_id": 2**40}, "pad_token_id must be a number of 32 bits"),
    ],
)
def test_what_cannot_be_generated_is_refused(engine, ids, options, words):
    with pytest.raises(RefusedInput, match=words):
        engine.generate(ids, **options)
