"""A model on a machine: does it fit, how much KV cache is left, what would a step take.

Memory is the engine's own arithmetic over the compiled steps' own analysis. What does not fit is
told before anything is compiled, with what would make it fit.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import jax.numpy as jnp

from jaxgen.config import EngineConfig
from jaxgen.engine.build import PolicyName, config_checkpoint
from jaxgen.engine.frame import DEFAULT_BLOCK_SIZE, Frame, longest_context
from jaxgen.engine.layout import mesh_layout
from jaxgen.engine.lowering import kept_logits_bytes
from jaxgen.engine.memory import usable_bytes
from jaxgen.engine.model import Model, build_model
from jaxgen.engine.pages import block_bytes
from jaxgen.plan.estimate import Estimate, estimates
from jaxgen.plan.program import SCORED, Program, compile_programs
from jaxgen.plan.topology import Topology
from jaxgen_checkpoints.errors import ConfigError, RefusedInput
from jaxgen_checkpoints.load import abstract
from jaxgen_models.registry import find_policy


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes of one device.

    limit: what it has; None for a CPU. usable: what the configuration lets us fill. temporary: what
    an engine keeps free for its steps, as much as the one that scores prompts needs. kv: of the
    cache as the engine would allocate it.
    """

    limit: int | None
    usable: int | None
    weights: int
    temporary: int
    kv: int


@dataclass(frozen=True, slots=True)
class Deployment:
    """One model on one machine.

    replicas: copies of the model that the machine holds, each on `mesh`. enable_expert_parallel:
    whether every device of one has whole experts of its own. shortfall: what is missing
    and what would help; None where the model fits, and then the rest is there. kv_tokens: tokens
    of the longest context that the cache of one replica holds.
    """

    topology: str
    devices: int
    mesh: dict[str, int]
    enable_expert_parallel: bool
    replicas: int
    dtype: str
    max_model_len: int
    memory: Memory
    kv_bytes_per_token: int
    shortfall: str | None = None
    kv_blocks: tuple[int, ...] = ()
    kv_tokens: int = 0
    programs: tuple[Program, ...] = ()
    estimates: tuple[Estimate, ...] = ()

    @property
    def fits(self) -> bool:
        """Whether weights and steps have room beside a KV cache, if only of one block."""
        return self.shortfall is None


def plan_deployment(
    config: Mapping[str, Any],
    topology: Topology,
    engine_config: EngineConfig,
    *,
    context: int | None = None,
    policy: PolicyName = None,
) -> Deployment:
    """Plans the model of a config.json's content on a machine.

    context: keys that a decode step's rows see in the estimate; half the longest sequence if None.
    RefusedInput for what could not be served anywhere; what merely does not fit is in `shortfall`.
    """
    with topology.compiling():
        model = _abstract_model(config, topology, engine_config, policy)
        longest = longest_context(model, engine_config)
        if context is not None and not 1 <= context <= longest:
            raise RefusedInput(
                f"context must be a number of tokens up to max_model_len = {longest}, got {context}"
            )
        plan = _empty(model, topology, engine_config, longest)
        missing = _weights_missing(plan, engine_config)
        if missing is not None:
            advice = _advice(config, topology, engine_config, policy)
            return replace(plan, shortfall=f"{missing}. {advice}")
        return _with_steps(plan, model, topology, engine_config, context)


def _abstract_model(
    config: Mapping[str, Any],
    topology: Topology,
    engine_config: EngineConfig,
    policy: PolicyName,
) -> Model:
    checkpoint = config_checkpoint(config, policy)
    choice = find_policy(checkpoint.config, checkpoint.source.tensors(), policy)
    tensor, expert = engine_config.tensor_parallel_size, engine_config.expert_parallel_size
    _check_replicas(topology, tensor, expert)
    # The compiler wants all devices of the machine: replicas are what the data axis stands for.
    replicas = len(topology.devices) // (tensor * expert)
    layout = mesh_layout(choice.policy, engine_config, replicas=replicas, devices=topology.devices)
    described = choice.policy.build_container_map().describe(
        checkpoint.source, layout, strict=choice.policy.strict
    )
    name = choice.policy.config.dtype if engine_config.dtype == "auto" else engine_config.dtype
    return build_model(choice.policy, abstract(described, layout, jnp.dtype(name)), layout)


def _check_replicas(topology: Topology, tensor: int, expert: int) -> None:
    """RefusedInput unless whole replicas fill the machine; of a CPU's devices some may be idle."""
    count, size = len(topology.devices), tensor * expert
    if size <= count and (topology.chip is None or count % size == 0):
        return
    raise RefusedInput(
        f"{topology.name} has {count} devices, which replicas of {size} do not fill: choose "
        f"tensor_parallel_size (now {tensor}) and expert_parallel_size (now {expert}) so that "
        f"their product divides {count}, or another topology"
    )


