"""What `LLM` takes as prompts: text, token ids, vLLM's objects around either, one or many."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from jaxgen_checkpoints.errors import RefusedInput

type PlainPrompt = str | Sequence[int]
"""Text, or token ids that are used as they are."""

type Prompt = PlainPrompt | Mapping[str, Any]
"""The same, or as vLLM has it: {"prompt": text} or {"prompt_token_ids": ids}."""

_TEXT, _IDS = "prompt", "prompt_token_ids"
_EXPECTED = (
    f'expected text, token ids, {{"{_TEXT}": text}}, {{"{_IDS}": ids}}, or a list of such prompts'
)


def as_batch(prompts: Prompt | Sequence[Prompt]) -> list[PlainPrompt]:
    """A list of prompts, where one prompt alone is text, an object or a list of integers.

    RefusedInput for what is neither, and for what an object holds beside text and token ids.
    """
    if isinstance(prompts, str | Mapping):
        return [plain_prompt(prompts)]
    if isinstance(prompts, bytes) or not isinstance(prompts, Iterable):
        raise RefusedInput(f"prompts: {_EXPECTED}; got {_kind(prompts)}")
    listed: list[Any] = list(prompts)
    one_prompt = not any(isinstance(entry, str) or hasattr(entry, "__len__") for entry in listed)
    return (
        [plain_prompt(listed)]
        if listed and one_prompt
        else [plain_prompt(entry) for entry in listed]
    )


def plain_prompt(prompt: object) -> PlainPrompt:
    """One prompt without what is around it. RefusedInput as for a batch."""
    if isinstance(prompt, Mapping):
        others = [k for k, value in prompt.items() if k not in (_TEXT, _IDS) and value is not None]
        if others:
            raise RefusedInput(
                f"a prompt has {', '.join(map(repr, others))}: only {_TEXT!r} and {_IDS!r} are "
                "understood here; leave out what is not needed"
            )
        prompt = prompt.get(_TEXT) if prompt.get(_IDS) is None else prompt[_IDS]
    if isinstance(prompt, str):
        return prompt
    if isinstance(prompt, bytes | Mapping) or not isinstance(prompt, Iterable):
        raise RefusedInput(f"a prompt: {_EXPECTED}; got {_kind(prompt)}")
    return list(prompt)


def _kind(value: object) -> str:
    return "nothing" if value is None else f"{type(value).__name__}: {value!r:.40}"
