"""Full blocks by what they hold: whoever begins alike reads them instead of computing them.

A block's name is a hash of its tokens and of the name before it, so that it stands for all tokens
up to its end. Names are 256 bits of SHA-2: nobody can make two prompts that share a name, so that
tokens need not be kept and compared, and no user reads another's keys by accident or intent.
"""

import hashlib
from array import array
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from jaxgen.ragged.sequence import CacheGroup

type BlockName = bytes


class Hit(NamedTuple):
    """What the cache has of a prompt: its first `tokens`, whole blocks.

    held: blocks that a sequence which begins with them owns at once, in each cache group; a window
        needs the last of them only. taken: how many of those nobody owns now.
    """

    tokens: int
    held: tuple[int, ...]
    taken: tuple[int, ...]


class PrefixCache:
    """Names of blocks to their ids, and back, in each cache group.

    It does not own blocks: the allocator says which are free, and reclaims the oldest when it must;
    then they are forgotten here. queried_tokens: of prompts that were looked up when they were
    first begun; hit_tokens: of those, tokens that were there.
    """

    def __init__(
        self,
        groups: Sequence[CacheGroup],
        block_size: int,
        *,
        length_class: Callable[[int], int] = lambda anchor: 0,
    ) -> None:
        """length_class: prompts of the same class and the same tokens have the same keys; by
        default the length of a prompt changes nothing (Sequence.anchor).
        """
        self._groups = tuple(groups)
        self._block_size = block_size
        self._length_class = length_class
        self._blocks: tuple[dict[BlockName, int], ...] = tuple({} for _ in groups)
        self._names: tuple[dict[int, BlockName], ...] = tuple({} for _ in groups)
        self.queried_tokens = 0
        self.hit_tokens = 0

    def root(self, anchor: int, salt: str | None) -> BlockName:
        """What all names of a request follow from: whatever changes its keys beside its tokens.

        salt: requests share blocks only with those of the same salt.
        """
        extra = f"{self._length_class(anchor)}:{'' if salt is None else 'salt:' + salt}"
        return hashlib.sha256(extra.encode("utf-8", "surrogatepass")).digest()

    def extend(self, root: BlockName, names: list[BlockName], token_ids: Sequence[int]) -> None:
        """Appends the names of the whole blocks in `token_ids`, which follow the named ones."""
        size = self._block_size * array("i").itemsize
        data = array("i", token_ids).tobytes()
        name = names[-1] if names else root
        for begin in range(0, len(data) - size + 1, size):
            name = hashlib.sha256(name + data[begin : begin + size]).digest()
            names.append(name)

    def find(self, names: Sequence[BlockName]) -> int:
        """How many of its first blocks a sequence of these names need not compute.

        Each group must have all of them that the next query sees.
        """
        length = len(names)
        for cache, blocks in zip(self._groups, self._blocks, strict=True):
            if cache.window is None:
                length = next((i for i in range(length) if names[i] not in blocks), length)
        windowed = [
            (cache, blocks)
            for cache, blocks in zip(self._groups, self._blocks, strict=True)
            if cache.window is not None
        ]
        while length:
            missing = [self._last_missing(names, length, *group) for group in windowed]
            lacking = [block for block in missing if block is not None]
            if not lacking:
                return length
            # A shorter beginning needs that block too, until it ends before it.
            length = min(lacking)
        return 0

    def _last_missing(
        self, names: Sequence[BlockName], length: int, cache: CacheGroup, blocks: dict
    ) -> int | None:
        """The last block that the query behind `length` blocks sees and that is not there."""
        first = cache.first_block(length * self._block_size, self._block_size)
        return next((i for i in range(length - 1, first - 1, -1) if names[i] not in blocks), None)

    def owned(self, names: Sequence[BlockName]) -> list[tuple[int, list[int]]]:
        """(first, ids) of each group: what a sequence that begins so owns of these blocks."""
        end = len(names) * self._block_size
        firsts = [cache.first_block(end, self._block_size) for cache in self._groups]
        return [
            (first, [blocks[name] for name in names[first:]])
            for first, blocks in zip(firsts, self._blocks, strict=True)
        ]

    def add(self, group: int, names: Sequence[BlockName], ids: Sequence[int]) -> list[int]:
        """The blocks hold what they are named after; returns those that no other stands for."""
        new = []
        for name, block in zip(names, ids, strict=True):
            if self._blocks[group].setdefault(name, block) == block:
                self._names[group][block] = name
                new.append(block)
        return new

    def forget(self, group: int, ids: Iterable[int]) -> None:
        """The blocks are about to hold something else; those without a name are fine."""
        names, blocks = self._names[group], self._blocks[group]
        for block in ids:
            name = names.pop(block, None)
            if name is not None:
                del blocks[name]

    def clear(self) -> None:
        """Nothing is known of any block."""
        for mapping in (*self._blocks, *self._names):
            mapping.clear()

    def named(self, group: int) -> dict[int, BlockName]:
        """A copy of the ids that have a name, with it; for tests and for a look at live state."""
        return dict(self._names[group])
