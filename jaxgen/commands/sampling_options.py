"""Sampling options over the checkpoint's defaults; one that could have no effect is refused."""

import argparse
from collections.abc import Sequence

from jaxgen.opened import OpenedModel
from jaxgen.sampling import SamplingParams
from jaxgen_checkpoints.errors import RefusedInput

_NAMES = (
    "max_tokens",
    "min_tokens",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "stop",
    "ignore_eos",
    "n",
    "logprobs",
)
_NEED_TEMPERATURE = ("top_p", "top_k", "min_p")


def sampling_params(
    args: argparse.Namespace, opened: OpenedModel, prompt_ids: Sequence[int], usual_tokens: int
) -> SamplingParams:
    """What is asked for one prompt; without --max-tokens `usual_tokens`, or what room there is.

    Refused: what is out of range or could have no effect, and a prompt that the model cannot take.
    """
    given = {name: getattr(args, name, None) for name in _NAMES}
    given = {name: value for name, value in given.items() if value is not None}
    if "max_tokens" not in given:
        room = opened.max_context - len(prompt_ids)
        given["max_tokens"] = max(1, given.get("min_tokens", 1), min(usual_tokens, room))
    params = opened.default_sampling_params(**given)
    idle = [name for name in _NEED_TEMPERATURE if name in given]
    if params.greedy and idle:
        option = "--" + idle[0].replace("_", "-")
        raise RefusedInput(
            f"{option} has no effect: decoding is greedy (temperature 0); add --temperature"
        )
    opened.check(prompt_ids, params)
    return params
