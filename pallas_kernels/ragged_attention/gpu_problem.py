"""What is fixed when an attention kernel for Hopper is built."""

from typing import Any, NamedTuple


class Problem(NamedTuple):
    """What is fixed when the kernel is built. tokens: the most that one item of decode has."""

    heads: int
    kv_heads: int
    head_dim: int
    page_size: int
    dtype: Any
    scale: float
    soft_cap: float | None
    sinks: bool
    alibi: bool
    window: int | None
    interpret: Any
    tokens: int = 1

    @property
    def group(self) -> int:
        """Query heads of a KV head: the rows of a tile that count."""
        return self.heads // self.kv_heads

    @property
    def stride(self) -> int:
        """Rows of decode's tile from one token's first to the next one's."""
        return self.group if self.tokens == 1 else self.aligned_group

    @property
    def aligned_group(self) -> int:
        """Rows of a tile that one of several tokens takes: a power of two, so that each one's lie
        aligned in shared memory.
        """
        rows = 1
        while rows < self.group or rows * self.head_dim * 2 % 128:
            rows *= 2
        return rows

    @property
    def part_rows(self) -> int:
        """Rows of a partial result in scratch memory."""
        return -(-self.tokens * self.stride // 8) * 8
