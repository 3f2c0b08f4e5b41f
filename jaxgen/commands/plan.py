"""`jaxgen plan`: what a model would take on machines that are not there, as a table or JSON."""

import argparse
import os
import sys
from dataclasses import asdict
from typing import Any

from jaxgen.commands.model_config import read_model_config
from jaxgen.commands.opening import engine_options
from jaxgen.commands.terminal import note, say, say_json, size, table
from jaxgen.config import EngineConfig
from jaxgen.plan import Deployment, parse_topology, plan_deployment
from jaxgen.plan.topology import host_devices

DONE, REFUSED = 0, 2

_MEMORY = ("topology", "devices", "replicas", "weights", "step", "KV", "of", "KV tokens")
_TIMES = (
    *("topology", "step", "tokens", "context", "reads", "multiplies", "collectives"),
    *("estimate", "bound by", "tokens/s of all"),
)


def run(args: argparse.Namespace) -> int:
    """Plans each topology. 0 if one of them holds the model, 2 if none does."""
    _use_host_devices(args.topology)
    config = read_model_config(args.model)
    engine_config = EngineConfig.from_any(None, **engine_options(args))
    plans = [
        plan_deployment(
            config,
            parse_topology(name),
            engine_config,
            context=args.context,
            policy=args.policy,
        )
        for name in args.topology
    ]
    if args.json:
        say_json({"model": args.model, "plans": [_as_json(plan) for plan in plans]})
    else:
        _print(args.model, plans)
    if args.plot:
        from jaxgen.commands.plan_picture import draw  # matplotlib, where it is asked for

        draw(plans, args.plot)
    for plan in plans:
        if plan.shortfall:
            note(f"{plan.topology}: {plan.shortfall}")
        elif plan.kv_tokens < plan.max_model_len:
            note(
                f"{plan.topology}: the KV cache holds {plan.kv_tokens} tokens, fewer than one "
                f"sequence of max_model_len = {plan.max_model_len}"
            )
    return DONE if any(plan.fits for plan in plans) else REFUSED


def _use_host_devices(names: list[str]) -> None:
    """Makes as many CPU devices as asked for; nothing else of this machine is looked at."""
    if "jax" in sys.modules and "JAX_PLATFORMS" not in os.environ:
        import jax

        jax.config.update("jax_platforms", "cpu")
    count = max(map(host_devices, names))
    if count and "xla_force_host_platform_device_count" not in os.environ.get("XLA_FLAGS", ""):
        import jax

        jax.config.update("jax_num_cpu_devices", count)


def _as_json(plan: Deployment) -> dict[str, Any]:
    return {"fits": plan.fits, **asdict(plan)}


def _print(model: str, plans: list[Deployment]) -> None:
    first = plans[0]
    mesh = ", ".join(f"{axis} {count}" for axis, count in first.mesh.items() if count > 1)
    experts = ", whole experts on each device" if first.enable_expert_parallel else ""
    say(
        f"{model}: {first.dtype}, {mesh or 'one device'} a replica{experts}, "
        f"sequences of {first.max_model_len}, {size(first.kv_bytes_per_token)} of KV a token"
    )
    say()
    memory = [_MEMORY, *(_memory_row(plan) for plan in plans)]
    say(table(memory, right=range(1, len(_MEMORY))))
    timed = [(plan, estimate) for plan in plans for estimate in plan.estimates]
    if timed:
        say()
        rows: list[tuple[str, ...]] = [_TIMES]
        for plan, estimate in timed:
            rows.append(
                (
                    plan.topology,
                    estimate.name,
                    str(estimate.tokens),
                    str(estimate.context),
                    f"{size(estimate.bytes_read)}, {estimate.memory_ms:.2f} ms",
                    f"{estimate.flops / 1e12:.2f} TFLOP, {estimate.matrix_ms:.2f} ms",
                    f"{estimate.collective_ms:.2f} ms",
                    f"{estimate.step_ms:.2f} ms",
                    estimate.bound,
                    f"{estimate.tokens_per_second * plan.replicas:,.0f}",
                )
            )
        say(table(rows, right=(2, 3, 4, 5, 6, 7, 9)))
    for plan in plans:
        for program in plan.programs:
            moved = ", ".join(f"{c.count} {c.kind} of {size(c.bytes)}" for c in program.collectives)
            in_place = "in place" if program.aliased else "COPIED"
            say(
                f"{plan.topology} {program.name}: {moved or 'no collectives'}; cache {in_place}; "
                f"program of {size(program.code_bytes)}, "
                f"compiled in {program.compile_seconds:.0f} s"
            )


def _memory_row(plan: Deployment) -> tuple[str, ...]:
    memory = plan.memory
    return (
        plan.topology,
        str(plan.devices),
        str(plan.replicas),
        size(memory.weights),
        size(memory.temporary) if plan.programs else "-",
        size(memory.kv) if plan.fits else "does not fit",
        "-" if memory.limit is None else size(memory.limit),
        f"{plan.kv_tokens:,}" if plan.fits else "-",
    )
