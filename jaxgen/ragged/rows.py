"""The rows of a step as plain arrays, which the packer gathers everything else by."""

from typing import NamedTuple

import numpy as np


class StepRows(NamedTuple):
    """Rows whose tokens are reserved, in the order in which they are packed.

    indices intp [rows]: of their sequences (Sequence.index). counts int32 [rows]: tokens of each,
    as many as the sequence has in flight. token_ids int32 [sum(counts)]: row after row; -1 for one
    that only the sampler knows. emit bool [rows]: whether the row's last token is followed by a
    sampled one.
    """

    indices: np.ndarray
    counts: np.ndarray
    token_ids: np.ndarray
    emit: np.ndarray


NO_ROWS = StepRows(
    np.empty(0, np.intp), np.empty(0, np.int32), np.empty(0, np.int32), np.empty(0, bool)
)
