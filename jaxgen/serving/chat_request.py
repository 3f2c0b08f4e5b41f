"""A chat request understood: its prompt, its sampling params, and how its answer is read."""

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from jaxgen.sampling import InvalidParameter, SamplingParams
from jaxgen.sampling.structured import StructuredOutputs
from jaxgen.serving.context import Serving
from jaxgen.serving.errors import bad_request
from jaxgen.serving.generation import Work
from jaxgen.serving.logprobs import TokenNames
from jaxgen.serving.messages import for_template
from jaxgen.serving.parsers import BEGUN, always_thinks, make_parser, read_after
from jaxgen.serving.parsers.thinking import BEGIN as THINK_BEGIN, END as THINK_END
from jaxgen.serving.prompts import (
    SHORT_TEXT,
    Prompt,
    check_choices,
    check_room,
    fitted,
    off_loop,
    read_prompt,
)
from jaxgen.serving.protocol.chat import ChatRequest, NamedTool
from jaxgen.serving.settings import SETTLED_BY_REQUEST
from jaxgen.serving.tools import (
    FirstCall,
    NamedCall,
    RequiredCalls,
    TextParser,
    named_schema,
    required_schema,
)
from jaxgen.text.chat_template import ChatTemplate

_TAIL = 16
"""Tokens in which a template may begin the thoughts, or end those that it lets a model not have."""

_EACH = 20
"""Characters that a message, or a part of one, counts for beside its text."""

_SPACING = r"[ \n]{0,8}"
"""Between the parts of a call: a model must not fill its context with white space instead."""


@dataclass(frozen=True, slots=True)
class Chat:
    """What the routes of conversations need to answer.

    parser: makes one that reads a choice's text; None where all of it is content. opening: text
    that the answer begins with, which is the end of the conversation (echo). forced: the client
    named the tool to call.
    """

    body: ChatRequest
    work: Work
    model: str
    created: int
    names: TokenNames
    parser: Callable[[], TextParser] | None
    role: str
    opening: str
    forced: bool


async def understand(
    serving: Serving,
    public_id: str,
    body: ChatRequest,
    *,
    field: str = "messages",
    limit: str = "max_completion_tokens",
) -> Chat:
    """Everything that can be refused is refused here.

    field, limit: what the client knows `messages` and `max_completion_tokens` by.
    """
    model = serving.check_model(body.model)
    body.check_supported()
    reasoning = serving.settings.reasoning_parser
    parser, special = _parser(serving, body, reasoning)
    settled: dict[str, Any] = {}
    if body.logprobs:
        settled["logprobs"] = body.top_logprobs or 0
    settled |= _structure(body)
    if special:
        settled["skip_special_tokens"] = False
    defaults = serving.settings.sampling_defaults
    asked = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
    settled["max_tokens"] = defaults.get("max_tokens") if asked is None else asked
    shown = {} if body.max_completion_tokens is None else {"max_tokens": "max_completion_tokens"}
    try:
        params = body.params(defaults, **settled)
    except InvalidParameter as error:
        raise error.under({"logprobs": "top_logprobs", **shown}) from None
    check_choices(serving, 1, params.n, field)
    prompt = await render(serving, body, field, room=params.max_tokens)
    if asked is None:
        params = fitted(serving, [prompt], params)
    limit = "max_tokens" if body.max_completion_tokens is None else limit
    check_room(serving, prompt, params, field=field, limit=limit)
    if reasoning is not None:
        reasoning = _left_to_think(serving, prompt, reasoning)
        parser, _ = _parser(serving, body, reasoning)
    if reasoning is not None and params.structured_outputs is not None:
        params = _free_thoughts(params, params.structured_outputs, reasoning)
    last = body.messages[-1]
    role = serving.settings.response_role
    if not body.add_generation_prompt:
        role = str(last.get("role"))
    echoed = body.echo and last.get("role") == role and isinstance(last.get("content"), str)
    return Chat(
        body=body,
        work=Work(public_id, [prompt], params, body.priority, body.cache_salt),
        model=model,
        created=int(time.time()),
        names=serving.token_names(as_ids=body.return_tokens_as_token_ids),
        parser=parser,
        role=role,
        opening=last["content"] if echoed else "",
        forced=isinstance(body.tool_choice, NamedTool),
    )


