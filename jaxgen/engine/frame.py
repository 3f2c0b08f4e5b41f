"""An engine but for its weights: what follows from shapes alone, and so can be there before them.

A first start compiles for a minute; a large checkpoint is read for as long.
"""

from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from dataclasses import dataclass
from typing import Self

from jaxgen.compile_cache import program_folder
from jaxgen.config import EngineConfig
from jaxgen.engine.compiler_pool import CompilerPool, useful_pool
from jaxgen.engine.lowering import kept_logits_bytes
from jaxgen.engine.memory import (
    blocks_per_sequence,
    check_block_tables,
    memory_limit,
    plan_blocks,
)
from jaxgen.engine.model import Model
from jaxgen.engine.pages import abstract_pages
from jaxgen.engine.program_keys import ProgramKey, Sizes, draws, generation_programs
from jaxgen.engine.program_store import ProgramStore
from jaxgen.engine.programs import Programs
from jaxgen.engine.scoring import scoring_buckets
from jaxgen.ragged.buckets import SMALLEST_MIXED, Buckets
from jaxgen.ragged.sequence import CacheGroup
from jaxgen.sampling import Demand, compiled_demands
from jaxgen_checkpoints.errors import ConfigError
from jaxgen_models.policy import InferencePolicy
from pallas_kernels.attend_chain import longest_context as attended_in_chain
from pallas_kernels.pages import KVPages

DEFAULT_BLOCK_SIZE = 64


@dataclass(frozen=True, slots=True)
class Sized:
    """Blocks of each cache group, and programs for a cache of so many."""

    num_blocks: tuple[int, ...]
    programs: Programs


class Frame:
    """Attributes (to be read): config, max_context in tokens, block_size, groups, buckets."""

    def __init__(self, model: Model, config: EngineConfig) -> None:
        """model: over shapes with shardings. RefusedInput for limits that do not fit it."""
        self.config = config
        self.max_context = longest_context(model, config)
        self.block_size = config.block_size or DEFAULT_BLOCK_SIZE
        self.groups = tuple(CacheGroup(window) for window in model.policy.cache_windows)
        self._device = model.mesh.devices.flat[0]
        self.buckets = Buckets.for_limits(
            max_tokens=config.max_num_batched_tokens,
            max_rows=config.max_num_seqs,
            max_blocks=-(-self.max_context // self.block_size),
            smallest_mixed=smallest_mixed(self._device.platform),
            short_blocks=short_blocks(model, self.block_size),
        )
        check_block_tables(self.buckets)
        self._model = model

    def sized(self, *, all_draws: bool = False, pool: CompilerPool | None = None) -> Sized:
        """Compiles a step to learn how much memory is left for the cache, if that matters.

        all_draws: compiles them beside it. pool: of processes to compile in. RefusedInput where
        nothing is left.
        """
        config, model = self.config, self._model
        folder = program_folder()
        store = None
        if folder is not None and ProgramStore.serves(model):
            store = ProgramStore(folder, model)
        sizes = Sizes.smallest(len(self.groups), self.block_size, config.max_num_seqs)
        programs = Programs(model, sizes, eager=config.enforce_eager, store=store)

        def temporary_bytes() -> int:
            largest = scoring_buckets(self.buckets)[-1]
            beside = draws(self.buckets, self._demands) if all_draws else ()
            step = programs.temporary_bytes(largest, beside=beside, pool=pool)
            return step + kept_logits_bytes(model, self.buckets)

        num_blocks = self.num_blocks(memory_limit(self._device), temporary_bytes)
        return Sized(num_blocks, programs.resized(num_blocks))

    def num_blocks(self, limit: int | None, temporary_bytes: Callable[[], int]) -> tuple[int, ...]:
        """Blocks of each cache group on a device of so many bytes, as `plan_blocks` counts them."""
        return plan_blocks(
            self.config.kv_memory,
            self._model,
            blocks_per_sequence(
                self.groups,
                block_size=self.block_size,
                max_context=self.max_context,
                step_tokens=self.config.max_num_batched_tokens,
            ),
            block_size=self.block_size,
            max_sequences=self.config.max_num_seqs,
            keeps_prefixes=self.config.enable_prefix_caching,
            limit=limit,
            temporary_bytes=temporary_bytes,
        )

    def ahead(self) -> "Ahead":
        """Begins with all of it, and every step of generation after it, in a thread."""
        return Ahead(self, useful_pool(self._model, len(self.programs())))

    def programs(self) -> list[ProgramKey]:
        """What generation can need."""
        return generation_programs(self.buckets, self._demands)

    @property
    def _demands(self) -> tuple[Demand, ...]:
        return compiled_demands(self._device.platform)


class Ahead:
    """A frame that is being sized, and its programs compiled; a warm-up then waits for them.

    As a context manager it gives that up where an error ends it: there will be no engine.
    """

    def __init__(self, frame: Frame, pool: CompilerPool | None) -> None:
        """pool: of processes to compile in, closed when all is done."""
        self._pool = pool
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="ahead")
        here = copy_context()  # what is chosen here is to hold there as well
        self._sized = self._thread.submit(
            lambda: here.run(frame.sized, all_draws=True, pool=pool),
        )
        self._thread.submit(here.run, lambda: self._compile(frame.programs()))
        self._thread.shutdown(wait=False)

    def sized(self) -> Sized:
        """Waits for it; RefusedInput as `Frame.sized` raises it."""
        return self._sized.result()

    def _compile(self, programs: Iterable[ProgramKey]) -> None:
        try:
            self.sized().programs.compile_all(programs, self._pool)
        finally:
            self._close()

    def _close(self) -> None:
        if self._pool is not None:
            self._pool.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Compiles no further after an error."""
        if kind is None:
            return
        self._thread.shutdown(wait=False, cancel_futures=True)
        self._close()
        if self._sized.done() and self._sized.exception() is None:
            self._sized.result().programs.abandon()


def smallest_mixed(platform: str) -> int:
    """Tokens of the smallest mixed step: an accelerator reads its weights for 64 as fast as for 1,
    and each size costs seconds of compiling.
    """
    return SMALLEST_MIXED if platform == "cpu" else 64


def short_blocks(model: Model, block_size: int) -> int | None:
    """Blocks of the longest row whose attention begins its layers' kernels; None if none does."""
    if model.mesh.size > 1:
        return None
    pages = abstract_pages(model, (1,) * len(model.policy.cache_windows), block_size)
    tokens = [attended_in_chain(each) for each in pages if isinstance(each, KVPages)]
    least = min((each for each in tokens if each is not None), default=None)
    return None if least is None else least // block_size


def longest_context(model: Model | InferencePolicy, config: EngineConfig) -> int:
    """Tokens of the longest sequence: what is asked for, if the model's positions reach so far."""
    longest = model.config.max_context
    if config.max_model_len is None:
        return longest
    if config.max_model_len > longest and not model.config.unbounded:
        raise ConfigError(
            f"max_model_len = {config.max_model_len} is longer than the model's own limit, "
            f"max_position_embeddings = {longest}"
        )
    return config.max_model_len