def _empty(
    model: Model, topology: Topology, engine_config: EngineConfig, longest: int
) -> Deployment:
    shape = dict(model.mesh.shape)
    replicas = shape.pop("data")
    limit = None if topology.chip is None else topology.chip.memory
    return Deployment(
        topology=topology.name,
        devices=len(topology.devices),
        mesh=shape,
        enable_expert_parallel=engine_config.enable_expert_parallel,
        replicas=replicas,
        dtype=model.dtype.name,
        max_model_len=longest,
        memory=Memory(limit, None, model.bytes_per_device(), 0, 0),
        kv_bytes_per_token=sum(block_bytes(model, DEFAULT_BLOCK_SIZE)) // DEFAULT_BLOCK_SIZE,
    )


def _weights_missing(plan: Deployment, engine_config: EngineConfig) -> str | None:
    if plan.memory.limit is None:
        return None
    usable = usable_bytes(engine_config.kv_memory, plan.memory.limit)
    short = plan.memory.weights - usable
    if short < 0:
        return None
    return (
        f"the weights take {_gib(plan.memory.weights)} of a device, {_gib(usable)} of its "
        f"{_gib(plan.memory.limit)} may be used: {_gib(short)} short"
    )


def _advice(
    config: Mapping[str, Any],
    topology: Topology,
    engine_config: EngineConfig,
    policy: PolicyName,
) -> str:
    """The smallest tensor_parallel_size on this machine whose weights leave room, if any."""
    expert, count = engine_config.expert_parallel_size, len(topology.devices)
    tensor = engine_config.tensor_parallel_size * 2
    while count % (tensor * expert) == 0:
        wider = replace(engine_config, tensor_parallel_size=tensor)
        try:
            model = _abstract_model(config, topology, wider, policy)
        except ConfigError:  # there are fewer experts than that
            break
        if _weights_missing(_empty(model, topology, wider, 1), wider) is None:
            return f"tensor_parallel_size = {tensor} would hold them"
        tensor *= 2
    return f"{topology.name} has too few devices for them: take a larger topology"


def _with_steps(
    plan: Deployment,
    model: Model,
    topology: Topology,
    engine_config: EngineConfig,
    context: int | None,
) -> Deployment:
    try:
        frame = Frame(model, engine_config)
        programs = compile_programs(
            model,
            frame.buckets,
            block_size=frame.block_size,
            num_slots=engine_config.max_num_seqs,
        )
    except RefusedInput as error:
        return replace(plan, shortfall=str(error))
    memory = replace(
        plan.memory,
        temporary=next(p.temporary_bytes for p in programs if p.name == SCORED)
        + kept_logits_bytes(model, frame.buckets),
        usable=None
        if plan.memory.limit is None
        else usable_bytes(engine_config.kv_memory, plan.memory.limit),
    )
    plan = replace(plan, memory=memory, programs=programs)
    try:
        blocks = frame.num_blocks(memory.limit, lambda: memory.temporary)
    except RefusedInput as error:
        return replace(plan, shortfall=str(error))
    sizes = block_bytes(model, frame.block_size)
    memory = replace(memory, kv=sum(n * s for n, s in zip(blocks, sizes, strict=True)))
    plan = replace(plan, memory=memory)
    missing = _cache_missing(memory)
    if missing is not None:
        return replace(plan, shortfall=missing)
    whole = [n for n, window in zip(blocks, model.policy.cache_windows, strict=True) if not window]
    return replace(
        plan,
        kv_blocks=blocks,
        kv_tokens=min(whole or blocks) * frame.block_size,
        estimates=estimates(
            model,
            programs,
            topology.chip,
            rows=engine_config.max_num_seqs,
            context=context or max(1, plan.max_model_len // 2),
        ),
    )


def _cache_missing(memory: Memory) -> str | None:
    """What is missing where the cache's size was given and not computed."""
    needed = memory.weights + memory.temporary + memory.kv
    if memory.limit is None or needed <= memory.limit:
        return None
    return (
        f"weights take {_gib(memory.weights)}, the step {_gib(memory.temporary)} and the KV cache "
        f"{_gib(memory.kv)} of a device that has {_gib(memory.limit)}: "
        f"{_gib(needed - memory.limit)} short. Lower kv_cache_memory_bytes or "
        "num_gpu_blocks_override, or raise tensor_parallel_size"
    )


def _gib(count: int) -> str:
    return f"{count / 2**30:.2f} GiB"
