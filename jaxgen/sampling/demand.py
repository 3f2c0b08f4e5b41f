"""How much of the sampler a step needs, known on the host before the step is sent.

On a GPU or TPU a branch inside the program would make the host wait for its predicate, so there
the step is compiled without branches, once for each demand. A CPU takes the branches: they cost
nothing, and compiling does.
"""

from collections.abc import Iterable
from enum import StrEnum

from jaxgen.sampling.params import SamplingParams


class Demand(StrEnum):
    """What some row of the batch asks for; each includes the ones before it."""

    PLAIN = "sample_plain"
    """The likeliest token, as the model gives it."""
    DRAWN = "sample_drawn"
    """Temperature and min-p: what most clients leave a request with."""
    CUT = "sample_cut"
    """Top-k and top-p as well: two dozen passes over the logits."""
    ADJUSTED = "sample_adjusted"
    """Biases, penalties and masks as well."""
    REPORTED = "sample_reported"
    """Log-probabilities as well."""
    ANY = "sample"
    """Not known on the host: the step looks at the rows itself, by branches."""


COMPILED_APART = (
    Demand.PLAIN,
    Demand.DRAWN,
    Demand.CUT,
    Demand.ADJUSTED,
    Demand.REPORTED,
)


def compiled_demands(platform: str) -> tuple[Demand, ...]:
    """The kinds of draws that there are programs for, the one that serves all of them last."""
    return (Demand.ANY,) if platform == "cpu" else COMPILED_APART


def demand_of(params: SamplingParams) -> Demand:
    """What one request asks for, as long as it runs."""
    if params.logprobs is not None:
        return Demand.REPORTED
    adjusted = (
        params.penalised
        or params.logit_bias
        or params.min_tokens
        or params.masked
        or params.allowed_token_ids is not None
    )
    if adjusted:
        return Demand.ADJUSTED
    if params.greedy:
        return Demand.PLAIN
    return Demand.CUT if params.top_k > 0 or params.top_p < 1.0 else Demand.DRAWN


def largest(demands: Iterable[Demand]) -> Demand:
    """What a batch of such rows asks for; PLAIN for an empty one."""
    return max(demands, key=COMPILED_APART.index, default=Demand.PLAIN)
