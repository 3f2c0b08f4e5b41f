"""The names under which users write the engine's configuration, and the one field each means.

vLLM's names are ours; DeepSpeed's are accepted flat, or nested as its own config objects nest them.
"""

import difflib
from collections.abc import Iterator, Mapping
from enum import StrEnum
from typing import Any

from jaxgen_checkpoints.errors import ConfigError

SECTIONS = {
    "state_manager": "state_manager",
    "manager": "state_manager",
    "tensor_parallel": "tensor_parallel",
    "tp": "tensor_parallel",
    "memory_config": "memory_config",
    "quantization": "quantization",
}

FIELDS = {
    "dtype": "dtype",
    "seed": "seed",
    "enforce_eager": "enforce_eager",
    "tensor_parallel_size": "tensor_parallel_size",
    "tp_size": "tensor_parallel_size",
    "expert_parallel_size": "expert_parallel_size",
    "enable_expert_parallel": "enable_expert_parallel",
    "block_size": "block_size",
    "max_model_len": "max_model_len",
    "max_context": "max_model_len",
    "max_num_seqs": "max_num_seqs",
    "max_ragged_sequence_count": "max_num_seqs",
    "max_num_batched_tokens": "max_num_batched_tokens",
    "max_ragged_batch_size": "max_num_batched_tokens",
    "max_tracked_sequences": "max_tracked_sequences",
    "max_num_queued_reqs": "max_num_queued_reqs",
    "enable_prefix_caching": "enable_prefix_caching",
    "gpu_memory_utilization": "kv_memory.utilization",
    "num_gpu_blocks_override": "kv_memory.num_blocks",
    "kv_cache_memory_bytes": "kv_memory.cache_bytes",
    "memory_config.mode": "memory_config.mode",
    "memory_config.size": "memory_config.size",
    "quantization": "refused.quantization",
    "quantization_mode": "refused.quantization",
    "offload": "refused.offload",
}

_REFUSED = {
    "refused.quantization": (None, "quantised weights cannot be chosen yet"),
    "refused.offload": (False, "KV blocks cannot be moved off the device yet"),
}

_SECTION_KEYS = {
    "state_manager": (
        "max_tracked_sequences",
        "max_ragged_batch_size",
        "max_ragged_sequence_count",
        "max_context",
        "memory_config",
        "offload",
    ),
    "tensor_parallel": ("tp_size",),
    "memory_config": ("mode", "size"),
    "quantization": ("quantization_mode",),
}

_DEEPSPEED_RESERVE = 1_000_000_000


class MemoryMode(StrEnum):
    """DeepSpeed's memory_config.mode: size counts bytes left free, or blocks to allocate."""

    RESERVE = "reserve"
    ALLOCATE = "allocate"


def read_keys(*sources: Mapping[str, Any]) -> dict[str, Any]:
    """EngineConfig's fields as given by all sources together, "kv_memory" as a dict of KVMemory's.

    A value of None means "not given". ConfigError for an unknown key (naming the nearest), for one
    thing given twice with different values (naming both spellings), and for what is not supported.
    """
    found: dict[str, tuple[str, Any]] = {}
    for source in sources:
        for name, path, value in _flatten(source, section=None, prefix=""):
            if name in _REFUSED:
                _refuse_unless_off(name, path, value)
            elif value is not None:
                _enter(found, name, path, value)
    _translate_memory_config(found)
    values: dict[str, Any] = {}
    for name, (_, value) in found.items():
        group, _, inner = name.rpartition(".")
        if group:
            values.setdefault(group, {})[inner] = value
        else:
            values[name] = value
    return values


def _flatten(
    source: Mapping[str, Any], section: str | None, prefix: str
) -> Iterator[tuple[str, str, Any]]:
    """(field, the user's spelling with its path, value) of each leaf."""
    for key, value in source.items():
        path = f"{prefix}{key}"
        if section is not None and key not in _SECTION_KEYS[section]:
            raise _unknown(path, key, _SECTION_KEYS[section])
        if key in SECTIONS and (isinstance(value, Mapping) or key not in FIELDS):
            if value is None:
                continue
            if not isinstance(value, Mapping):
                known = ", ".join(_SECTION_KEYS[SECTIONS[key]])
                raise ConfigError(f"{path} must be a dict with keys {known}; got {value!r}.")
            yield from _flatten(value, SECTIONS[key], f"{path}.")
            continue
        full = f"memory_config.{key}" if section == "memory_config" else key
        if full not in FIELDS or "." in key:
            raise _unknown(path, key, [name for name in (*FIELDS, *SECTIONS) if "." not in name])
        yield FIELDS[full], path, value


def _unknown(path: str, key: object, known: "list[str] | tuple[str, ...]") -> ConfigError:
    near = difflib.get_close_matches(str(key), known, n=1, cutoff=0.5)
    hint = f"did you mean {near[0]!r}?" if near else f"known are {', '.join(sorted(known))}."
    return ConfigError(f"Unknown engine option {path!r}: {hint}")


def _refuse_unless_off(name: str, path: str, value: object) -> None:
    off, reason = _REFUSED[name]
    if value is not None and value is not off:
        raise ConfigError(f"{path}={value!r} is refused: {reason}. Leave it out or give {off}.")


def _enter(found: dict[str, tuple[str, Any]], name: str, path: str, value: object) -> None:
    if name in found:
        earlier, known = found[name]
        if known != value:
            raise ConfigError(
                f"{earlier}={known!r} and {path}={value!r} set the same thing differently: "
                "keep one of them."
            )
    else:
        found[name] = (path, value)


def _translate_memory_config(found: dict[str, tuple[str, Any]]) -> None:
    """Turns memory_config's mode and size into the KVMemory field that they mean."""
    mode_path, mode = found.pop("memory_config.mode", ("memory_config.mode", None))
    size_path, size = found.pop("memory_config.size", ("memory_config.size", None))
    if mode is None and size is None:
        return
    modes = [str(known) for known in MemoryMode]
    mode = MemoryMode.RESERVE if mode is None else getattr(mode, "value", mode)
    if mode not in modes:
        raise ConfigError(f"{mode_path} must be one of {', '.join(modes)}; got {mode!r}.")
    if mode == MemoryMode.ALLOCATE:
        if size is None:
            raise ConfigError(f"{mode_path}='allocate' needs {size_path}: the number of blocks.")
        _enter(found, "kv_memory.num_blocks", size_path, size)
        return
    if "kv_memory.utilization" in found:
        other, fraction = found["kv_memory.utilization"]
        raise ConfigError(
            f"{mode_path}='reserve' and {other}={fraction!r} both size the KV cache: keep one."
        )
    _enter(
        found, "kv_memory.reserve_bytes", size_path, _DEEPSPEED_RESERVE if size is None else size
    )
