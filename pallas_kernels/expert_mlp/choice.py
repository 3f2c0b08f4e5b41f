"""Which experts a token goes to, and with which shares, given the router's logits."""

from dataclasses import dataclass
from typing import Final

from jaxtyping import Array, Float, Int

from pallas_kernels.dispatch import Operation

NOBODY: Final = -1
"""Stands where a token has no expert, with a share of 0."""

_OPERATION = Operation(
    name="expert_choice",
    modules={
        "portable": "pallas_kernels.expert_mlp.portable_choice",
        "gpu": "pallas_kernels.expert_mlp.gpu_choice",
    },
    kernels={"cuda": ("gpu",), "tpu": ("portable",)},  # nothing to warn of there
    fallback="portable",
)


@dataclass(frozen=True, slots=True)
class ChoiceProblem:
    """tokens and experts of the logits, and how to choose.

    top_k: experts of a token. softmax: over all experts, else each score is a sigmoid. groups,
    top_groups: experts are cut into groups, and only those of the best top_groups can be chosen; a
    group is worth the sum of its best `group_best` scores. normalise: the shares of the chosen are
    made to add up to 1. scale: what shares are multiplied by after that.
    """

    tokens: int
    experts: int
    top_k: int
    softmax: bool
    groups: int
    top_groups: int
    group_best: int
    normalise: bool
    scale: float

    def __str__(self) -> str:
        return f"{self.tokens} tokens to {self.top_k} of {self.experts} experts"


def choose(
    logits: Float[Array, "tokens experts"],
    choice_bias: Float[Array, " experts"] | None,
    *,
    problem: ChoiceProblem,
    implementation: str | None = None,
) -> tuple[Int[Array, "tokens choices"], Float[Array, "tokens choices"]]:
    """Experts and shares of every token: its top_k, best first, then maybe NOBODY with share 0.

    choice_bias is added to the scores that decide on the experts, but not to their shares.
    """
    run = _OPERATION.choose(problem, implementation).run
    return run(logits, choice_bias, problem=problem)
