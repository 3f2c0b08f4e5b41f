"""Which blocks of one cache group are free, and how many owners each of the others has.

Everything is validated before anything changes, so that a refused call leaves no trace.
"""

from collections import OrderedDict
from collections.abc import Sequence

import numpy as np

type BlockIds = int | Sequence[int] | np.ndarray


class OutOfBlocks(ValueError):
    """More blocks were asked for than are free; nothing was taken."""


class BlockAllocator:
    """Block ids [0, num_blocks), each free or with a count of its owners.

    The block freed last is given out first: its page is the likeliest to be in a hardware cache.
    Blocks whose contents are worth keeping are given out last, the one that was freed first before
    the others; until then they can be shared again.
    """

    __slots__ = ("_counts", "_free", "_keep", "_kept", "_num_free")

    def __init__(self, num_blocks: int) -> None:
        """All blocks are free. ValueError if there are none."""
        if num_blocks < 1:
            raise ValueError(f"An allocator needs at least 1 block, got {num_blocks}.")
        # A stack: free ids not kept are _free[:_num_free], the next one to go is the last of them.
        self._free = np.arange(num_blocks - 1, -1, -1, dtype=np.int32)
        self._num_free = num_blocks
        self._keep = np.zeros(num_blocks, dtype=bool)
        self._kept: OrderedDict[int, None] = OrderedDict()  # the free ones of _keep, oldest first
        self._counts = np.zeros(num_blocks, dtype=np.int32)

    @property
    def num_blocks(self) -> int:
        """Blocks in all."""
        return self._counts.size

    @property
    def free_blocks(self) -> int:
        """Blocks that nobody owns, kept ones included."""
        return self._num_free + len(self._kept)

    @property
    def used_blocks(self) -> int:
        """Blocks that somebody owns; a shared block counts once."""
        return self.num_blocks - self.free_blocks

    @property
    def counts(self) -> np.ndarray:
        """Owners of each block, int32 [num_blocks]; a read-only view."""
        view = self._counts.view()
        view.flags.writeable = False
        return view

    @property
    def kept(self) -> np.ndarray:
        """Whether each block's contents are worth keeping, bool [num_blocks]; a read-only view."""
        view = self._keep.view()
        view.flags.writeable = False
        return view

    def allocate(self, num_blocks: int) -> np.ndarray:
        """int32 ids of that many free blocks, each with one owner now. OutOfBlocks if too few."""
        if num_blocks < 0:
            raise ValueError(f"The number of blocks must not be negative, got {num_blocks}.")
        if num_blocks > self.free_blocks:
            raise OutOfBlocks(
                f"{num_blocks} blocks are asked for, {self.free_blocks} of {self.num_blocks} are "
                "free: flush sequences, or give the KV cache more memory."
            )
        rest = max(0, self._num_free - num_blocks)
        ids = self._free[rest : self._num_free][::-1].copy()
        self._num_free = rest
        if ids.size < num_blocks:
            oldest = [self._kept.popitem(last=False)[0] for _ in range(num_blocks - ids.size)]
            ids = np.concatenate([ids, np.array(oldest, dtype=np.int32)])
            self._keep[ids] = False
        self._counts[ids] = 1
        return ids

    def keep(self, ids: BlockIds) -> None:
        """The contents of these blocks, which are in use, are worth keeping when they are free."""
        self._keep[self._owned(ids)] = True

    def forget_kept(self) -> None:
        """No contents are worth keeping any more."""
        kept = np.fromiter(self._kept, np.int32, len(self._kept))
        self._free[self._num_free : self._num_free + kept.size] = kept
        self._num_free += kept.size
        self._kept.clear()
        self._keep[:] = False

    def share(self, ids: BlockIds) -> None:
        """One more owner for each of the ids, all of which must be in use or kept.

        ValueError otherwise, and nothing changes.
        """
        shared = self._distinct(ids)
        self._refuse_unowned(shared[~self._keep[shared]])
        for block in shared[self._counts[shared] == 0].tolist():
            del self._kept[block]
        self._counts[shared] += 1

    def free(self, ids: BlockIds) -> int:
        """One owner less for each of the ids; returns how many blocks became free by that.

        Of kept ones the last is reclaimed first: the tail of a sequence before its beginning.
        ValueError, and nothing changes, if any id is out of range, free already, or given twice.
        """
        owned = self._owned(ids)
        self._counts[owned] -= 1
        released = owned[self._counts[owned] == 0][::-1]
        keep = self._keep[released]
        plain = released[~keep]
        self._free[self._num_free : self._num_free + plain.size] = plain
        self._num_free += plain.size
        self._kept.update(dict.fromkeys(released[keep].tolist()))
        return released.size

    def check(self) -> None:
        """AssertionError unless each block is either free, once, or has owners."""
        kept = np.fromiter(self._kept, np.int32, len(self._kept))
        assert self._keep[kept].all(), "a kept block is not worth keeping"
        assert not self._keep[self._free[: self._num_free]].any(), "a block to keep is not kept"
        free = np.concatenate([self._free[: self._num_free], kept])
        assert np.unique(free).size == free.size, "a block is free twice"
        assert (self._counts >= 0).all(), "a block has a negative count"
        assert np.array_equal(np.sort(free), np.flatnonzero(self._counts == 0)), (
            "the free list and the counts disagree"
        )

    def _owned(self, ids: BlockIds) -> np.ndarray:
        given = self._distinct(ids)
        self._refuse_unowned(given)
        return given

    def _refuse_unowned(self, ids: np.ndarray) -> None:
        unowned = ids[self._counts[ids] == 0]
        if unowned.size:
            raise ValueError(f"Block {unowned[0]} is free already; nothing is freed.")

    def _distinct(self, ids: BlockIds) -> np.ndarray:
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
        if given.size > 1:
            ordered = np.sort(given)
            twice = ordered[1:][ordered[1:] == ordered[:-1]]
            if twice.size:
                raise ValueError(f"Block {twice[0]} is given twice; nothing is freed.")
        return given
