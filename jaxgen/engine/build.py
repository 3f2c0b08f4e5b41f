"""The composition root: from a checkpoint and a configuration to an engine that can step."""

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax

from jaxgen.compile_cache import program_folder
from jaxgen.config import EngineConfig
from jaxgen.engine.engine import InferenceEngine
from jaxgen.engine.length_class import length_class
from jaxgen.engine.lowering import kept_logits_bytes
from jaxgen.engine.memory import (
    blocks_per_sequence,
    check_block_tables,
    memory_limit,
    plan_blocks,
)
from jaxgen.engine.model import Model, build_model
from jaxgen.engine.program_store import ProgramStore
from jaxgen.engine.runner import StepRunner
from jaxgen.engine.scoring import scoring_buckets
from jaxgen.ragged.buckets import SMALLEST_MIXED, Buckets
from jaxgen.ragged.prefix_cache import PrefixCache
from jaxgen.ragged.sequence import CacheGroup
from jaxgen.ragged.state import StateManager
from jaxgen_checkpoints.checkpoint import Checkpoint, open_checkpoint
from jaxgen_checkpoints.errors import ConfigError
from jaxgen_checkpoints.load import bytes_to_load, load
from jaxgen_checkpoints.load_progress import loading_bar
from jaxgen_checkpoints.mesh_layout import MeshLayout, make_mesh
from jaxgen_checkpoints.quantized import widened
from jaxgen_checkpoints.random_weights import random_weights
from jaxgen_checkpoints.readers.shape_source import ShapeSource
from jaxgen_checkpoints.store import save_snapshot
from jaxgen_models.policy import InferencePolicy
from jaxgen_models.registry import find_policy

logger = logging.getLogger(__name__)

DEFAULT_BLOCK_SIZE = 64

type PolicyName = type[InferencePolicy] | str | None


@dataclass(frozen=True, slots=True)
class Described:
    """A checkpoint mapped onto a mesh, before any weight is read."""

    checkpoint: Checkpoint
    policy: InferencePolicy
    layout: MeshLayout
    weights: dict[str, Any]
    reason: str


def describe(
    checkpoint: Checkpoint,
    *,
    tensor_parallel_size: int = 1,
    expert_parallel_size: int = 1,
    policy: PolicyName = None,
) -> Described:
    """Finds the policy and maps every tensor; what is wrong is refused here, no weight loaded."""
    choice = find_policy(checkpoint.config, checkpoint.source.tensors(), policy)
    check_experts(choice.policy, expert_parallel_size)
    layout = MeshLayout(make_mesh(tensor=tensor_parallel_size, expert=expert_parallel_size))
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
    name = described.policy.config.dtype if dtype == "auto" else dtype
    kind = jax.numpy.dtype(name)
    total = bytes_to_load(described.weights, described.layout, kind)
    if load_format == "dummy":
        weights = random_weights(described.weights, described.layout, kind)
    else:
        with loading_bar(total, show=progress) as seen:
            weights = load(described.weights, described.layout, kind, seen)
    logger.info("%s; %.2f GB of weights as %s", described.reason, total / 1e9, name)
    model = build_model(described.policy, weights, described.layout.mesh)
    return Loaded(described, weights, model)


def build_engine(loaded: Loaded, config: EngineConfig) -> InferenceEngine:
    """An engine over a loaded model: KV cache sized, nothing compiled yet."""
    model = loaded.model
    max_context = longest_context(model, config)
    block_size = config.block_size or DEFAULT_BLOCK_SIZE
    groups = tuple(CacheGroup(window) for window in model.policy.cache_windows)
    buckets = Buckets.for_limits(
        max_tokens=config.max_num_batched_tokens,
        max_rows=config.max_num_seqs,
        max_blocks=-(-max_context // block_size),
        smallest_mixed=smallest_mixed(model.mesh.devices.flat[0].platform),
    )
    check_block_tables(buckets)
    per_sequence = blocks_per_sequence(
        groups,
        block_size=block_size,
        max_context=max_context,
        step_tokens=config.max_num_batched_tokens,
    )

    folder = program_folder()
    store = None
    if folder is not None and ProgramStore.serves(model):
        store = ProgramStore(folder, model)

    def runner(num_blocks: tuple[int, ...]) -> StepRunner:
        return StepRunner(
            model,
            num_blocks=num_blocks,
            block_size=block_size,
            num_slots=config.max_num_seqs,
            eager=config.enforce_eager,
            store=store,
        )

    def temporary_bytes() -> int:
        # What a step needs beside its arguments does not depend on how many pages there are.
        step = runner((1,) * len(groups)).temporary_bytes(scoring_buckets(buckets)[-1])
        return step + kept_logits_bytes(model, buckets)

    num_blocks = plan_blocks(
        config.kv_memory,
        model,
        per_sequence,
        block_size=block_size,
        max_sequences=config.max_num_seqs,
        keeps_prefixes=config.enable_prefix_caching,
        limit=memory_limit(model.mesh.devices.flat[0]),
        temporary_bytes=temporary_bytes,
    )
    state = StateManager(
        groups,
        num_blocks,
        block_size=block_size,
        max_context=max_context,
        max_tracked=config.max_tracked_sequences,
        num_slots=config.max_num_seqs,
        prefix_cache=PrefixCache(groups, block_size, length_class=length_class(model.policy))
        if config.enable_prefix_caching
        else None,
    )
    return InferenceEngine(
        model,
        config,
        state=state,
        runner=runner(num_blocks),
        buckets=buckets,
        save=loaded.save,
    )


def smallest_mixed(platform: str) -> int:
    """Tokens of the smallest mixed step: an accelerator reads its weights for 64 as fast as for 1,
    and each size costs seconds of compiling.
    """
    return SMALLEST_MIXED if platform == "cpu" else 64


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
    described = describe(
        checkpoint,
        tensor_parallel_size=config.tensor_parallel_size,
        expert_parallel_size=config.expert_parallel_size,
        policy=policy,
    )
    longest_context(described.policy, config)
    return build_engine(load_model(described, config.dtype), config)


def check_experts(policy: InferencePolicy, expert_parallel_size: int) -> None:
    """ConfigError if there are fewer experts than groups of devices to divide them over."""
    experts = int(getattr(policy.config, "num_experts", 0))
    if expert_parallel_size > max(1, experts):
        raise ConfigError(
            f"expert_parallel_size = {expert_parallel_size}, but the model has "
            f"{experts or 'no'} experts: leave it out, or lower it"
        )


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
