"""`jaxgen bench simulate|host`: what the scheduler does, and what it costs, without a device."""

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np

from jaxgen.bench.host import run_host
from jaxgen.bench.workload import arrivals
from jaxgen.commands.bench_dataset import read_dataset
from jaxgen.commands.opening import engine_options
from jaxgen.config import EngineConfig
from jaxgen.ragged.buckets import Buckets
from jaxgen.ragged.prefix_cache import PrefixCache
from jaxgen.ragged.sequence import CacheGroup
from jaxgen.ragged.state import StateManager
from jaxgen.schedule.limits import Limits
from jaxgen.schedule.simulate import Arrival, CostModel, replay
from jaxgen_checkpoints.errors import RefusedInput

_VOCAB = 32_000
_BLOCK_SIZE = 64
_SMALLEST_MIXED = 64  # an accelerator's


def simulate(args: argparse.Namespace) -> dict[str, Any]:
    """Replays a trace through the scheduler that the engine options describe."""
    arrivals = _trace(args)
    config = EngineConfig.from_any(None, **engine_options(args))
    block_size = config.block_size or _BLOCK_SIZE
    longest = max(len(arrival.prompt_ids) + arrival.max_tokens for arrival in arrivals)
    context = config.max_model_len or longest
    # As many blocks as the largest step's sequences can fill, unless a pool is given.
    blocks = config.kv_memory.num_blocks or config.max_num_seqs * (-(-context // block_size) + 1)
    groups = (CacheGroup(),)
    cache = PrefixCache(groups, block_size) if config.enable_prefix_caching else None
    state = StateManager(
        groups,
        (blocks,),
        block_size=block_size,
        max_context=context,
        max_tracked=config.max_tracked_sequences,
        num_slots=config.max_num_seqs,
        prefix_cache=cache,
    )
    tokens, sequences = config.max_num_batched_tokens, config.max_num_seqs
    buckets = Buckets.for_limits(
        max_tokens=tokens,
        max_rows=sequences,
        max_blocks=-(-context // block_size),
        smallest_mixed=_SMALLEST_MIXED,
    )
    limits = Limits(tokens, sequences, sizes=buckets.filled)
    cost = CostModel(
        1e-3 * args.step_ms,
        1e-6 * args.token_us,
        1e-9 * args.kv_token_ns,
        weights=1e-3 * args.weights_ms,
    )
    result: dict[str, Any] = replay(arrivals, limits, state, cost, buckets=buckets).summary()
    if cache is not None:
        result["prefix_cache_queries"] = cache.queried_tokens
        result["prefix_cache_hits"] = cache.hit_tokens
    return result


def host(args: argparse.Namespace) -> dict[str, Any]:
    """The host's time of a decode step over a stub device."""
    return run_host(args.batch_size, args.input_len, args.output_len, args.seed or 0)


def as_lines(result: dict[str, Any]) -> str:
    """A line for each number."""
    width = max(map(len, result))
    numbers = {
        name: f"{value:,.2f}" if isinstance(value, float) else f"{value:,}"
        for name, value in result.items()
    }
    return "".join(f"{name:<{width}}  {number:>14}\n" for name, number in numbers.items())


def _trace(args: argparse.Namespace) -> list[Arrival]:
    seed = args.seed or 0
    if args.trace is None:
        requests = read_dataset(args, lambda: _VOCAB, None)
        if args.dataset_name == "custom":
            raise RefusedInput("--dataset-name custom has texts, and there is no tokenizer here")
        times = arrivals(len(requests), args.request_rate, seed)
        return [
            Arrival(time, request.prompt_ids, request.output_len)
            for time, request in zip(times, requests, strict=True)
        ]
    rng = np.random.default_rng(seed)
    shared = rng.integers(0, _VOCAB, args.random_prefix_len or 0).tolist()
    return [
        Arrival(time, shared + rng.integers(0, _VOCAB, length).tolist(), tokens)
        for time, length, tokens in _read_trace(Path(args.trace))
    ]


def _read_trace(path: Path) -> list[tuple[float, int, int]]:
    """(seconds, prompt tokens, output tokens) of each line, sorted by time."""
    entries = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        try:
            entry = json.loads(line)
            time, length, tokens = (entry[key] for key in ("arrival", "input_len", "output_len"))
            entries.append((float(time), int(length), int(tokens)))
            if not (time >= 0 and length >= 1 and tokens >= 1):
                raise ValueError("a number is too small")
        except (ValueError, TypeError, KeyError) as error:
            raise RefusedInput(
                f'{path} line {number}: expected {{"arrival": seconds, "input_len": tokens, '
                f'"output_len": tokens}}, got {line[:80]!r}'
            ) from error
    if not entries:
        raise RefusedInput(f"{path} has no requests")
    return sorted(entries)
