"""Where the time of an answer went: loading, compiling, the first token, and the others."""

from dataclasses import asdict, dataclass
from typing import Any

from jaxgen.commands.compile_clock import CompileClock


@dataclass(frozen=True, slots=True)
class Timing:
    """Seconds and tokens; what is fast or slow is told without the time that compiling took.

    first_token_seconds: None where it was not watched; then tokens_per_second is over everything,
    prompts included. Otherwise it counts what came after the first token, None where nothing did.
    """

    prompt_tokens: int
    output_tokens: int
    load_seconds: float | None
    compile_seconds: float
    first_token_seconds: float | None
    tokens_per_second: float | None

    def line(self) -> str:
        """All of it in one line for people."""
        parts = []
        if self.tokens_per_second is not None:
            parts.append(f"{self.tokens_per_second:.1f} tokens/s")
        if self.first_token_seconds is not None:
            parts.append(f"first token after {self.first_token_seconds:.2f} s")
        parts.append(f"{self.prompt_tokens} prompt and {self.output_tokens} output tokens")
        if self.load_seconds is not None:
            parts.append(f"loaded in {self.load_seconds:.1f} s")
        parts.append(f"compiled for {self.compile_seconds:.1f} s")
        return f"[{', '.join(parts)}]"

    def as_json(self) -> dict[str, Any]:
        """Field names and numbers."""
        return asdict(self)


def measure(
    clock: CompileClock,
    *,
    began: float,
    first: float | None = None,
    ended: float,
    prompt_tokens: int,
    output_tokens: int,
    load_seconds: float | None,
) -> Timing:
    """Timing of what was asked for at `began`, had a token at `first`, and ended at `ended`.

    These are readings of time.perf_counter().
    """
    start, tokens = (began, output_tokens) if first is None else (first, output_tokens - 1)
    seconds = ended - start - clock.seconds(start, ended)
    waited = None if first is None else max(0.0, first - began - clock.seconds(began, first))
    return Timing(
        prompt_tokens=prompt_tokens,
        output_tokens=output_tokens,
        load_seconds=load_seconds,
        compile_seconds=clock.seconds(began, ended),
        first_token_seconds=waited,
        tokens_per_second=tokens / seconds if tokens > 0 and seconds > 0 else None,
    )