async def render(
    serving: Serving, body: ChatRequest, field: str = "messages", *, room: int | None = None
) -> Prompt:
    """The conversation as the model's template writes it, as token ids. room: as `read_prompt`."""
    tokenizer = serving.need_tokenizer()
    variables = dict(body.chat_template_kwargs or {})
    clash = [name for name in SETTLED_BY_REQUEST if name in variables]
    if clash:
        raise InvalidParameter("chat_template_kwargs", f"must not hold {clash[0]}")
    if body.reasoning_effort is not None:
        variables.setdefault("reasoning_effort", body.reasoning_effort)
        variables.setdefault("enable_thinking", body.reasoning_effort != "none")
    variables = {**serving.settings.chat_template_defaults, **variables}
    template = tokenizer.chat_template
    if body.chat_template is not None:
        if not serving.settings.trust_request_chat_template:
            message = "is only taken by a server started with --trust-request-chat-template"
            raise InvalidParameter("chat_template", message)
        template = ChatTemplate(body.chat_template, tokenizer.special_tokens)
    if template is None:
        raise bad_request("this model has no chat template: start the server with --chat-template")

    def write() -> str:
        return template.render(
            for_template(body.messages),
            tools=[tool.model_dump(exclude_none=True) for tool in body.tools or ()] or None,
            documents=body.documents,
            add_generation_prompt=body.add_generation_prompt,
            continue_final_message=body.continue_final_message,
            **variables,
        )

    text = await off_loop(write, _size(body))
    return replace(
        await read_prompt(
            serving,
            text,
            add_special_tokens=body.add_special_tokens,
            keep=body.truncate_prompt_tokens,
            keep_first=body.truncation_side == "right",
            room=room,
            field=field,
        ),
        text=None,
    )


def _size(body: ChatRequest) -> int:
    """Characters that a template has to write, roughly; tools are taken for many."""
    if body.tools or body.documents:
        return SHORT_TEXT + 1
    contents = [message.get("content") for message in body.messages]
    parts = [part for each in contents for part in (each if isinstance(each, list) else [each])]
    texts = [part.get("text") if isinstance(part, dict) else part for part in parts]
    return sum(_EACH + (len(text) if isinstance(text, str) else 0) for text in texts)


def _structure(body: ChatRequest) -> dict[str, Any]:
    """What must be written where a call is required."""
    choice = body.choice_of_tool
    if choice in ("none", "auto"):
        return {}
    if body.structured_outputs or (body.response_format or {}).get("type", "text") != "text":
        raise InvalidParameter("tool_choice", "that requires a call excludes any other structure")
    tools = body.tools or []
    if isinstance(choice, NamedTool):
        schema = named_schema(tools, choice.function.name)
    else:
        schema = required_schema(tools, one=body.parallel_tool_calls is False)
    return {"structured_outputs": {"json": schema, "whitespace_pattern": _SPACING}}


def _left_to_think(serving: Serving, prompt: Prompt, reasoning: str) -> str | None:
    """The reasoning parser for what follows a prompt in which the template may have begun the
    thoughts already, or ended them: then an answer follows, and none is needed.
    """
    last = serving.need_tokenizer().decode(prompt.ids[-_TAIL:]).rstrip()
    if last.endswith(THINK_END):
        return None
    return BEGUN if last.endswith(THINK_BEGIN) else reasoning


def _free_thoughts(
    params: SamplingParams, wanted: StructuredOutputs, reasoning: str
) -> SamplingParams:
    """The form is one of the answer: what the reasoning parser takes for thoughts is free."""
    if wanted.after is not None:
        return params
    opening = None if always_thinks(reasoning) else THINK_BEGIN
    return replace(params, structured_outputs=replace(wanted, after=THINK_END, opening=opening))


def _parser(
    serving: Serving, body: ChatRequest, reasoning: str | None
) -> tuple[Callable[[], TextParser] | None, bool]:
    """How the text is read, and whether its special tokens are needed for that."""
    settings, choice = serving.settings, body.choice_of_tool
    if isinstance(choice, NamedTool):
        name = choice.function.name
        return (lambda: read_after(reasoning, NamedCall(name))), False
    if choice == "required":
        return (lambda: read_after(reasoning, RequiredCalls())), False
    tools = None
    if choice == "auto":
        if not settings.enable_auto_tool_choice:
            raise InvalidParameter(
                "tool_choice",
                '"auto" needs a server started with --enable-auto-tool-choice and '
                "--tool-call-parser",
            )
        tools = settings.tool_call_parser
    if tools is None and reasoning is None:
        return None, False
    special = make_parser(tools=tools, reasoning=reasoning).needs_special_tokens
    if tools is not None and body.parallel_tool_calls is False:
        return (lambda: FirstCall(make_parser(tools=tools, reasoning=reasoning))), special
    return (lambda: make_parser(tools=tools, reasoning=reasoning)), special
