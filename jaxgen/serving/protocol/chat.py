"""/v1/chat/completions: request and answer."""

from typing import Any, Literal

from pydantic import Field

from jaxgen.sampling import InvalidParameter
from jaxgen.serving.protocol.completion import Usage
from jaxgen.serving.protocol.sampling import SamplingFields, Whole, refuse_fields
from jaxgen.serving.protocol.service import Answer, Body

_REFUSED = {
    "web_search_options": "is not supported: nothing is looked up",
    "verbosity": "is not supported: ask for it in a message",
    "return_prompt_text": "is not supported: /tokenize and /detokenize show the prompt",
}


class FunctionDefinition(Body):
    """A function that the model may call; parameters is a JSON schema."""

    name: str = Field(min_length=1)
    description: str | None = None
    parameters: dict[str, Any] | None = None


class ChatTool(Body):
    """A tool; functions are the only kind."""

    type: Literal["function"] = "function"
    function: FunctionDefinition


class FunctionName(Body):
    """The function that must be called."""

    name: str


class NamedTool(Body):
    """The tool that must be called."""

    type: Literal["function"] = "function"
    function: FunctionName


class ChatRequest(SamplingFields):
    """A conversation to be answered."""

    messages: list[dict[str, Any]] = Field(min_length=1)
    max_completion_tokens: Whole | None = None
    logprobs: bool | None = False
    top_logprobs: Whole | None = None
    tools: list[ChatTool] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    parallel_tool_calls: bool | None = True
    reasoning_effort: str | None = None
    include_reasoning: bool = True
    echo: bool = False
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    add_special_tokens: bool = False
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    documents: list[dict[str, Any]] | None = None

    def check_supported(self) -> None:
        """Also refuses what only this route knows."""
        super().check_supported()
        extra = self.model_extra or {}
        for name in ("functions", "function_call"):
            if extra.get(name):
                raise InvalidParameter(name, "was replaced by tools and tool_choice")
        if extra.get("audio") or extra.get("modalities") not in (None, ["text"]):
            raise InvalidParameter("modalities", "other than text are not supported")
        refuse_fields(extra, _REFUSED)
        if self.top_logprobs and not self.logprobs:
            raise InvalidParameter("top_logprobs", "needs logprobs: true")
        if self.continue_final_message and self.add_generation_prompt:
            message = "and add_generation_prompt exclude each other: set the latter to false"
            raise InvalidParameter("continue_final_message", message)
        self._check_tools()

    def _check_tools(self) -> None:
        if self.tools is not None and not self.tools:
            raise InvalidParameter("tools", "must not be empty: leave it out")
        if self.tools is None and self.tool_choice not in (None, "none"):
            raise InvalidParameter("tool_choice", "needs tools")
        if isinstance(self.tool_choice, NamedTool):
            name = self.tool_choice.function.name
            if name not in [tool.function.name for tool in self.tools or ()]:
                raise InvalidParameter("tool_choice", f"names {name!r}, which is none of the tools")

    @property
    def choice_of_tool(self) -> Literal["none", "auto", "required"] | NamedTool:
        """tool_choice, or what it is when it is not given."""
        return self.tool_choice or ("auto" if self.tools else "none")


class ToolFunction(Answer):
    """The function to call, with its arguments as JSON text."""

    name: str
    arguments: str


class ToolCall(Answer):
    """A call that the model asks for."""

    id: str
    type: str = "function"
    function: ToolFunction


class ChatMessage(Answer):
    """The answer's message."""

    role: str
    content: str | None
    refusal: str | None = None
    tool_calls: list[ToolCall] | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None


class ChatChoice(Answer):
    """One of n answers."""

    index: int
    message: ChatMessage
    logprobs: dict[str, Any] | None = None
    finish_reason: str | None
    stop_reason: int | str | None = None
    matched_stop: int | str | None = None
    token_ids: list[int] | None = None


class ChatAnswer(Answer):
    """All answers."""

    id: str
    object: str = "chat.completion"
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    prompt_logprobs: list[dict[str, Any] | None] | None = None
    prompt_token_ids: list[int] | None = None
