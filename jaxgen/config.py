"""The engine's configuration: one flat, frozen, validated value.

How users spell it (vLLM's names, DeepSpeed's, nested or flat) is config_keys.py's business.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from jaxgen.config_keys import read_keys
from jaxgen_checkpoints.errors import ConfigError

DTYPES = ("auto", "float32", "bfloat16", "float16")
_DTYPE_NAMES = {"float": "float32", "half": "float16"}

_PARALLEL = ("tensor_parallel_size", "expert_parallel_size")

DEFAULT_MAX_NUM_SEQS = 256
DEFAULT_MAX_NUM_BATCHED_TOKENS = 2048
DEFAULT_MAX_TRACKED_SEQUENCES = 2048


@dataclass(frozen=True, slots=True)
class KVMemory:
    """How much memory the KV cache gets; an explicit size comes before the fraction.

    utilization: the fraction of the device's memory that weights, step and KV cache may fill.
    reserve_bytes: instead, the bytes of the device that stay free.
    num_blocks: instead, the number of blocks of each cache group.
    cache_bytes: instead, the bytes of the cache on one device; what a CPU needs.
    At most one of the last three is given; otherwise ConfigError.
    """

    utilization: float = 0.92
    reserve_bytes: int | None = None
    num_blocks: int | None = None
    cache_bytes: int | None = None

    def __post_init__(self) -> None:
        """Refuses fractions outside (0, 1], sizes below the least, and two sizes at once."""
        if not 0 < _number("gpu_memory_utilization", self.utilization) <= 1:
            raise ConfigError(f"gpu_memory_utilization must lie in (0, 1], got {self.utilization}.")
        explicit = {
            "memory_config.size in mode 'reserve'": (self.reserve_bytes, 0),
            "num_gpu_blocks_override": (self.num_blocks, 1),
            "kv_cache_memory_bytes": (self.cache_bytes, 1),
        }
        given = {name: size for name, size in explicit.items() if size[0] is not None}
        for name, (size, least) in given.items():
            _at_least(name, size, least)
        if len(given) > 1:
            raise ConfigError(
                f"The KV cache's size is given {len(given)} times, by {' and by '.join(given)}: "
                "keep one of them."
            )


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """What an engine is built for. ConfigError, naming the field, if it cannot be.

    dtype: of weights and activations; "auto" is the checkpoint's own. "half" and "float" are taken.
    seed: of requests that bring none.
    enforce_eager: run op by op, for debugging.
    tensor_parallel_size: devices that share each layer.
    expert_parallel_size: groups of so many devices, each with its part of the routed experts; the
    rest of the model is the same in all of them.
    enable_expert_parallel: every one of those devices has routed experts of its own, each of them
    whole; without it the devices that share a layer share each of its experts too.
    block_size: tokens of one KV block; None lets the attention kernel choose.
    max_model_len: tokens of a sequence, prompt and output together; None is the model's limit.
    max_num_seqs: sequences in one step.
    max_num_batched_tokens: tokens in one step, at least max_num_seqs.
    max_tracked_sequences: sequences that hold state between steps, at least max_num_seqs.
    max_num_queued_reqs: requests that may wait for a place in a step; None for any number.
    enable_prefix_caching: requests that begin alike share the KV blocks of their beginning.
    """

    dtype: str = "auto"
    seed: int = 0
    enforce_eager: bool = False
    tensor_parallel_size: int = 1
    expert_parallel_size: int = 1
    enable_expert_parallel: bool = False
    block_size: int | None = None
    max_model_len: int | None = None
    max_num_seqs: int = DEFAULT_MAX_NUM_SEQS
    max_num_batched_tokens: int = DEFAULT_MAX_NUM_BATCHED_TOKENS
    max_tracked_sequences: int = DEFAULT_MAX_TRACKED_SEQUENCES
    max_num_queued_reqs: int | None = None
    enable_prefix_caching: bool = True
    kv_memory: KVMemory = field(default_factory=KVMemory)

    def __post_init__(self) -> None:
        """Checks each field, then the rules between them; the dtype gets its one name."""
        object.__setattr__(self, "dtype", _dtype_name(self.dtype))
        for name in (*_PARALLEL, "max_num_seqs", "max_num_batched_tokens"):
            _at_least(name, getattr(self, name), 1)
        for name in ("block_size", "max_model_len", "max_num_queued_reqs"):
            if getattr(self, name) is not None:
                _at_least(name, getattr(self, name), 1)
        _at_least("max_tracked_sequences", self.max_tracked_sequences, 1)
        _at_least("seed", self.seed, 0)
        for name in ("enforce_eager", "enable_expert_parallel", "enable_prefix_caching"):
            if not isinstance(getattr(self, name), bool):
                raise ConfigError(f"{name} must be true or false, got {getattr(self, name)!r}.")
        for name in _PARALLEL:
            if self.enforce_eager and getattr(self, name) > 1:
                raise ConfigError(
                    f"enforce_eager runs op by op on one device, but {name} is "
                    f"{getattr(self, name)}: leave one of them out."
                )
        for larger in ("max_num_batched_tokens", "max_tracked_sequences"):
            if self.max_num_seqs > getattr(self, larger):
                raise ConfigError(
                    f"max_num_seqs (max_ragged_sequence_count) must not exceed {larger}"
                    f"{' (max_ragged_batch_size)' if 'batched' in larger else ''}, got "
                    f"{self.max_num_seqs} and {getattr(self, larger)}: lower the one or raise the "
                    "other."
                )

    @classmethod
    def from_any(
        cls, config: "Mapping[str, Any] | EngineConfig | None" = None, **overrides: object
    ) -> "EngineConfig":
        """The config that a user wrote: nothing, a dict in any accepted spelling, or one of these.

        Keywords take the same spellings; None means "not given". Beside a dict they say more of the
        same thing, so that saying it differently is refused; beside an EngineConfig they replace.
        A sequence limit that is not given adapts to the limits that are. ConfigError otherwise.
        """
        given = {key: value for key, value in overrides.items() if value is not None}
        if isinstance(config, EngineConfig):
            values = read_keys(given)
            memory = values.pop("kv_memory", None)
            if memory is not None:
                values["kv_memory"] = KVMemory(**memory)
            return replace(config, **values)
        if config is not None and not isinstance(config, Mapping):
            raise ConfigError(
                f"engine_config must be a dict or an EngineConfig, got {type(config).__name__}."
            )
        values = read_keys(config or {}, given)
        memory = KVMemory(**values.pop("kv_memory", {}))
        return cls(**_adapt_limits(values), kv_memory=memory)


def _adapt_limits(values: dict[str, Any]) -> dict[str, Any]:
    """Fills in the limits that were not given so that they fit those that were."""
    adapted = dict(values)
    larger = [
        adapted[name]
        for name in ("max_num_batched_tokens", "max_tracked_sequences")
        if isinstance(adapted.get(name), int)
    ]
    seqs = adapted.setdefault("max_num_seqs", max(1, min([DEFAULT_MAX_NUM_SEQS, *larger])))
    if isinstance(seqs, int):
        tokens = max(DEFAULT_MAX_NUM_BATCHED_TOKENS, seqs)
        adapted.setdefault("max_num_batched_tokens", tokens)
        tracked = max(DEFAULT_MAX_TRACKED_SEQUENCES, seqs)
        adapted.setdefault("max_tracked_sequences", tracked)
    return adapted


def _dtype_name(dtype: object) -> str:
    name = dtype if isinstance(dtype, str) else getattr(dtype, "__name__", str(dtype))
    name = name.removeprefix("torch.").removeprefix("jnp.")
    name = _DTYPE_NAMES.get(name, name)
    if name not in DTYPES:
        accepted = ", ".join([*DTYPES, *_DTYPE_NAMES])
        raise ConfigError(f"dtype must be one of {accepted}; got {dtype!r}.")
    return name


def _number(name: str, value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise ConfigError(f"{name} must be a number, got {value!r}.")
    return value


def _at_least(name: str, value: object, least: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise ConfigError(f"{name} must be an integer, got {value!r}.")
    if value < least:
        raise ConfigError(f"{name} must be at least {least}, got {value}.")
