"""The compiled programs of a runner, by what they are for; made when first wanted, or all at once.

Tracing and lowering hold Python's lock, compiling does not: programs compile in threads while
others are lowered, here one after the other, or in processes where that pays. What a store has kept
needs neither.
"""

import logging
import os
import threading
import time
import warnings
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from contextlib import closing
from dataclasses import replace
from typing import Any, Protocol

from jax.stages import Compiled, Lowered, Wrapped

from jaxgen.engine.exchange import pack, unpack
from jaxgen.engine.lowering import draw_arguments, forward_arguments
from jaxgen.engine.lowering_order import Request
from jaxgen.engine.lowering_pool import LoweringFailed, LoweringPool, end_early, useful_processes
from jaxgen.engine.model import Model
from jaxgen.engine.program_keys import Draw, Forward, Kind, ProgramKey, Sizes
from jaxgen.engine.program_store import ProgramStore
from jaxgen.engine.step import (
    all_logits_step,
    draw_step,
    forward_step,
    hidden_step,
    scoring_step,
)
from jaxgen.ragged.buckets import Bucket
from jaxgen.sampling import compiled_demands
from pallas_kernels.dispatch import chosen, prepare_loading, target_platform

logger = logging.getLogger(__name__)

_FORWARDS = {
    Kind.NEXT: forward_step,
    Kind.SCORED: scoring_step,
    Kind.ALL_LOGITS: all_logits_step,
    Kind.HIDDEN: hidden_step,
}


class Memory(Protocol):
    """What a compiled program says of its memory on one device."""

    temp_size_in_bytes: int
    output_size_in_bytes: int
    alias_size_in_bytes: int
    generated_code_size_in_bytes: int


def step_bytes(forward: Memory, draw: Memory) -> int:
    """Bytes that a step needs beside weights, cache, sampler and logits.

    Its results are still there when the next step is under way.
    """
    results = forward.output_size_in_bytes - forward.alias_size_in_bytes
    return int(max(forward.temp_size_in_bytes, draw.temp_size_in_bytes) + 2 * results)


class Abandoned(RuntimeError):
    """Compiling was given up, since nobody will run what is compiled."""


