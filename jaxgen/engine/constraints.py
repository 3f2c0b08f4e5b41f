"""Masks computed beside the loop: rows whose next mask is not ready sit out, the others go on.

A row's mask follows from its last token, so such a row is never scheduled ahead of what was read.
"""

import logging
import os
from collections.abc import Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait

import numpy as np

from jaxgen.grammar.token_mask import ConstraintFailed, MaskSource, words_of

logger = logging.getLogger(__name__)

FORBIDS_ALL = "the request's parameters together forbid every token"

GRACE_SECONDS = 0.002
"""How long a step waits for masks that are nearly there; the device is busy with the last one."""


class Constraint:
    """What one continuation may say next.

    mask: int32 words, one bit a token; to be read when `ready`. ended: nothing may follow. error:
    why the rules cannot go on; refused: for a fault of the request.
    """

    def __init__(self, sources: Sequence[MaskSource], vocab_size: int) -> None:
        self.mask = np.full(words_of(vocab_size), -1, np.int32)
        self.ended = False
        self.error: str | None = None
        self.refused = False
        self._sources = tuple(sources)
        self._job: Future[None] | None = None

    @property
    def changes(self) -> bool:
        """Whether the mask depends on what was said."""
        return any(source.changes for source in self._sources)

    @property
    def job(self) -> "Future[None] | None":
        """What is computing the mask; None before the first."""
        return self._job

    def compute(self, pool: ThreadPoolExecutor, token: int | None) -> None:
        """Has the next mask computed in the pool; `token` was said last (None: nothing yet)."""
        self._job = pool.submit(self._compute, token)

    def _compute(self, token: int | None) -> None:
        mask = np.full_like(self.mask, -1)
        try:
            for source in self._sources:
                if token is not None:
                    source.advance(token)
                source.write(mask)
            self.ended = any(source.ended for source in self._sources)
            if not self.ended and not mask.any():
                raise ConstraintFailed(FORBIDS_ALL)
        except ConstraintFailed as error:
            self.error, self.refused = str(error), True
        self.mask = mask


class ConstraintPool:
    """Threads for the masks of one loop; what is asked for comes back by `settled`."""

    def __init__(self) -> None:
        self._threads: ThreadPoolExecutor | None = None
        self._waiting: dict[int, Constraint] = {}

    @property
    def waiting(self) -> bool:
        """Whether some mask is being computed."""
        return bool(self._waiting)

    def compute(self, uid: int, constraint: Constraint, token: int | None) -> None:
        """Has a request's next mask computed."""
        if self._threads is None:
            most = min(8, os.cpu_count() or 1)
            self._threads = ThreadPoolExecutor(most, thread_name_prefix="jaxgen-masks")
        constraint.compute(self._threads, token)
        self._waiting[uid] = constraint

    def forget(self, uid: int) -> None:
        """The request has ended."""
        self._waiting.pop(uid, None)

    def settled(self) -> list[int]:
        """Requests whose mask is there, after a short wait for those whose is not."""
        jobs = [constraint.job for constraint in self._waiting.values()]
        wait([job for job in jobs if job is not None], timeout=GRACE_SECONDS)
        done = [uid for uid, one in self._waiting.items() if one.job is not None and one.job.done()]
        for uid in done:
            constraint = self._waiting.pop(uid)
            failed = None if constraint.job is None else constraint.job.exception()
            if failed is not None:  # whatever it is, it ends this request and no other
                logger.error("a mask could not be computed", exc_info=failed)
                constraint.error = f"its mask could not be computed: {type(failed).__name__}"
        return done

    def wait(self) -> None:
        """Returns when one mask more is there."""
        jobs = [constraint.job for constraint in self._waiting.values()]
        wait([job for job in jobs if job is not None], return_when=FIRST_COMPLETED)
