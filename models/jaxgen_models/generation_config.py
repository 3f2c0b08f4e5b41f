"""What generation_config.json says: which tokens end an answer, and how to sample."""

import warnings
from collections.abc import Mapping
from typing import Any, Final

from jaxgen_checkpoints.errors import CheckpointWarning
from jaxgen_models.config import DecoderConfig
from jaxgen_models.hf_config import HFConfig

_SAMPLING: Final = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")


def end_token_ids(generation_config: Mapping[str, Any], config: DecoderConfig) -> tuple[int, ...]:
    """All EOS ids, of both configs; one outside the vocabulary can never come: a warning."""
    listed = HFConfig(generation_config, "generation_config.json").token_ids("eos_token_id")
    ids = tuple(dict.fromkeys((*config.eos_token_ids, *listed)))
    beyond = [i for i in ids if not 0 <= i < config.vocab_size]
    if beyond:
        warnings.warn(
            f"eos_token_id {beyond} is outside the vocabulary of {int(config.vocab_size)} and can "
            "never be generated: answers end at max_tokens only",
            CheckpointWarning,
            stacklevel=2,
        )
    return tuple(i for i in ids if i not in beyond)


def sampling_defaults(generation_config: Mapping[str, Any]) -> dict[str, Any]:
    """Sampling parameters by vLLM's names; greedy where `do_sample` is false or absent."""
    given = {k: generation_config[k] for k in _SAMPLING if generation_config.get(k) is not None}
    if not generation_config.get("do_sample", False):
        return {"temperature": 0.0, **{k: v for k, v in given.items() if k == "repetition_penalty"}}
    return given
