"""What is fixed when an attention kernel for Hopper is built."""

from typing import Any, NamedTuple


class Problem(NamedTuple):
    """What is fixed when the kernel is built."""

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

    @property
    def group(self) -> int:
        """Query heads of a KV head: the rows of a tile that count."""
        return self.heads // self.kv_heads

    @property
    def padded_group(self) -> int:
        """Rows of a partial result in scratch memory."""
        return -(-self.group // 8) * 8
