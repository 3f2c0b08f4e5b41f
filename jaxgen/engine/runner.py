"""Runs steps: owns the weights' leaves, the pages and the sampler's state, and what is compiled.

Pages and sampler are values: each step takes them, donated, and gives back new ones. Dispatch never
waits for the device.
"""

import logging
import os
import time
from collections.abc import Iterable, Sequence as Items
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec
from jax.stages import Compiled, Lowered, Wrapped

from jaxgen import sampling
from jaxgen.engine.lowering import step_arguments
from jaxgen.engine.model import Model
from jaxgen.engine.pages import Pages, abstract_pages
from jaxgen.engine.step import hidden_step, logits_step, sampling_step, scoring_step
from jaxgen.ragged.buckets import Bucket
from jaxgen.sampling import (
    COMPILED_APART,
    Demand,
    Sampled,
    SamplerState,
    SamplingParams,
    SlotRow,
    TokenLogprobs,
)
from jaxgen_models.cache import LayerPages

logger = logging.getLogger(__name__)

SCORED = "scored"
"""The kind of step that samples, and says how likely each token of the prompts was."""

type StepKey = tuple[str, Bucket]


class StepFailed(RuntimeError):
    """A step died on the device; the KV cache it was given is gone, every sequence with it."""


class StepRunner:
    """Device state and the jitted steps over it.

    late_compiles: steps that were compiled after `warm_up`, each of which stalled every request.
    compile_seconds: what `warm_up` took.
    """

    def __init__(
        self,
        model: Model,
        *,
        num_blocks: tuple[int, ...],
        block_size: int,
        num_slots: int,
        eager: bool = False,
    ) -> None:
        """eager: steps run op by op, so that a debugger and the faulty line meet."""
        self.model = model
        self.late_compiles = 0
        self.compile_seconds = 0.0
        self._num_blocks = num_blocks
        self._block_size = block_size
        self._num_slots = num_slots
        self._replicated = NamedSharding(model.mesh, PartitionSpec())
        self._steps: dict[StepKey, Wrapped] = {}
        self._warm = False
        self._eager = eager
        self.reset()

    def reset(self) -> None:
        """Fresh pages and sampler state; whatever sequences were in them is lost."""
        self._pages: Pages = []  # the old ones go first: two caches would not fit
        shapes = self._abstract_pages()
        make = jax.jit(
            lambda: jax.tree.map(lambda s: jax.numpy.zeros(s.shape, s.dtype), shapes),
            out_shardings=jax.tree.map(lambda s: s.sharding, shapes),
        )
        self._pages = make()
        self._sampler: SamplerState = sampling.init(
            self._num_slots, self.model.config.vocab_size, self._replicated
        )

    @property
    def pages(self) -> tuple[LayerPages, ...]:
        """The KV cache, one entry a layer, as the last dispatched step will leave it."""
        return tuple(self._pages)

    def admit(self, slot: int, row: SlotRow) -> None:
        """Writes a request's sampling settings into its slot; in order with the steps."""
        try:
            self._sampler = sampling.admit(self._sampler, slot, row)
        except jax.errors.JaxRuntimeError as error:
            raise StepFailed(f"admission to slot {slot} failed on the device: {error}") from error

    def write_masks(self, slots: Items[int], masks: np.ndarray) -> None:
        """Says which tokens slots may draw, int32 [len(slots), words]; in order with the steps."""
        try:
            self._sampler = sampling.write_masks(self._sampler, slots, masks)
        except jax.errors.JaxRuntimeError as error:
            raise StepFailed(f"masks could not be written on the device: {error}") from error

    @property
    def compiled_steps(self) -> int:
        """Programs of steps that there are."""
        return len(self._steps)

    @property
    def sampling_kinds(self) -> tuple[Demand, ...]:
        """The kinds of sampling steps that there are on this platform."""
        on_cpu = self.model.mesh.devices.flat[0].platform == "cpu"
        return (Demand.ANY,) if on_cpu else COMPILED_APART

    def sample(self, bucket: Bucket, packed: np.ndarray, demand: Demand = Demand.ANY) -> Sampled:
        """Dispatches a step that samples; the result is on its way to the host when it returns.

        demand: the most that any of its rows asks for.
        """
        (sampled,) = self._sampling(
            demand if demand in self.sampling_kinds else Demand.ANY, bucket, packed
        )
        return sampled

    def score(
        self, bucket: Bucket, packed: np.ndarray, targets: np.ndarray
    ) -> tuple[Sampled, TokenLogprobs]:
        """As `sample`, whatever rows ask for, and the log-probabilities of targets [tokens]."""
        sampled, scores = self._sampling(SCORED, bucket, packed, targets)
        return sampled, scores

    def _sampling(self, kind: str, bucket: Bucket, *inputs: np.ndarray) -> tuple[Any, ...]:
        step = self._step(kind, bucket)
        try:
            with jax.disable_jit(self._eager):
                self._pages, self._sampler, *results = step(
                    self.model.leaves, self._pages, self._sampler, *map(self._send, inputs)
                )
        except jax.errors.JaxRuntimeError as error:
            raise StepFailed(f"step {bucket} failed on the device: {error}") from error
        for leaf in jax.tree.leaves(results):
            leaf.copy_to_host_async()
        return tuple(results)

    def read[T](self, results: T) -> T:
        """Waits for a step's results and gives them as numpy arrays, in the same tree."""
        try:
            return jax.device_get(results)
        except jax.errors.JaxRuntimeError as error:  # dispatch had been fine
            raise StepFailed(f"a step failed on the device: {error}") from error

    def logits(self, bucket: Bucket, packed: np.ndarray, *, all_tokens: bool) -> jax.Array:
        """float32 logits [rows, vocab] of each row's last token, or [tokens, vocab] of all."""
        return self._read("all_logits" if all_tokens else "logits", bucket, packed)

    def hidden(self, bucket: Bucket, packed: np.ndarray) -> jax.Array:
        """[layers + 1, tokens, model]: the embedding's output and each block's."""
        return self._read("hidden", bucket, packed)

    def warm_up(self, keys: Iterable[StepKey]) -> None:
        """Compiles steps in parallel threads; from now on a compile is counted as late.

        Admission is compiled by doing it, in slot 0: no request may be in it. Nothing happens where
        steps run op by op.
        """
        if self._eager:
            return
        began = time.monotonic()
        wanted = [key for key in keys if key not in self._steps]
        steps = {key: self._trace(key) for key in wanted}
        with ThreadPoolExecutor(max_workers=os.cpu_count() or 1) as pool:
            list(pool.map(lambda lowered: lowered.compile(), [s[1] for s in steps.values()]))
        # jit finds the executable of an identical lowering; nothing is compiled a second time.
        self._steps |= {key: jitted for key, (jitted, _) in steps.items()}
        for params in (SamplingParams(), SamplingParams(presence_penalty=1.0)):
            vocab = int(self.model.config.vocab_size)
            self.admit(0, sampling.slot_row(params, vocab_size=vocab, seed=0))
        for state in sampling.compile_mask_sizes(self._sampler):
            self._sampler = state
        self._warm = True
        self.compile_seconds += time.monotonic() - began

    def compiled(self, key: StepKey) -> Compiled:
        """A step's program, to be looked at: memory, aliases, HLO. Nothing is run or kept."""
        return self._trace(key)[1].compile()

    def temporary_bytes(self, key: StepKey) -> int:
        """Bytes that a compiled step needs beside its arguments, on one device."""
        analysis = self.compiled(key).memory_analysis()
        return int(analysis.temp_size_in_bytes) if analysis is not None else 0

    def _read(self, kind: str, bucket: Bucket, packed: np.ndarray) -> jax.Array:
        step = self._step(kind, bucket)
        try:
            with jax.disable_jit(self._eager):
                self._pages, out = step(self.model.leaves, self._pages, self._send(packed))
        except jax.errors.JaxRuntimeError as error:
            raise StepFailed(f"step {bucket} failed on the device: {error}") from error
        return out

    def _send(self, packed: np.ndarray) -> jax.Array:
        return jax.device_put(packed, self._replicated)

    def _step(self, kind: str, bucket: Bucket) -> Wrapped:
        key = (kind, bucket)
        if key not in self._steps:
            if self._warm:
                self.late_compiles += 1
                logger.error("late compile of step %s %s: every request waits for it", kind, bucket)
            self._steps[key] = self._make(key)
        return self._steps[key]

    def _make(self, key: StepKey) -> Wrapped:
        kind, bucket = key
        if kind in set(Demand):
            return sampling_step(self.model, bucket, Demand(kind), eager=self._eager)
        if kind == SCORED:
            demand = self.sampling_kinds[-1]
            return scoring_step(self.model, bucket, demand, eager=self._eager)
        if kind == "hidden":
            return hidden_step(self.model, bucket, eager=self._eager)
        return logits_step(self.model, bucket, all_logits=kind == "all_logits", eager=self._eager)

    def _trace(self, key: StepKey) -> tuple[Wrapped, Lowered]:
        kind, bucket = key
        shapes = step_arguments(
            self.model,
            bucket,
            num_blocks=self._num_blocks,
            block_size=self._block_size,
            num_slots=self._num_slots,
            samples=kind in {*Demand, SCORED},
        )
        if kind == SCORED:
            shapes.append(
                jax.ShapeDtypeStruct((bucket.tokens,), np.int32, sharding=self._replicated)
            )
        jitted = self._make(key)
        return jitted, jitted.lower(*shapes)

    def _abstract_pages(self) -> Pages:
        return abstract_pages(self.model, self._num_blocks, self._block_size)
