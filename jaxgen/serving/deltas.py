"""What a stream gives its reader: everything that came since the reader last looked, once.

Named tuples: one of each is made for every token of every stream.
"""

from typing import NamedTuple

from jaxgen.engine.outputs import FinishReason, TokenLogprob


class CompletionDelta(NamedTuple):
    """What one continuation grew by. text may be empty while token_ids are not, and vice versa.

    logprobs: one entry for each of token_ids; None where they were not asked for. finish_reason,
    stop_reason, error and refused: as in CompletionOutput, in the continuation's last delta.
    """

    index: int  # type: ignore[assignment] (a tuple's method of that name is of no use here)
    text: str
    token_ids: list[int]
    logprobs: list[TokenLogprob] | None
    finish_reason: FinishReason | None
    stop_reason: int | str | None
    error: str | None
    refused: bool = False


class RequestDelta(NamedTuple):
    """What one request grew by: an entry for each continuation that did.

    prompt_token_ids, cached_tokens (of the prompt, found in the prefix cache) and prompt_logprobs
    come with the first delta; they are empty, 0 and None in the others. prompt_logprobs has an
    entry for each prompt token, None for the first. finished: no delta follows.
    """

    request_id: str
    prompt_token_ids: list[int]
    cached_tokens: int
    prompt_logprobs: list[TokenLogprob | None] | None
    completions: list[CompletionDelta]
    finished: bool
