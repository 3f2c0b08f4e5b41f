"""Runs steps: owns the weights' leaves, the pages and the sampler's state.

Pages and sampler are values: each step takes them, donated, and gives back new ones. Dispatch never
waits for the device.
"""

from collections.abc import Iterable, Sequence as Items
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec
from jax.stages import Compiled

from jaxgen import sampling
from jaxgen.engine.compiler_pool import CompilerPool
from jaxgen.engine.lowering import abstract_logits
from jaxgen.engine.model import Model
from jaxgen.engine.pages import Pages, abstract_pages
from jaxgen.engine.program_keys import Draw, Forward, Kind, ProgramKey
from jaxgen.engine.programs import Programs
from jaxgen.engine.small_memory import make_holes
from jaxgen.engine.step import Drawing
from jaxgen.ragged.buckets import Bucket
from jaxgen.sampling import (
    COMPILED_APART,
    Demand,
    Sampled,
    SamplerState,
    SamplingParams,
    SlotRow,
    TokenLogprobs,
    compiled_demands,
)
from jaxgen_models.cache import LayerPages


class StepFailed(RuntimeError):
    """A step died on the device; the KV cache it was given is gone, every sequence with it."""


class StepRunner:
    """Device state, and the programs over it."""

    def __init__(self, model: Model, programs: Programs) -> None:
        """programs: over the same model, or its shapes. Pages are made for their sizes."""
        self.model = model
        self._sizes = programs.sizes
        self._programs = programs
        self._replicated = NamedSharding(model.mesh, PartitionSpec())
        self._eager = programs.eager
        self._between_holes: list[jax.Array] = []
        self.reset()

    def reset(self) -> None:
        """Fresh pages and sampler state; whatever sequences were in them is lost."""
        self._spent: dict[int, jax.Array] = {}
        self._pages: Pages = []  # the old ones go first: two caches would not fit
        shapes = self._abstract_pages()
        make = jax.jit(
            lambda: jax.tree.map(lambda s: jax.numpy.zeros(s.shape, s.dtype), shapes),
            out_shardings=jax.tree.map(lambda s: s.sharding, shapes),
        )
        self._pages = make()
        self._sampler: SamplerState = sampling.init(
            self._sizes.num_slots, self.model.config.vocab_size, self._replicated
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
    def late_compiles(self) -> int:
        """Programs that were compiled after `warm_up`, each of which stalled every request."""
        return self._programs.late

    @property
    def compile_seconds(self) -> float:
        """What `warm_up` took."""
        return self._programs.seconds

    @property
    def compiled_steps(self) -> int:
        """How many programs there are."""
        return len(self._programs)

    @property
    def loads_late(self) -> bool:
        """Whether programs reach their device when they first run, not when they are compiled."""
        return self.model.mesh.devices.flat[0].platform != "cpu"

    @property
    def sampling_kinds(self) -> tuple[Demand, ...]:
        """The kinds of draws that there are on this platform."""
        return compiled_demands(self.model.mesh.devices.flat[0].platform)

    def sample(self, bucket: Bucket, packed: np.ndarray, demand: Demand = Demand.ANY) -> Sampled:
        """Dispatches a step that samples; the result is on its way to the host when it returns.

        demand: the most that any of its rows asks for.
        """
        (drawing,) = self._forward(Kind.NEXT, bucket, packed)
        self._spent[bucket.rows] = drawing.logits
        return self._draw(bucket, drawing, demand)

    def score(
        self, bucket: Bucket, packed: np.ndarray, targets: np.ndarray
    ) -> tuple[Sampled, TokenLogprobs]:
        """As `sample`, whatever rows ask for, and the log-probabilities of targets [tokens]."""
        drawing, scores = self._forward(Kind.SCORED, bucket, packed, targets)
        self._spent[bucket.rows] = drawing.logits
        return self._draw(bucket, drawing, COMPILED_APART[-1]), _on_its_way(scores)

    def _draw(self, bucket: Bucket, drawing: Drawing, demand: Demand) -> Sampled:
        known = demand if demand in self.sampling_kinds else self.sampling_kinds[-1]
        draw = self._programs[Draw(bucket.rows, known)]
        try:
            with jax.disable_jit(self._eager):
                self._sampler, sampled = draw(self._sampler, drawing)
        except jax.errors.JaxRuntimeError as error:
            raise StepFailed(f"the draw of {bucket} failed on the device: {error}") from error
        return _on_its_way(sampled)

    def read[T](self, results: T) -> T:
        """Waits for a step's results and gives them as numpy arrays, in the same tree."""
        try:
            return jax.device_get(results)
        except jax.errors.JaxRuntimeError as error:  # dispatch had been fine
            raise StepFailed(f"a step failed on the device: {error}") from error

    def logits(self, bucket: Bucket, packed: np.ndarray, *, all_tokens: bool) -> jax.Array:
        """float32 logits [rows, padded vocab] of each row's last token, or [tokens, ...] of all."""
        if all_tokens:
            return self._forward(Kind.ALL_LOGITS, bucket, packed)[0]
        return self._forward(Kind.NEXT, bucket, packed)[0].logits

    def hidden(self, bucket: Bucket, packed: np.ndarray) -> jax.Array:
        """[layers + 1, tokens, model]: the embedding's output and each block's."""
        return self._forward(Kind.HIDDEN, bucket, packed)[0]

    def warm_up(self, keys: Iterable[ProgramKey], pool: CompilerPool | None = None) -> None:
        """Compiles programs side by side; from now on a compile is counted as late.

        pool: of processes to compile in; None for one of its own where that pays.

        Admission is compiled by doing it, in slot 0: no request may be in it. Nothing happens where
        steps run op by op.
        """
        if self._eager:
            return
        keys = list(keys)
        self._programs.compile_all(keys, pool)
        if self.model.mesh.devices.flat[0].platform == "gpu":
            self._between_holes = make_holes(self._replicated)
        for rows in {key.rows for key in keys if isinstance(key, Draw)}:
            self._spent[rows] = self._take_spent(rows)
        for params in (SamplingParams(), SamplingParams(presence_penalty=1.0)):
            vocab = int(self.model.config.vocab_size)
            self.admit(0, sampling.slot_row(params, vocab_size=vocab, seed=0))
        for state in sampling.compile_mask_sizes(self._sampler):
            self._sampler = state

    def compiled(self, key: ProgramKey) -> Compiled:
        """A program, to be looked at: memory, aliases, HLO. Nothing is run."""
        return self._programs.compiled(key)

    def _forward(self, kind: Kind, bucket: Bucket, *inputs: np.ndarray) -> tuple[Any, ...]:
        forward = self._programs[Forward(bucket, kind)]
        try:
            with jax.disable_jit(self._eager):
                self._pages, *results = forward(
                    self.model.leaves,
                    self._pages,
                    self._take_spent(bucket.rows) if kind.draws else (),
                    self._sampler.last_token,
                    *map(self._send, inputs),
                )
        except jax.errors.JaxRuntimeError as error:
            raise StepFailed(f"step {bucket} failed on the device: {error}") from error
        return tuple(results)

    def _take_spent(self, rows: int) -> jax.Array:
        """The memory of logits that were drawn from, or of none where somebody was given them."""
        shape = abstract_logits(self.model, rows)
        spent = self._spent.pop(rows, None)
        if spent is None:
            spent = jax.numpy.zeros(shape.shape, shape.dtype, device=shape.sharding)
        return spent

    def _send(self, packed: np.ndarray) -> jax.Array:
        return jax.device_put(packed, self._replicated)

    def _abstract_pages(self) -> Pages:
        return abstract_pages(self.model, self._sizes.num_blocks, self._sizes.block_size)


def _on_its_way[T](results: T) -> T:
    """The same arrays, which begin to travel to the host."""
    for leaf in jax.tree.leaves(results):
        leaf.copy_to_host_async()
    return results
