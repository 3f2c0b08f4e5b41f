"""Bodies of the routes around generation: errors, models, tokens, SGLang's commands."""

from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, RootModel, model_validator

TokenId = Annotated[int, Field(ge=0, le=2**31 - 1)]


class Body(BaseModel):
    """A request body. Fields that nobody knows are ignored, as vLLM ignores them."""

    model_config = ConfigDict(extra="allow", protected_namespaces=())


class Answer(BaseModel):
    """A response body, for the OpenAPI document."""

    model_config = ConfigDict(extra="allow", protected_namespaces=())


class ErrorDetail(Answer):
    """Why a request failed."""

    message: str
    type: str
    param: str | None = None
    code: int


class ErrorBody(Answer):
    """The body of every response whose status is 400 or more."""

    error: ErrorDetail


class ModelCard(Answer):
    """One name of the served model."""

    id: str
    object: str = "model"
    created: int
    owned_by: str
    root: str
    parent: str | None = None
    max_model_len: int


class ModelList(Answer):
    """The answer of /v1/models."""

    object: str = "list"
    data: list[ModelCard]


class TokenizeRequest(Body):
    """Text, or a conversation, to be turned into token ids."""

    model: str | None = None
    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    tools: list[dict[str, Any]] | None = None

    @model_validator(mode="after")
    def _one_of_two(self) -> "TokenizeRequest":
        if (self.prompt is None) == (self.messages is None):
            raise ValueError("give either prompt or messages")
        return self


class TokenizeAnswer(Answer):
    """Token ids, and how they are spelled if that was asked for."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None


class DetokenizeRequest(Body):
    """Token ids of one text, or of several."""

    model: str | None = None
    tokens: list[TokenId] | list[list[TokenId]]


class DetokenizeAnswer(Answer):
    """The text, or the texts, under vLLM's name and SGLang's."""

    prompt: str | list[str]
    text: str | list[str]


class MIIRequest(Body):
    """DeepSpeed-MII's request; beside these fields its generation parameters, checked by name."""

    prompts: str | list[str] = Field(min_length=1)
    stream: bool = False


class MIIResponse(Answer):
    """One prompt's answer."""

    generated_text: str
    prompt_length: int
    generated_length: int
    finish_reason: str


class MIIAnswer(RootModel[list[MIIResponse]]):
    """An answer for each prompt, in order."""


class GenerateRequest(Body):
    """SGLang's native request: sampling_params by SGLang's names.

    priority: larger is served first. extra_key: prefixes are shared under the same one only.
    """

    text: str | list[str] | None = None
    input_ids: list[TokenId] | list[list[TokenId]] | None = None
    sampling_params: dict[str, Any] | list[dict[str, Any]] | None = None
    rid: str | list[str] | None = None
    return_logprob: bool | list[bool] | None = False
    logprob_start_len: int | list[int] | None = -1
    top_logprobs_num: int | list[int] | None = 0
    return_text_in_logprobs: bool | list[bool] | None = False
    stream: bool = False
    priority: int = Field(0, ge=-(2**63), le=2**63 - 1)
    extra_key: str | None = Field(None, min_length=1)

    @model_validator(mode="after")
    def _one_of_two(self) -> "GenerateRequest":
        if (self.text is None) == (self.input_ids is None):
            raise ValueError("give either text or input_ids")
        return self


class GenerateMeta(Answer):
    """How a continuation came about."""

    id: str
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    finish_reason: dict[str, Any] | None


class GenerateAnswer(Answer):
    """One continuation in SGLang's form; a list of them for several prompts."""

    text: str
    output_ids: list[int]
    meta_info: GenerateMeta


class AbortRequest(Body):
    """Which request to end: rid, or all of them."""

    rid: str = ""
    abort_all: bool = False


class Success(Answer):
    """A command was carried out."""

    success: bool = True
