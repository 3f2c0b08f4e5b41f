"""From what a client sends to token ids that fit the context, without blocking the event loop."""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from jaxgen.sampling import SamplingParams
from jaxgen.serving.context import Serving
from jaxgen.serving.errors import bad_request

SHORT_TEXT = 2000
"""Characters that are tokenised at once; a longer text goes to a thread, others go on meanwhile."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """Token ids, and the text that they came from (None where the client sent ids)."""

    ids: list[int]
    text: str | None


async def read_prompts(
    serving: Serving,
    given: Sequence[str | Sequence[int]],
    n: int = 1,
    *,
    add_special_tokens: bool = True,
    keep: int | None = None,
    keep_first: bool = False,
    room: int | None = None,
    field: str = "prompt",
) -> list[Prompt]:
    """All prompts of a request that wants `n` continuations of each; as `read_prompt`.

    ApiError, before any is read, for more continuations than a request may ask for.
    """
    check_choices(serving, len(given), n, field)
    prompts: list[Prompt] = []
    for each in given:
        if prompts:
            await asyncio.sleep(0)  # others go on between two short ones
        prompts.append(
            await read_prompt(
                serving,
                each,
                add_special_tokens=add_special_tokens,
                keep=keep,
                keep_first=keep_first,
                room=room,
                field=field,
            )
        )
    return prompts


def check_choices(serving: Serving, prompts: int, n: int, field: str) -> None:
    """ApiError 400 for more continuations than one request may ask for."""
    most = serving.settings.max_choices
    if prompts * n > most:
        message = f"{prompts * n} continuations are asked for at once, at most {most} may"
        raise bad_request(message, "n" if n > 1 else field)


async def read_prompt(
    serving: Serving,
    given: str | Sequence[int],
    *,
    add_special_tokens: bool = True,
    keep: int | None = None,
    keep_first: bool = False,
    room: int | None = None,
    field: str = "prompt",
) -> Prompt:
    """The prompt, cut to `keep` tokens, its last ones unless `keep_first`.

    keep: -1 is what the context holds beside `room` tokens that are to follow, at least one.
    ApiError, about `field`, if it is empty, too long to be read, or has ids of no token.
    """
    if isinstance(given, str):
        tokenizer = serving.need_tokenizer()
        _check_characters(serving, given, field)

        def encode() -> list[int]:
            return tokenizer.encode(given, add_special_tokens=add_special_tokens)

        ids = await off_loop(encode, len(given))
        prompt = Prompt(ids, given)
    else:
        prompt = Prompt(list(given), None)
        _check_vocabulary(serving, prompt.ids, field)
    if keep is not None:
        most = max(1, serving.engine.max_context - (room or 1)) if keep == -1 else keep
        if most < 1:
            message = "truncate_prompt_tokens must be -1 or positive"
            raise bad_request(message, "truncate_prompt_tokens")
        kept = prompt.ids[:most] if keep_first else prompt.ids[-most:]
        prompt = Prompt(kept, prompt.text if len(kept) == len(prompt.ids) else None)
    if not prompt.ids:
        raise bad_request("the prompt is empty: it has no tokens at all", field)
    return prompt


async def off_loop[T](function: Callable[[], T], characters: int) -> T:
    """What `function` gives, called in a thread if there is much for it to read."""
    if characters <= SHORT_TEXT:
        return function()
    return await asyncio.to_thread(function)


def fitted(serving: Serving, prompts: Sequence[Prompt], params: SamplingParams) -> SamplingParams:
    """For a request that names no number of tokens: the usual one, or what the context holds."""
    room = serving.engine.max_context - max(len(prompt.ids) for prompt in prompts)
    if params.max_tokens is None or not 0 < room < params.max_tokens:
        return params
    return replace(params, max_tokens=room)


def check_room(
    serving: Serving,
    prompt: Prompt,
    params: SamplingParams,
    *,
    field: str = "prompt",
    limit: str = "max_tokens",
) -> None:
    """ApiError 400, with the numbers, for what is longer than the context.

    field, limit: what the request calls its prompt, and the tokens that it wants.
    """
    most, length = serving.engine.max_context, len(prompt.ids)
    if length >= most:
        raise bad_request(
            f"This model's maximum context length is {most} tokens, and the prompt alone has "
            f"{length}: shorten the prompt.",
            field,
        )
    if params.max_tokens is not None and length + params.max_tokens > most:
        raise bad_request(
            f"This model's maximum context length is {most} tokens. The prompt has {length} and "
            f"{limit} is {params.max_tokens}, {length + params.max_tokens} together: lower "
            f"{limit} to {most - length}, or shorten the prompt.",
            limit,
        )


def _check_vocabulary(serving: Serving, ids: Sequence[int], field: str) -> None:
    """The engine checks too, and does so for a model whose tokenizer is not here."""
    if serving.engine.tokenizer is None or not ids:
        return
    last = serving.engine.tokenizer.vocab_size - 1
    if max(ids) > last:
        raise bad_request(f"token {max(ids)} is outside of the vocabulary, 0 to {last}", field)


def _check_characters(serving: Serving, text: str, field: str) -> None:
    """Refuses, before a tokenizer reads it, what cannot be short enough in any vocabulary."""
    most = serving.engine.max_context
    if len(text) > most * serving.longest_token:
        raise bad_request(
            f"This model's maximum context length is {most} tokens; a prompt of {len(text)} "
            "characters cannot be that short: shorten it.",
            field,
        )
