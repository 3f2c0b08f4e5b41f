"""The fields that say how to sample, shared by completions and chat, and what becomes of them."""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field

from jaxgen.sampling import InvalidParameter, SamplingParams
from jaxgen.serving.protocol.service import Body, TokenId

_PARAMS = (
    "n",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "seed",
    "stop",
    "stop_token_ids",
    "ignore_eos",
    "min_tokens",
    "prompt_logprobs",
    "skip_special_tokens",
    "spaces_between_special_tokens",
    "include_stop_str_in_output",
    "logit_bias",
    "allowed_token_ids",
    "bad_words",
    "logprob_token_ids",
    "structured_outputs",
    "thinking_token_budget",
    "repetition_detection",
)
_REFUSED = {
    "use_beam_search": "is not supported: sample n continuations instead",
    "length_penalty": "belongs to beam search, which is not supported",
    "prompt_embeds": "is not supported: send text or token ids",
    "kv_transfer_params": "is not supported: no KV cache is transferred",
    "ec_transfer_params": "is not supported: no encoder's cache is transferred",
    "logits_processors": "is not supported: use logit_bias or structured_outputs",
    "custom_logit_processor": "is not supported: use logit_bias or structured_outputs",
    "custom_params": "is not supported: no plug-in reads it",
    "vllm_xargs": "is not supported: no plug-in reads it",
    "watermarking": "is not supported",
    "stream_interval": "is not supported: every token is sent as soon as it is there",
    "stop_regex": "is not supported: use stop",
    "lora_path": "is not supported: there are no adapters",
    "session_params": "is not supported: no session is kept",
    "return_hidden_states": "is not supported",
    "return_routed_experts": "is not supported",
    "mm_processor_kwargs": "is not supported: text only",
    "media_io_kwargs": "is not supported: text only",
    "guided_json": "was replaced by structured_outputs.json",
    "guided_regex": "was replaced by structured_outputs.regex",
    "guided_choice": "was replaced by structured_outputs.choice",
    "guided_grammar": "was replaced by structured_outputs.grammar",
    "guided_decoding_backend": "is not supported: there is one grammar library",
    "guided_whitespace_pattern": "was replaced by structured_outputs.whitespace_pattern",
}
_ASKS_FOR_NOTHING = (None, False, [], {}, "")
_DEFAULTS = {"length_penalty": 1, "stream_interval": 1}
"""What of these may be sent, as clients do that write out all their defaults."""

_STRUCTURES = {"regex": "regex", "ebnf": "grammar"}
"""SGLang's fields for structured_outputs."""


def _whole(value: object) -> object:
    """No booleans for numbers: JSON tells them apart."""
    if isinstance(value, bool):
        raise ValueError("must be a number, not true or false")
    return value


Number = Annotated[float, BeforeValidator(_whole)]
Whole = Annotated[int, BeforeValidator(_whole)]


class StreamOptions(Body):
    """What a stream tells beside the text."""

    include_usage: bool | None = False
    continuous_usage_stats: bool | None = False


class SamplingFields(Body):
    """Sampling parameters by vLLM's names. null is the same as not given."""

    refused: ClassVar[Mapping[str, str]] = _REFUSED

    model: str | None = None
    n: Whole | None = None
    temperature: Number | None = None
    top_p: Number | None = None
    top_k: Whole | None = None
    min_p: Number | None = None
    presence_penalty: Number | None = None
    frequency_penalty: Number | None = None
    repetition_penalty: Number | None = None
    seed: Whole | None = Field(None, ge=-(2**63), le=2**63 - 1)
    stop: str | list[str] | None = None
    stop_token_ids: list[TokenId] | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    min_tokens: Whole | None = None
    max_tokens: Whole | None = None
    logit_bias: dict[str, Number] | None = None
    allowed_token_ids: list[TokenId] | None = None
    bad_words: list[str] | None = None
    prompt_logprobs: Whole | None = None
    skip_special_tokens: bool | None = None
    spaces_between_special_tokens: bool | None = None
    structured_outputs: dict[str, Any] | None = None
    response_format: dict[str, Any] | None = None
    regex: str | None = None
    ebnf: str | None = None
    truncate_prompt_tokens: Whole | None = None
    truncation_side: Literal["left", "right"] | None = None
    priority: Whole = Field(0, ge=-(2**63), le=2**63 - 1)
    cache_salt: str | None = Field(None, min_length=1)
    request_id: str | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    user: str | None = None

    def check_supported(self) -> None:
        """Refuses by name what is known and cannot be done. InvalidParameter."""
        refuse_fields(self.model_extra or {}, self.refused)
        if self.stream and self.prompt_logprobs is not None:
            raise InvalidParameter("prompt_logprobs", "is not available in a stream")
        if self.stream_options is not None and not self.stream:
            raise InvalidParameter("stream_options", "needs stream: true")

    def params(self, defaults: Mapping[str, Any], **settled: Any) -> SamplingParams:  # noqa: ANN401
        """What is asked of the sampler: `settled` over the body over `defaults`."""
        given = {name: self._field(name) for name in _PARAMS}
        given = {name: value for name, value in given.items() if value is not None}
        structure = self._structure()
        if structure is not None:
            given["structured_outputs"] = structure
        return SamplingParams.from_mapping({**defaults, **given, **settled})

    def _structure(self) -> dict[str, Any] | None:
        """The form that is asked for, by whichever of the fields; two are refused."""
        asked: dict[str, dict[str, Any] | None] = {
            "structured_outputs": self.structured_outputs,
            "response_format": structure_of(self.response_format),
        }
        for name, kind in _STRUCTURES.items():
            value = getattr(self, name)
            asked[name] = None if value is None else {kind: value}
        given = {name: form for name, form in asked.items() if form is not None}
        if len(given) > 1:
            first, second, *_ = given
            raise InvalidParameter(first, f"and {second} exclude each other")
        return next(iter(given.values()), None)

    def _field(self, name: str) -> object:
        if name in type(self).model_fields:
            return getattr(self, name)
        return (self.model_extra or {}).get(name)

    @property
    def include_usage(self) -> bool:
        """Whether a stream ends in a chunk of usage."""
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    @property
    def continuous_usage(self) -> bool:
        """Whether every chunk of a stream tells its usage."""
        return self.include_usage and bool(
            self.stream_options and self.stream_options.continuous_usage_stats
        )


def refuse_fields(extra: Mapping[str, object], refused: Mapping[str, str]) -> None:
    """InvalidParameter for the first field of a body that is known and cannot be served."""
    for name, why in refused.items():
        if extra.get(name) not in (*_ASKS_FOR_NOTHING, _DEFAULTS.get(name)):
            raise InvalidParameter(name, why)


def structure_of(response_format: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """structured_outputs for OpenAI's response_format; None where any text will do."""
    if response_format is None:
        return None
    kind = response_format.get("type")
    if kind == "text":
        return None
    if kind == "json_object":
        return {"json_object": True}
    if kind == "json_schema":
        described = response_format.get("json_schema")
        schema = described.get("schema") if isinstance(described, Mapping) else None
        if not isinstance(schema, Mapping):
            raise InvalidParameter(
                "response_format", "of type json_schema needs json_schema.schema"
            )
        return {"json": schema}
    if kind == "structural_tag":
        return {"structural_tag": dict(response_format)}
    known = "text, json_object, json_schema or structural_tag"
    message = f"must have a type of {known}, not {kind!r}"
    raise InvalidParameter("response_format", message)
