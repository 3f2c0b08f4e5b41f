"""SGLang's native request understood: its names become ours, what cannot be served is refused."""

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from starlette.requests import Request

from jaxgen.sampling import InvalidParameter, SamplingParams
from jaxgen.serving.context import Serving
from jaxgen.serving.generation import Work
from jaxgen.serving.logprobs import TokenNames
from jaxgen.serving.prompts import check_room, fitted, read_prompts
from jaxgen.serving.protocol.sampling import refuse_fields
from jaxgen.serving.protocol.service import GenerateRequest

_DEFAULT_NEW_TOKENS = 128

_RENAMED = {
    "max_new_tokens": "max_tokens",
    "min_new_tokens": "min_tokens",
    "sampling_seed": "seed",
    "no_stop_trim": "include_stop_str_in_output",
}
_OURS = {ours: name for name, ours in _RENAMED.items()} | dict.fromkeys(
    ("logprobs", "prompt_logprobs"), "top_logprobs_num"
)
_SAME = (
    *("temperature", "top_p", "top_k", "min_p", "n", "stop", "stop_token_ids", "ignore_eos"),
    *("frequency_penalty", "presence_penalty", "repetition_penalty", "logit_bias"),
    *("skip_special_tokens", "spaces_between_special_tokens"),
)
_STRUCTURES = {
    "json_schema": "json",
    "regex": "regex",
    "ebnf": "grammar",
    "structural_tag": "structural_tag",
}
PARAMS = (*_RENAMED, *_SAME, *_STRUCTURES)
"""What sampling_params may hold."""

_REFUSED_PARAMS = {
    "stop_regex": "is not supported: use stop",
    "custom_params": "is not supported: no plug-in reads it",
    "stream_interval": "is not supported: every token is sent as soon as it is there",
    "beam_width": "is not supported: sample n continuations instead",
}
REFUSED = {
    "input_embeds": "is not supported: send text or token ids",
    "image_data": "is not supported: text only",
    "video_data": "is not supported: text only",
    "audio_data": "is not supported: text only",
    "token_ids_logprob": "is not supported: ask for top_logprobs_num",
    "custom_logit_processor": "is not supported: use logit_bias, a regex or a schema",
    "return_hidden_states": "is not supported",
    "return_routed_experts": "is not supported",
    "session_params": "is not supported: no session is kept",
    "lora_path": "is not supported: there are no adapters",
    "bootstrap_host": "is not supported: prompts are computed where they are continued",
    "bootstrap_room": "is not supported: prompts are computed where they are continued",
}


@dataclass(frozen=True, slots=True)
class Asked:
    """A request that was understood.

    several: the answer is a list. began: `time.monotonic` seconds. just_prompt: max_new_tokens is
    0, and nothing new is wanted. names: of tokens beside their logprobs; None leaves them out.
    start: the first prompt token whose logprob is wanted.
    """

    work: Work
    several: bool
    began: float
    just_prompt: bool
    names: TokenNames | None
    start: int


async def understand(serving: Serving, request: Request, body: GenerateRequest) -> Asked:
    """Everything that can be refused is refused here."""
    refuse_fields(body.model_extra or {}, REFUSED)
    given = body.text if body.text is not None else body.input_ids
    assert given is not None
    field = "input_ids" if body.text is None else "text"
    several = not isinstance(given, str) and not (given and isinstance(given[0], int))
    prompts: list[Any] = list(given) if several else [given]
    if not prompts:
        raise InvalidParameter(field, "must not be empty")
    sampling = single("sampling_params", body.sampling_params) or {}
    just_prompt = sampling.get("max_new_tokens") == 0
    params = _params(serving, body, sampling)
    read = await read_prompts(serving, prompts, params.n, field=field)
    if sampling.get("max_new_tokens") is None:
        params = fitted(serving, read, params)
    for prompt in read:
        check_room(serving, prompt, params, field=field, limit="max_new_tokens")
    rid = single("rid", body.rid) or request.state.request_id
    named = bool(single("return_text_in_logprobs", body.return_text_in_logprobs))
    return Asked(
        work=Work(rid, read, params, -body.priority, body.extra_key),
        several=several or params.n > 1,
        began=time.monotonic(),
        just_prompt=just_prompt,
        names=TokenNames(serving.engine.tokenizer) if named else None,
        start=max(0, single("logprob_start_len", body.logprob_start_len) or 0),
    )


def single(name: str, value: Any) -> Any:  # noqa: ANN401
    """The one value for all prompts."""
    if not isinstance(value, list):
        return value
    if any(entry != value[0] for entry in value):
        raise InvalidParameter(name, "must be the same for all prompts of one request")
    return value[0] if value else None


def _params(serving: Serving, body: GenerateRequest, given: Mapping[str, Any]) -> SamplingParams:
    refuse_fields(given, _REFUSED_PARAMS)
    asked = {name: value for name, value in given.items() if value is not None}
    values: dict[str, Any] = {
        "max_tokens": _DEFAULT_NEW_TOKENS,
        **serving.settings.sampling_defaults,
    }
    structures = {name: asked.pop(name) for name in _STRUCTURES if asked.get(name)}
    if len(structures) > 1:
        raise InvalidParameter("sampling_params", f"must hold one of {' and '.join(structures)}")
    for name, form in structures.items():
        values["structured_outputs"] = {_STRUCTURES[name]: form}
    for name, value in asked.items():
        if name in _RENAMED or name in _SAME:
            values[_RENAMED.get(name, name)] = value
        elif name not in (*_STRUCTURES, *_REFUSED_PARAMS):
            known = ", ".join(sorted(PARAMS))
            raise InvalidParameter(name, f"is not a sampling parameter here; known: {known}")
    if given.get("max_new_tokens") == 0:
        values["max_tokens"] = 1
    if single("return_logprob", body.return_logprob):
        values["logprobs"] = single("top_logprobs_num", body.top_logprobs_num) or 0
        if (single("logprob_start_len", body.logprob_start_len) or 0) >= 0:
            values["prompt_logprobs"] = values["logprobs"]
    try:
        return SamplingParams.from_mapping(values)
    except InvalidParameter as error:
        raise error.under(_OURS) from None
