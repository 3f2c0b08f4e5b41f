"""In which order requests begin that are all there from the start: long answers first."""

from collections.abc import Sequence


def longest_first(most_tokens: Sequence[int | None]) -> list[int]:
    """Indices of requests, from the one whose answer may be the longest; equals stay in order.

    most_tokens: of each answer, None for as many as the context allows. The list scheduling of
    Graham (1969), longest processing time first: what begins last is short, so that no few long
    answers are left at the end, in steps that cost almost as much as full ones.
    """
    bounds = [float("inf") if most is None else float(most) for most in most_tokens]
    return sorted(range(len(bounds)), key=lambda index: -bounds[index])
