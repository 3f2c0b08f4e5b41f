"""Which blocks of one cache group are free, and how many owners each of the others has.

Everything is validated before anything changes, so that a refused call leaves no trace.
"""

from collections.abc import Sequence

import numpy as np

type BlockIds = int | Sequence[int] | np.ndarray


class OutOfBlocks(ValueError):
    """More blocks were asked for than are free; nothing was taken."""


class BlockAllocator:
    """Block ids [0, num_blocks), each free or with a count of its owners.

    The block freed last is given out first: its page is the likeliest to be in a cache.
    """

    __slots__ = ("_counts", "_free", "_num_free")

    def __init__(self, num_blocks: int) -> None:
        """All blocks are free. ValueError if there are none."""
        if num_blocks < 1:
            raise ValueError(f"An allocator needs at least 1 block, got {num_blocks}.")
        # A stack: the free ids are _free[:_num_free], the next one to go is the last of them.
        self._free = np.arange(num_blocks - 1, -1, -1, dtype=np.int32)
        self._num_free = num_blocks
        self._counts = np.zeros(num_blocks, dtype=np.int32)

    @property
    def num_blocks(self) -> int:
        """Blocks in all."""
        return self._counts.size

    @property
    def free_blocks(self) -> int:
        """Blocks that nobody owns."""
        return self._num_free

    @property
    def used_blocks(self) -> int:
        """Blocks that somebody owns; a shared block counts once."""
        return self.num_blocks - self._num_free

    @property
    def counts(self) -> np.ndarray:
        """Owners of each block, int32 [num_blocks]; a read-only view."""
        view = self._counts.view()
        view.flags.writeable = False
        return view

    def allocate(self, num_blocks: int) -> np.ndarray:
        """int32 ids of that many free blocks, each with one owner now. OutOfBlocks if too few."""
        if num_blocks < 0:
            raise ValueError(f"The number of blocks must not be negative, got {num_blocks}.")
        if num_blocks > self._num_free:
            raise OutOfBlocks(
                f"{num_blocks} blocks are asked for, {self._num_free} of {self.num_blocks} are "
                "free: flush sequences, or give the KV cache more memory."
            )
        rest = self._num_free - num_blocks
        ids = self._free[rest : self._num_free][::-1].copy()
        self._counts[ids] = 1
        self._num_free = rest
        return ids

    def share(self, ids: BlockIds) -> None:
        """One more owner for each of the ids, all of which must be in use. ValueError otherwise."""
        self._counts[self._owned(ids)] += 1

    def free(self, ids: BlockIds) -> int:
        """One owner less for each of the ids; returns how many blocks became free by that.

        ValueError, and nothing changes, if any id is out of range, free already, or given twice.
        """
        owned = self._owned(ids)
        self._counts[owned] -= 1
        released = owned[self._counts[owned] == 0]
        self._free[self._num_free : self._num_free + released.size] = released[::-1]
        self._num_free += released.size
        return released.size

    def check(self) -> None:
        """AssertionError unless each block is either free, once, or has owners."""
        free = self._free[: self._num_free]
        assert np.unique(free).size == free.size, "a block is free twice"
        assert (self._counts >= 0).all(), "a block has a negative count"
        assert np.array_equal(np.sort(free), np.flatnonzero(self._counts == 0)), (
            "the free list and the counts disagree"
        )

    def _owned(self, ids: BlockIds) -> np.ndarray:
        given = np.atleast_1d(np.asarray(ids))
        if given.size == 0:
            return np.empty(0, dtype=np.int32)
        if given.ndim != 1 or given.dtype.kind not in "iu":
            raise ValueError(
                f"Block ids must be integers in a list, got {given.dtype} {given.shape}."
            )
        outside = given[(given < 0) | (given >= self.num_blocks)]
        if outside.size:
            raise ValueError(
                f"Block ids must lie in [0, {self.num_blocks}), got {outside[0]}; nothing is freed."
            )
        unowned = given[self._counts[given] == 0]
        if unowned.size:
            raise ValueError(f"Block {unowned[0]} is free already; nothing is freed.")
        if given.size > 1:
            ordered = np.sort(given)
            twice = ordered[1:][ordered[1:] == ordered[:-1]]
            if twice.size:
                raise ValueError(f"Block {twice[0]} is given twice; nothing is freed.")
        return given
