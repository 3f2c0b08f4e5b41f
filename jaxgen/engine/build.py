"""The composition root: from a checkpoint and a configuration to an engine that can step."""

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from jaxgen.config import EngineConfig
from jaxgen.engine.engine import InferenceEngine
from jaxgen.engine.frame import Frame, Sized
from jaxgen.engine.layout import mesh_layout
from jaxgen.engine.length_class import length_class
from jaxgen.engine.model import Model, build_model
from jaxgen.engine.runner import StepRunner
from jaxgen.ragged.prefix_cache import PrefixCache
from jaxgen.ragged.state import StateManager
from jaxgen_checkpoints.checkpoint import Checkpoint, open_checkpoint
from jaxgen_checkpoints.load import abstract, bytes_to_load, load
from jaxgen_checkpoints.load_progress import loading_bar
from jaxgen_checkpoints.mesh_layout import MeshLayout
from jaxgen_checkpoints.quantized import widened
from jaxgen_checkpoints.random_weights import random_weights
from jaxgen_checkpoints.readers.shape_source import ShapeSource
from jaxgen_checkpoints.store import save_snapshot
from jaxgen_models.policy import InferencePolicy
from jaxgen_models.registry import find_policy

logger = logging.getLogger(__name__)

type PolicyName = type[InferencePolicy] | str | None


@dataclass(frozen=True, slots=True)
class Described:
    """A checkpoint mapped onto a mesh, before any weight is read."""

    checkpoint: Checkpoint
    policy: InferencePolicy
    layout: MeshLayout
    weights: dict[str, Any]
    reason: str

    def loaded_dtype(self, dtype: str) -> np.dtype:
        """Of what `dtype` asks for: "auto" is the checkpoint's own."""
        return jnp.dtype(self.policy.config.dtype if dtype == "auto" else dtype)

    def shapes(self, dtype: str) -> Model:
        """The model with shapes and shardings for weights."""
        shapes = abstract(self.weights, self.layout, self.loaded_dtype(dtype))
        return build_model(self.policy, shapes, self.layout)


def describe(
    checkpoint: Checkpoint, config: EngineConfig | None = None, *, policy: PolicyName = None
) -> Described:
    """Finds the policy and maps every tensor; what is wrong is refused here, no weight loaded.

    config: says how many devices share the model, and how; None for one device.
    """
    choice = find_policy(checkpoint.config, checkpoint.source.tensors(), policy)
    layout = mesh_layout(choice.policy, config or EngineConfig())
    weights = choice.policy.build_container_map().describe(
        checkpoint.source, layout, strict=choice.policy.strict
    )
    return Described(checkpoint, choice.policy, layout, weights, choice.reason)


@dataclass(frozen=True, slots=True)
class Loaded:
    """A model on its devices, and what its arrays are: enough to run it and to save it."""

    described: Described
    weights: dict[str, Any]
    model: Model

    def save(self, folder: Path) -> None:
        """Writes a snapshot that any mesh can read back."""
        checkpoint = self.described.checkpoint
        save_snapshot(
            folder,
            self.weights,
            self.described.weights,
            policy=self.described.policy.family,
            config=checkpoint.config,
            generation_config=checkpoint.generation_config,
            gguf_tokenizer=checkpoint.gguf_tokenizer,
        )


def config_checkpoint(config: Mapping[str, Any], policy: PolicyName = None) -> Checkpoint:
    """A checkpoint of which there is only the config: to plan, to compile, to fill at random."""
    config, _ = widened(config, ShapeSource({}))
    choice = find_policy(config, {}, policy)
    shapes = choice.policy.build_container_map().expected_tensors()
    return Checkpoint(None, dict(config), {}, ShapeSource(shapes), None)


def load_model(
    described: Described, dtype: str, *, progress: bool = True, load_format: str = "auto"
) -> Loaded:
    """Reads the weights onto the mesh. dtype: "auto" is the checkpoint's own.

    progress: show a bar with GB/s where stderr is a terminal. load_format: "dummy" makes random
    weights on the devices instead of reading any.
    """
    kind = described.loaded_dtype(dtype)
    total = bytes_to_load(described.weights, described.layout, kind)
    if load_format == "dummy":
        weights = random_weights(described.weights, described.layout, kind)
    else:
        with loading_bar(total, show=progress) as seen:
            weights = load(described.weights, described.layout, kind, seen)
    logger.info("%s; %.2f GB of weights as %s", described.reason, total / 1e9, kind.name)
    model = build_model(described.policy, weights, described.layout)
    return Loaded(described, weights, model)


def build_engine(
    described: Described,
    config: EngineConfig,
    *,
    load_format: str = "auto",
    compile_ahead: bool = False,
) -> InferenceEngine:
    """An engine with its weights loaded and its KV cache sized.

    load_format: as `load_model` takes it. compile_ahead: while weights are loaded, every step of
    generation is compiled; `warm_up` waits for what is not there yet. RefusedInput where no memory
    is left for a cache: before a weight is read, unless compile_ahead.
    """
    frame = Frame(described.shapes(config.dtype), config)
    if compile_ahead and not config.enforce_eager:  # op by op nothing is compiled beforehand
        with frame.ahead() as ahead:
            loaded = load_model(described, config.dtype, load_format=load_format)
            sized = ahead.sized()
    else:
        sized = frame.sized()
        loaded = load_model(described, config.dtype, load_format=load_format)
    return _assemble(frame, sized, loaded)


def _assemble(frame: Frame, sized: Sized, loaded: Loaded) -> InferenceEngine:
    config, model = frame.config, loaded.model
    state = StateManager(
        frame.groups,
        sized.num_blocks,
        block_size=frame.block_size,
        max_context=frame.max_context,
        max_tracked=config.max_tracked_sequences,
        num_slots=config.max_num_seqs,
        prefix_cache=PrefixCache(
            frame.groups, frame.block_size, length_class=length_class(model.policy)
        )
        if config.enable_prefix_caching
        else None,
    )
    return InferenceEngine(
        model,
        config,
        state=state,
        runner=StepRunner(model, sized.programs),
        buckets=frame.buckets,
        save=loaded.save,
    )


def build_hf_engine(
    path: str | Path | Checkpoint,
    engine_config: EngineConfig | Mapping[str, Any] | None = None,
    *,
    policy: PolicyName = None,
) -> InferenceEngine:
    """An engine for a Hugging Face checkpoint folder, a .gguf file or a snapshot of ours.

    An opened checkpoint will do as well: `memory_checkpoint(tree, config)` makes one of arrays.
    engine_config: an EngineConfig or a dict, flat or nested as DeepSpeed's. policy: a class of your
    own, a family's name, "auto" for a Llama-like stranger, or None for the registry. RefusedInput
    for whatever cannot be served, before anything is placed on a device.
    """
    config = EngineConfig.from_any(engine_config)
    checkpoint = path if isinstance(path, Checkpoint) else open_checkpoint(path)
    described = describe(checkpoint, config, policy=policy)
    return build_engine(described, config)
