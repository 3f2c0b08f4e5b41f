"""The compiled steps of a plan, and what their programs say of themselves."""

import math
import re
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import jax

from jaxgen.engine.model import Model
from jaxgen.engine.program_keys import Draw, Forward, Kind, ProgramKey, Sizes
from jaxgen.engine.programs import Memory, Programs, step_bytes
from jaxgen.engine.scoring import scoring_buckets
from jaxgen.ragged.buckets import Bucket, Buckets
from jaxgen.sampling import compiled_demands
from jaxgen_checkpoints.errors import RefusedInput
from pallas_kernels.dispatch import target_platform

_COLLECTIVE = re.compile(
    r"= (?P<shape>.+?) (?P<kind>all-reduce|all-gather|reduce-scatter|all-to-all|collective-permute)"
    r"(-start)?\("
)
_ARRAY = re.compile(r"(?P<dtype>[a-z]+\d*(?:e\d+m\d+\w*)?)\[(?P<shape>[\d,]*)\]")
_GROUPS = re.compile(
    r"replica_groups=(\{\{\d+\}|\[\d+,1\]<=|mesh\[(?P<mesh>[^\]]*)\] \{(?P<axes>[^}]*)\})"
)
_BITS = re.compile(r"\d+")
_KERNEL = re.compile(
    r" = .+? (fusion|custom-call|dot|convolution|copy|sort|scatter|gather|while|conditional)\("
)

SCORED = "scored"
"""The step that needs most, and is so rare that its time is of no interest."""

_NOTHING_LAUNCHED = 'custom_call_target="AllocateBuffer"'
"""Room for a kernel's results, an operation of its own in HLO."""


@dataclass(frozen=True, slots=True)
class Collectives:
    """All collectives of one kind in a program. bytes: of their results on one device, together."""

    kind: str
    count: int
    bytes: int


@dataclass(frozen=True, slots=True)
class Program:
    """One compiled step.

    temporary_bytes: beside its arguments, on one device. code_bytes: of the program itself, where
    it lies in the device's memory. aliased: whether it updates the KV cache in place. kernels: that
    it launches, those in loops counted once.
    """

    name: str
    bucket: Bucket
    temporary_bytes: int
    code_bytes: int
    aliased: bool
    collectives: tuple[Collectives, ...]
    kernels: int
    compile_seconds: float


def compile_programs(
    model: Model, buckets: Buckets, *, block_size: int, num_slots: int
) -> tuple[Program, ...]:
    """Compiles the largest steps and their draws, in parallel, on the model's own mesh: `decode`,
    `prefill`, and `scored`, which says of a prompt's tokens how likely they were. An engine leaves
    room for that one.

    RefusedInput where the compiler finds no room for one, naming what to lower. Call it under
    `Topology.compiling`. The cache is the smallest: what a step needs beside its arguments does not
    depend on how many pages there are.
    """
    sizes = Sizes.smallest(len(model.policy.cache_windows), block_size, num_slots)
    programs = Programs(model, sizes)
    demand = compiled_demands(target_platform())[-1]
    steps = {
        "decode": Forward(buckets.decode[-1]),
        "prefill": Forward(buckets.mixed[-1]),
        SCORED: Forward(scoring_buckets(buckets)[-1], Kind.SCORED),
    }
    draws = {name: Draw(step.bucket.rows, demand) for name, step in steps.items()}
    # Steps of as many rows share their draw.
    lowered = {key: programs.lower(key) for key in (*steps.values(), *draws.values())}
    with ThreadPoolExecutor() as pool:
        compiled = dict(
            zip(lowered, pool.map(_compile, lowered.keys(), lowered.values()), strict=True)
        )
    # XLA may leave a sum over a group of one in the program; it moves nothing.
    alone = model.tensor_shards * model.mesh.shape["expert"] == 1
    return tuple(
        _program(name, step.bucket, compiled[step], compiled[draws[name]], alone=alone)
        for name, step in steps.items()
    )


@dataclass(frozen=True, slots=True)
class _Compiled:
    memory: Memory
    hlo: str
    seconds: float


def _compile(key: ProgramKey, lowered: jax.stages.Lowered) -> _Compiled:
    start = time.perf_counter()
    try:
        compiled = lowered.compile()
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        said = str(error).partition("\n")[0].removeprefix("RESOURCE_EXHAUSTED: ").rstrip(". ")
        raise RefusedInput(
            f"{_described(key)} does not compile: {said}. "
            "Lower max_num_batched_tokens or max_num_seqs, or raise tensor_parallel_size"
        ) from error
    seconds = time.perf_counter() - start
    memory, hlo = compiled.memory_analysis(), compiled.as_text()
    if memory is None or hlo is None:
        raise RuntimeError(f"XLA says nothing of {_described(key)} on this platform")
    return _Compiled(memory, hlo, seconds)


def _described(key: ProgramKey) -> str:
    if isinstance(key, Draw):
        return f"the draw for {key.rows} rows"
    return f"the step of {key.bucket.tokens} tokens in {key.bucket.rows} rows"


def _program(
    name: str, bucket: Bucket, forward: _Compiled, draw: _Compiled, *, alone: bool
) -> Program:
    return Program(
        name,
        bucket,
        temporary_bytes=step_bytes(forward.memory, draw.memory),
        code_bytes=int(forward.memory.generated_code_size_in_bytes),
        aliased=forward.memory.alias_size_in_bytes > 0,
        collectives=() if alone else read_collectives(forward.hlo),
        kernels=count_kernels(forward.hlo),
        compile_seconds=forward.seconds + draw.seconds,
    )


def read_collectives(hlo: str) -> tuple[Collectives, ...]:
    """The collectives of an HLO module, those in loops counted once.

    Those over groups of one device, which XLA may leave in a program, move nothing and are left
    out.
    """
    found: dict[str, list[int]] = {}
    for line in hlo.splitlines():
        match = _COLLECTIVE.search(line)
        if match is None or _over_one_device(line):
            continue
        arrays = [_bytes(array) for array in _ARRAY.finditer(match["shape"])]
        # An asynchronous start's tuple holds its operand and its result; the larger is the result.
        size = max(arrays) if "-start" in match[0] else sum(arrays)
        found.setdefault(match["kind"], []).append(size)
    return tuple(Collectives(kind, len(s), sum(s)) for kind, s in sorted(found.items()))


def _over_one_device(collective: str) -> bool:
    groups = _GROUPS.search(collective)
    if groups is None or groups["mesh"] is None:
        return groups is not None
    sizes = dict(re.findall(r"'(\w+)'=(\d+)", groups["mesh"]))
    return all(sizes.get(axis) == "1" for axis in re.findall(r"'(\w+)'", groups["axes"]))


def count_kernels(hlo: str) -> int:
    """Operations of an HLO module's entry that are kernels of their own."""
    entry = hlo[hlo.find("ENTRY ") :]
    lines = entry[: entry.find("\n}")].splitlines()
    return sum(1 for line in lines if _KERNEL.search(line) and _NOTHING_LAUNCHED not in line)


def _bytes(array: re.Match[str]) -> int:
    bits = _BITS.search(array["dtype"])
    elements = math.prod(int(n) for n in array["shape"].split(",") if n)
    return elements * (int(bits[0]) if bits else 8) // 8
