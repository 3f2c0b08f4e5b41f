"""The compiled programs of a runner, by what they are for; made when first wanted, or all at once.

Tracing and lowering hold Python's lock, compiling does not: programs compile in threads while
others are lowered. Where it pays, other processes do both. What a store has kept needs neither.
"""

import logging
import os
import pickle
import threading
import time
import warnings
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from contextlib import nullcontext
from dataclasses import replace
from typing import Any, Protocol

from jax.stages import Compiled, Lowered, Wrapped

from jaxgen.compile_cache import jax_cache_left_out
from jaxgen.engine.compiler_order import Answer, Request
from jaxgen.engine.compiler_pool import CompilerFailed, CompilerPool, useful_pool
from jaxgen.engine.executables import UNREADABLE, pack, unpack
from jaxgen.engine.lowering import draw_arguments, forward_arguments
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
from pallas_kernels.dispatch import chosen, prepare_loading
from pallas_kernels.lowering import lower

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
        self._devices = list(model.mesh.devices.flat)
        self._programs: dict[ProgramKey, Callable[..., Any]] = {}
        self._complete = False
        self._compiling = threading.Lock()
        self._abandoned = False

    def __len__(self) -> int:
        """How many there are."""
        return len(self._programs)

    def __getitem__(self, key: ProgramKey) -> Callable[..., Any]:
        """The program, which is compiled now unless `compile_all` has had it."""
        if key not in self._programs:
            if self._complete:
                self.late += 1
                logger.error("late compile of %s: every request waits for it", key)
            self._programs[key] = self._jitted(key) if self.eager else self.lower(key).compile()
        return self._programs[key]

    def compile_all(self, keys: Iterable[ProgramKey], pool: CompilerPool | None = None) -> None:
        """Compiles them, or reads them from the store; from now on others are late.

        pool: of processes to compile in; None for one of its own where that pays. Nothing happens
        where programs run op by op. Where another thread is at it, this one waits, and does what is
        left. Abandoned if somebody says so meanwhile, or closes the pool.
        """
        if self.eager:
            return
        with self._compiling:
            wanted = self._unmade(keys)
            own = useful_pool(self._model, len(wanted)) if pool is None else None
            with own or nullcontext():
                self._make(wanted, pool or own)
            self._complete = True

    def abandon(self) -> None:
        """Has `compile_all` end with the programs that are being compiled."""
        self._abandoned = True

    def _unmade(self, keys: Iterable[ProgramKey]) -> list[ProgramKey]:
        return [key for key in dict.fromkeys(keys) if key not in self._programs]

    def _make(self, wanted: Sequence[ProgramKey], pool: CompilerPool | None) -> None:
        began, store = time.monotonic(), self._store_now()
        with ThreadPoolExecutor(max_workers=os.cpu_count() or 1) as threads:
            found = threads.map(lambda key: self._kept(store, key), wanted)
            kept = {key: program for key, program in zip(wanted, found, strict=True) if program}
            missing = [key for key in wanted if key not in kept]
            if pool is None:
                made = self._compile_here(missing, store, threads)
            else:
                made = self._compile_elsewhere(missing, store, threads, pool)
        self._programs |= kept | {key: future.result() for key, future in made.items()}
        self.seconds += time.monotonic() - began
        if wanted:
            logger.info(
                "%d programs compiled and %d read in %.1f s",
                *(len(made), len(kept), time.monotonic() - began),
            )

    def _compile_here(
        self, keys: Iterable[ProgramKey], store: ProgramStore | None, threads: ThreadPoolExecutor
    ) -> dict[ProgramKey, Future[Compiled]]:
        """Lowers one after the other, each compiles in a thread."""
        made: dict[ProgramKey, Future[Compiled]] = {}
        for key in keys:
            if self._abandoned:
                threads.shutdown(wait=False, cancel_futures=True)
                raise Abandoned("programs are no longer wanted")
            made[key] = threads.submit(self._compile, store, key, self.lower(key))
        return made

    def _compile_elsewhere(
        self,
        keys: Iterable[ProgramKey],
        store: ProgramStore | None,
        threads: ThreadPoolExecutor,
        pool: CompilerPool,
    ) -> dict[ProgramKey, Future[Compiled]]:
        """Each is loaded in a thread as it comes; what a process failed to make is made here."""
        prepare_loading(self._devices[0].platform)
        made: dict[ProgramKey, Future[Compiled]] = {}
        asked = {pool.submit(Request(key, self.sizes)): key for key in _longest_first(keys)}
        for future in as_completed(asked):
            if self._abandoned or pool.closed:
                raise Abandoned("programs are no longer wanted")
            key = asked[future]
            try:
                made[key] = threads.submit(self._take, store, key, future.result())
            except CompilerFailed as error:
                logger.warning("compiling in this process, since another did not: %s", error)
                made[key] = threads.submit(self._compile, store, key, self.lower(key))
        return made

    def _take(self, store: ProgramStore | None, key: ProgramKey, answer: Answer) -> Compiled:
        """A program of another process."""
        for message, category in answer.warnings:
            warnings.warn(message, category, stacklevel=2)
        try:
            program = unpack(answer.data, self._devices)
        except UNREADABLE as error:
            logger.warning("compiling in this process what another one did: %s: %s", key, error)
            return self._compile(store, key, self.lower(key))
        if store is not None:
            store.write(key, self._arguments(key), answer.data)
        return program

    def temporary_bytes(
        self, bucket: Bucket, *, beside: Iterable[Draw] = (), pool: CompilerPool | None = None
    ) -> int:
        """Bytes that steps of a bucket need beside weights, cache and logits, on one device.

        Those that score prompts: they do what all do, and more. beside: compiled in the meantime.
        pool: of processes to compile in.
        """
        demand = compiled_demands(self._devices[0].platform)[-1]
        keys = Forward(bucket, Kind.SCORED), Draw(bucket.rows, demand)
        with self._compiling:
            self._make(self._unmade([*keys, *beside]), pool)
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
        return lower(self._jitted(key), *self._arguments(key))

    def _store_now(self) -> ProgramStore | None:
        """The store, unless somebody chose implementations, which its keys do not tell apart."""
        return None if chosen() else self._store

    def _kept(self, store: ProgramStore | None, key: ProgramKey) -> Compiled | None:
        return None if store is None else store.read(key, self._arguments(key))

    def _compile(self, store: ProgramStore | None, key: ProgramKey, lowered: Lowered) -> Compiled:
        """In this process; kept, where there is a store."""
        if store is None:
            return lowered.compile()
        # Elsewhere JAX's cache is worth having: it knows what an edit of our sources leaves alone.
        on_cpu = self._devices[0].platform == "cpu"
        with jax_cache_left_out() if on_cpu else nullcontext():
            compiled = lowered.compile()
        try:
            store.write(key, self._arguments(key), pack(compiled))
        except (ValueError, TypeError, pickle.PicklingError) as error:
            logger.warning("%s cannot be kept: %s", key, error)
        return compiled

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


def _longest_first(keys: Iterable[ProgramKey]) -> list[ProgramKey]:
    """Forwards of many tokens have the most kernels, draws none: they take longest and least."""
    return sorted(keys, key=lambda key: -key.bucket.tokens if isinstance(key, Forward) else 0)
