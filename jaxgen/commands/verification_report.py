"""The outcome of a verification, as a short aligned text and as one JSON object."""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from jaxgen.commands.terminal import table
from jaxgen.verify.compare import Divergence, PromptResult

_HEADER = ("prompt", "tokens", "max error", "bound", "mean KL", "top-1", "greedy", "top-5 error")


@dataclass(frozen=True, slots=True)
class Report:
    """All prompts' results. first_layer: the first layer that diverges, where that was found."""

    model: str
    reference: str
    dtype: str
    prompts: Sequence[PromptResult]
    first_layer: str | None = None

    @property
    def divergence(self) -> Divergence | None:
        """The first of all prompts' divergences; None if the model is verified."""
        return next((p.divergence for p in self.prompts if p.divergence is not None), None)

    def text(self) -> str:
        """A table with one line a prompt, and the verdict."""
        rows: list[tuple[str, ...]] = [_HEADER]
        for number, prompt in enumerate(self.prompts):
            rows.append(
                (
                    str(number),
                    str(prompt.tokens),
                    f"{prompt.max_abs_error:.2e}",
                    f"{prompt.bound:.2g}",
                    f"{prompt.mean_kl:.2e}",
                    f"{prompt.top1_agreement:.2%}",
                    f"{prompt.greedy_equal}/{prompt.greedy_steps}",
                    "-" if prompt.top5_error is None else f"{prompt.top5_error:.2e}",
                )
            )
        lines = [table(rows, right=range(len(_HEADER))), ""]
        found = self.divergence
        if found is None:
            lines.append(f"verified in {self.dtype}: {self.model} agrees with {self.reference}")
        else:
            lines.append(f"MISMATCH in {self.dtype}: {self.model} against {self.reference}")
            lines.append(f"first divergence: {found.sentence}")
            if self.first_layer is not None:
                lines.append(f"first layer to diverge: {self.first_layer}")
        return "\n".join(lines)

    def as_json(self) -> dict[str, Any]:
        """The same in numbers; what is infinite or not a number is null."""
        found = self.divergence
        return {
            "model": self.model,
            "reference": self.reference,
            "dtype": self.dtype,
            "verified": found is None,
            "first_divergence": None if found is None else asdict(found),
            "first_layer": self.first_layer,
            "prompts": [
                {name: _finite(value) for name, value in asdict(prompt).items()}
                for prompt in self.prompts
            ],
        }


def _finite(value: object) -> object:
    return None if isinstance(value, float) and not math.isfinite(value) else value