class Programs:
    """Programs over one model, whose leaves may be shapes: nothing here runs one.

    late: those made after `compile_all`, each of which stalled every request. seconds: what
    `compile_all` took. sizes, eager: as given.
    """

    def __init__(
        self, model: Model, sizes: Sizes, *, eager: bool = False, store: ProgramStore | None = None
    ) -> None:
        """eager: programs run op by op, so that a debugger and the faulty line meet."""
        self.late = 0
        self.seconds = 0.0
        self.sizes = sizes
        self.eager = eager
        self._model = model
        self._store = store
        self._programs: dict[ProgramKey, Callable[..., Any]] = {}
        self._complete = False
        self._compiling = threading.Lock()
        self._abandoned = False

    def __len__(self) -> int:
        """How many there are."""
        return len(self._programs)

    def __getitem__(self, key: ProgramKey) -> Callable[..., Any]:
        """The program, which compiles when it is first called unless `compile_all` has had it."""
        if key not in self._programs:
            if self._complete:
                self.late += 1
                logger.error("late compile of %s: every request waits for it", key)
            self._programs[key] = self._jitted(key)
        return self._programs[key]

    def compile_all(self, keys: Iterable[ProgramKey], processes: int | None = None) -> None:
        """Compiles them in threads, or reads them from the store; from now on others are late.

        processes: to lower forwards in, instead of in this one; None for as many as pay. Nothing
        happens where programs run op by op. Where another thread is at it, this one waits, and does
        what is left. Abandoned if somebody says so meanwhile.
        """
        if self.eager:
            return
        with self._compiling:
            self._compile_all(keys, processes)
            self._complete = True
            end_early()

    def abandon(self) -> None:
        """Has `compile_all` end with the programs that are being compiled."""
        self._abandoned = True

    def _compile_all(self, keys: Iterable[ProgramKey], processes: int | None) -> None:
        began, store = time.monotonic(), self._store_now()
        wanted = [key for key in dict.fromkeys(keys) if key not in self._programs]
        with ThreadPoolExecutor(max_workers=os.cpu_count() or 1) as pool:
            found = pool.map(lambda key: self._kept(store, key), wanted)
            kept = dict(zip(wanted, found, strict=True))
            missing = [key for key, program in kept.items() if program is None]
            made: dict[ProgramKey, Future[Compiled]] = {}
            with closing(self._lowered(missing, processes)) as lowered:
                for key, program in lowered:
                    if self._abandoned:
                        pool.shutdown(wait=False, cancel_futures=True)
                        raise Abandoned("programs are no longer wanted")
                    made[key] = pool.submit(self._compile, store, key, program)
        for key, program in kept.items():
            self._programs[key] = made[key].result() if program is None else program
        self.seconds += time.monotonic() - began
        if wanted:
            logger.info(
                "%d programs compiled and %d read in %.1f s",
                len(made),
                len(wanted) - len(made),
                time.monotonic() - began,
            )

    def temporary_bytes(self, bucket: Bucket, *, beside: Iterable[Draw] = ()) -> int:
        """Bytes that steps of a bucket need beside weights, cache and logits, on one device.

        Those that score prompts: they do what all do, and more. beside: compiled in the meantime.
        """
        demand = compiled_demands(self._model.mesh.devices.flat[0].platform)[-1]
        keys = Forward(bucket, Kind.SCORED), Draw(bucket.rows, demand)
        with self._compiling:
            self._compile_all([*keys, *beside], 0)
        forward, draw = (self.compiled(key).memory_analysis() for key in keys)
        return 0 if forward is None or draw is None else step_bytes(forward, draw)

    def resized(self, num_blocks: tuple[int, ...]) -> "Programs":
        """Programs for a cache of so many blocks; draws, which do not see it, are kept."""
        sizes = replace(self.sizes, num_blocks=num_blocks)
        resized = Programs(self._model, sizes, eager=self.eager, store=self._store)
        resized._programs = {k: p for k, p in self._programs.items() if isinstance(k, Draw)}
        return resized

    def compiled(self, key: ProgramKey) -> Compiled:
        """A program to be looked at: memory, aliases, HLO. Nothing is run."""
        program = self._programs.get(key)
        if isinstance(program, Compiled):
            return program
        store = self._store_now()
        kept = self._kept(store, key)
        if kept is not None:
            return kept
        return self._compile(store, key, self.lower(key))

    def lower(self, key: ProgramKey) -> Lowered:
        """The lowering of a program, from shapes alone."""
        return self._jitted(key).lower(*self._arguments(key))

    def packed(self, key: Forward) -> bytes:
        """The same of a forward, for another process to compile."""
        return pack(self._jitted(key), self._arguments(key), target_platform())

    def _lowered(
        self, keys: list[ProgramKey], processes: int | None
    ) -> Generator[tuple[ProgramKey, Lowered]]:
        """Each with its lowering, as they come."""
        forwards = [key for key in keys if isinstance(key, Forward)]
        if processes is None:
            processes = useful_processes(self._model, len(forwards))
        if not processes:
            yield from ((key, self.lower(key)) for key in keys)
            return
        prepare_loading(self._model.mesh.devices.flat[0].platform)
        with LoweringPool(self._model, processes) as pool:
            asked = {pool.submit(Request(key, self.sizes)): key for key in _longest_first(forwards)}
            yield from ((key, self.lower(key)) for key in keys if isinstance(key, Draw))
            for future in as_completed(asked):
                key = asked[future]
                try:
                    answer = future.result()
                except LoweringFailed as error:
                    logger.warning("lowering in this process, since another did not: %s", error)
                    yield key, self.lower(key)
                    continue
                for message, category in answer.warnings:
                    warnings.warn(message, category, stacklevel=2)
                yield key, unpack(answer.data, self._arguments(key), self._model.mesh)

    def _store_now(self) -> ProgramStore | None:
        """The store, unless somebody chose implementations, which its keys do not tell apart."""
        return None if chosen() else self._store

    def _kept(self, store: ProgramStore | None, key: ProgramKey) -> Compiled | None:
        return None if store is None else store.read(key, self._arguments(key))

    def _compile(self, store: ProgramStore | None, key: ProgramKey, lowered: Lowered) -> Compiled:
        if store is None:
            return lowered.compile()
        return store.compile(key, self._arguments(key), lowered)

    def _jitted(self, key: ProgramKey) -> Wrapped:
        if isinstance(key, Draw):
            return draw_step(self._model, key.demand, eager=self.eager)
        return _FORWARDS[key.kind](self._model, key.bucket, eager=self.eager)

    def _arguments(self, key: ProgramKey) -> tuple[Any, ...]:
        sizes = self.sizes
        if isinstance(key, Draw):
            return draw_arguments(self._model, key.rows, num_slots=sizes.num_slots)
        return forward_arguments(
            self._model,
            key.bucket,
            num_blocks=sizes.num_blocks,
            block_size=sizes.block_size,
            num_slots=sizes.num_slots,
            drawn=key.kind.draws,
            scored=key.kind is Kind.SCORED,
        )


def _longest_first(forwards: Iterable[Forward]) -> list[Forward]:
    """Forwards of many tokens have the most kernels, and take longest to lower and to compile."""
    return sorted(forwards, key=lambda forward: -forward.bucket.tokens)
