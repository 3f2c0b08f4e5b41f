"""What one token attends is handed on in words, as a mixture chain hands on its residual stream:
that spares a barrier of the whole grid, and the load behind it.
"""

from dataclasses import dataclass, fields
from typing import Any

from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.attend_chain.gpu_attend import HEAD, Attending
from pallas_kernels.mixture_chain.gpu_words import send

_LAYOUT = plgpu.Layout.WG_STRIDED((HEAD,), vec_size=1)


@dataclass(frozen=True, slots=True)
class SendingAttention(Attending):
    """words: where in the state of the calls they lie."""

    words: int = 0

    @classmethod
    def of(cls, one: Attending, words: int) -> "SendingAttention":
        """The same attention, handed on there."""
        return cls(**{each.name: getattr(one, each.name) for each in fields(one)}, words=words)

    def hand_on(self, refs: Any, head: Any) -> None:
        """Send a KV head's outputs, from the line."""
        for index in range(self.group):
            start = pl.multiple_of(self.words + (head * self.group + index) * HEAD, HEAD // 2)
            value = plgpu.load(refs.line.at[index], layout=_LAYOUT, optimized=False)
            send(refs.state.at[pl.ds(start, HEAD)], value, refs.round)
