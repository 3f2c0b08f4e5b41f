"""Where every attention head lives when heads, any number of them, are dealt over tensor shards.

A shard owns whole KV slots; a KV slot is one key/value head and the query heads that read it.
"""

from dataclasses import dataclass

import numpy as np

NOBODY = -1
"""In a gather index: this place holds zeros."""


@dataclass(frozen=True, slots=True)
class HeadLayout:
    """Deal `heads` query heads and `kv_heads` KV heads over `shards`.

    There are `kv_slots` KV slots, the same number on each shard. With fewer KV heads than shards
    each KV head is copied into `copies` neighbouring slots and its query heads are dealt over
    them; slots left over are empty. A slot has room for `group` query heads; room left over is
    empty.

    Example, 7 heads and 1 KV head on 4 shards: 4 slots, all of KV head 0, with query heads
    0 1 | 2 3 | 4 5 | 6 -.
    """

    heads: int
    kv_heads: int
    shards: int

    def __post_init__(self) -> None:
        """Refuse what cannot be grouped."""
        if self.heads < 1 or self.kv_heads < 1 or self.shards < 1:
            raise ValueError(f"expected positive numbers of heads, kv_heads and shards, got {self}")
        if self.heads % self.kv_heads:
            raise ValueError(
                f"{self.heads} query heads cannot be grouped over {self.kv_heads} KV heads: "
                "the first must be a multiple of the second"
            )

    @property
    def queries_per_kv_head(self) -> int:
        """Query heads that read one KV head: the group size on one shard."""
        return int(self.heads) // int(self.kv_heads)

    @property
    def kv_slots(self) -> int:
        """KV heads held by all shards together, copies and empty slots included."""
        return self.shards * _ceil_div(int(self.kv_heads), self.shards)

    @property
    def copies(self) -> int:
        """In how many slots each KV head is held."""
        return self.kv_slots // int(self.kv_heads)

    @property
    def group(self) -> int:
        """Query heads that a slot has room for."""
        return _ceil_div(self.queries_per_kv_head, self.copies)

    def kv_of_slot(self) -> np.ndarray:
        """[kv_slots] int64: the KV head of each slot, -1 for an empty one."""
        slot = np.arange(self.kv_slots)
        return np.where(slot < self.copies * int(self.kv_heads), slot // self.copies, NOBODY)

    def queries_of_slot(self) -> np.ndarray:
        """[kv_slots, group] int64: the query heads of each slot, -1 where there is none."""
        slot, place = np.arange(self.kv_slots)[:, None], np.arange(self.group)[None, :]
        within = slot % self.copies * self.group + place
        live = (slot < self.copies * int(self.kv_heads)) & (within < self.queries_per_kv_head)
        return np.where(live, slot // self.copies * self.queries_per_kv_head + within, NOBODY)

    def qkv_rows(self) -> np.ndarray:
        """[kv_slots * (group + 2)] int64: rows of the canonical fused QKV weight, -1 for zeros.

        Canonical rows: for each KV head its query heads, then its key head, then its value head.
        """
        stride = self.queries_per_kv_head + 2
        kv, queries = self.kv_of_slot()[:, None], self.queries_of_slot()
        query_rows = kv * stride + queries % self.queries_per_kv_head
        key_value_rows = kv * stride + self.queries_per_kv_head + np.arange(2)
        rows = np.concatenate(
            [np.where(queries < 0, NOBODY, query_rows), np.where(kv < 0, NOBODY, key_value_rows)],
            axis=1,
        )
        return rows.reshape(-1)

    def query_rows(self) -> np.ndarray:
        """[kv_slots * group] int64: query heads in placed order, -1 for zeros."""
        return self.queries_of_slot().reshape(-1)


def _ceil_div(a: int, b: int) -> int:
    return -(-a // b)
