"""What ended an answer, as SGLang tells it: a stop string, or a token's id, EOS included."""

from typing import Protocol

from jaxgen.text.tokenizer import Tokenizer


class Ended(Protocol):
    """A continuation, or the last that came of it."""

    @property
    def token_ids(self) -> list[int]:
        """The last of them is the one that ended it, if one did."""
        ...

    @property
    def finish_reason(self) -> str | None:
        """None while it goes on."""
        ...

    @property
    def stop_reason(self) -> int | str | None:
        """The stop string or id; None after EOS."""
        ...


def matched_stop(tokenizer: Tokenizer | None, ended: Ended) -> int | str | None:
    """None at full length, and where a grammar had nothing more to say."""
    if ended.finish_reason != "stop" or ended.stop_reason is not None:
        return ended.stop_reason
    last = ended.token_ids[-1] if ended.token_ids else None
    return last if tokenizer is None or last in tokenizer.special_ids else None
