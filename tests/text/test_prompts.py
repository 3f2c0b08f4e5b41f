"""What LLM takes as prompts, and what it refuses rather than misread."""

import numpy as np
import pytest

from jaxgen.prompts import as_batch, plain_prompt
from jaxgen_checkpoints.errors import RefusedInput


@pytest.mark.parametrize(
    ("given", "batch"),
    [
        ("a", ["a"]),
        ([1, 2], [[1, 2]]),
        (np.array([1, 2]), [[1, 2]]),
        (range(3), [[0, 1, 2]]),
        (["a", [1], (2, 3)], ["a", [1], [2, 3]]),
        ([], []),
        ([[]], [[]]),
        ({"prompt": "a"}, ["a"]),
        ({"prompt_token_ids": [1, 2], "prompt": None}, [[1, 2]]),
        ([{"prompt": "a"}, {"prompt_token_ids": [1], "multi_modal_data": None}], ["a", [1]]),
    ],
)
def test_one_prompt_or_many(given, batch):
    assert as_batch(given) == batch


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (None, "got nothing"),
        (5, "got int: 5"),
        (b"hi", "got bytes: b'hi'"),
        (["a", b"hi"], "got bytes: b'hi'"),
        (["a", 5], "got int: 5"),
        ({}, "got nothing"),
        ({"prompt": {"prompt": "a"}}, "got dict"),
        ({"prompt": "a", "multi_modal_data": {"image": 0}}, "a prompt has 'multi_modal_data'"),
    ],
)
def test_what_is_no_prompt_is_refused(given, message):
    with pytest.raises(RefusedInput) as caught:
        as_batch(given)
    assert message in str(caught.value)


def test_a_stream_has_one_prompt():
    assert plain_prompt({"prompt": "a"}) == "a"
    assert plain_prompt([]) == []
