"""The rows of a step as plain lists, which the packer gathers everything else by."""

from collections.abc import Sequence
from typing import NamedTuple


class StepRows(NamedTuple):
    """Rows whose tokens are reserved, in the order in which they are packed.

    indices [rows]: of their sequences (Sequence.index). counts [rows]: tokens of each, as many as
    the sequence has in flight. token_ids [sum(counts)]: row after row; -1 for one that only the
    sampler knows. emit [rows]: whether the row's last token is followed by a sampled one.
    """

    indices: Sequence[int]
    counts: Sequence[int]
    token_ids: Sequence[int]
    emit: Sequence[bool]
