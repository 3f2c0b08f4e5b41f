"""How many tokens a request read and wrote, as OpenAI tells it."""

from typing import Any


def usage(prompt: int, completion: int, cached: int) -> dict[str, Any]:
    """The `usage` object."""
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": cached},
    }


def usage_json(prompt: int, completion: int, cached: int) -> str:
    """The same as JSON text: it is in every chunk of some streams."""
    details = f'"prompt_tokens_details":{{"cached_tokens":{cached}}}'
    return (
        f'{{"prompt_tokens":{prompt},"completion_tokens":{completion},'
        f'"total_tokens":{prompt + completion},{details}}}'
    )
