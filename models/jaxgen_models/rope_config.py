"""Rotary position settings as configs spell them: old `rope_scaling`, new `rope_parameters`, all
known kinds.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Final

from jaxgen_models.hf_config import HFConfig, Json

_ORIGINAL: Final = ("yarn", "llama3", "longrope")  # kinds with a length before scaling

# kind -> fields it cannot do without, fields it may have
_FIELDS: Final[dict[str, tuple[tuple[str, ...], tuple[str, ...]]]] = {
    "default": ((), ()),
    "linear": (("factor",), ()),
    "dynamic": (("factor",), ("original_max_position_embeddings",)),
    "yarn": (
        ("factor",),
        (
            "original_max_position_embeddings",
            "beta_fast",
            "beta_slow",
            "attention_factor",
            "mscale",
            "mscale_all_dim",
            "truncate",
        ),
    ),
    "longrope": (
        ("short_factor", "long_factor"),
        ("factor", "attention_factor", "original_max_position_embeddings"),
    ),
    "llama3": (
        ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
        (),
    ),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeConfig:
    """Rotary embedding of `dim` channels of a head (all of it unless the family rotates a part).

    original_context: the length the frequencies were trained for (yarn, llama3), or the length
      above which `dynamic` stretches its base, or past which `longrope` takes its long factors.
    short_factors, long_factors: what `longrope` divides each frequency by.
    interleaved: channels 2i and 2i + 1 turn together, instead of i and i + dim / 2.
    mscale_all_dim: yarn's weight of the stretch in the softmax scale, see `softmax_stretch`.
    """

    kind: str = "default"
    theta: float = 10000.0
    dim: int
    factor: float = 1.0
    original_context: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 1.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float = 1.0
    truncate: bool = True
    short_factors: tuple[float, ...] = ()
    long_factors: tuple[float, ...] = ()
    interleaved: bool = False
    mscale_all_dim: float = 0.0

    @property
    def softmax_stretch(self) -> float:
        """What latent attention multiplies scores by, beside what cos and sin bring."""
        return _mscale(self.factor, self.mscale_all_dim) ** 2

    @property
    def switch_context(self) -> int | None:
        """The length past which all positions of a sequence rotate otherwise than before."""
        return self.original_context if self.kind == "longrope" else None

    @property
    def unbounded(self) -> bool:
        """Whether positions beyond any configured length are what the scaling is made for."""
        return self.kind == "dynamic"

    def context(self, max_positions: int) -> int:
        """Tokens that positions are meant for, where the config names `max_positions`."""
        if self.kind in ("linear", "dynamic"):
            return int(max_positions * self.factor)
        if self.kind == "yarn":
            return max(max_positions, int(self.original_context * self.factor))
        return max_positions


def read_rope(
    hf: HFConfig,
    head_dim: int,
    max_context: int,
    default_theta: float = 10000.0,
    *,
    rotated_part: float | None = None,
    original_context: int | None = None,
    aliases: Mapping[str, str] = MappingProxyType({}),
) -> RopeConfig:
    """The rope settings of a config in either style; unknown kinds and missing fields are
    refused.

    rotated_part: what an absent partial_rotary_factor means; None for a family that knows no such
      key. original_context: the family's own length before scaling, which takes precedence over
      the table's. aliases: further names of kinds.
    """
    key = hf.spelling("rope_parameters", "rope_scaling")
    table = dict(hf.table(key) or {})
    theta = hf.number("rope_theta", default_theta)
    dim = head_dim
    if rotated_part is not None:
        part = hf.number("partial_rotary_factor", rotated_part)
        dim = rotated_channels(hf, head_dim, table.pop("partial_rotary_factor", None) or part)
    if original_context is not None:
        table["original_max_position_embeddings"] = original_context
    return read_rope_table(hf, key, table, dim, max_context, theta, aliases)


def read_rope_table(
    hf: HFConfig,
    key: str,
    table: dict[str, Json],
    dim: int,
    max_context: int,
    theta: float,
    aliases: Mapping[str, str] = MappingProxyType({}),
) -> RopeConfig:
    """The rope settings in one table, found under `key`; `theta` is what an absent rope_theta
    means.
    """
    table = dict(table)
    if table.get("rope_theta") is not None:
        theta = _number(hf, key, "rope_theta", table["rope_theta"])
    for name in ("rope_theta", "finetuned"):  # the latter: that the model was trained so
        table.pop(name, None)
    kind = _kind(hf, key, table, aliases)
    if kind not in _ORIGINAL and kind != "dynamic":
        table.pop("original_max_position_embeddings", None)
    required, optional = _FIELDS[kind]
    for name in required:
        if table.get(name) is None:
            raise hf.error(f"{key} of type {kind} needs {name}")
    unknown = sorted({n for n, v in table.items() if v is not None} - set(required) - set(optional))
    # A plain default rope may carry leftovers of another kind only if nothing is asked of them.
    if unknown:
        raise hf.error(f"{key} of type {kind} does not take {', '.join(unknown)}")
    values = {n: _value(hf, key, n, table[n]) for n in table if table[n] is not None}
    return _build(hf, key, kind, theta, dim, max_context, values)


def rotated_channels(hf: HFConfig, head_dim: int, part: Json) -> int:
    """The channels of a head that turn, where the config names a part of them."""
    part = _number(hf, "config", "partial_rotary_factor", part)
    dim = int(head_dim * part)
    if part > 1 or dim < 2 or dim % 2:
        raise hf.error(
            f"partial_rotary_factor = {part} rotates {dim} of {head_dim} channels; "
            "expected an even number of them, 2 at least"
        )
    return dim


def _kind(hf: HFConfig, key: str, table: dict[str, Any], aliases: Mapping[str, str]) -> str:
    names = [table.pop(n, None) for n in ("rope_type", "type")]
    given = {aliases.get(n, n) if isinstance(n, str) else str(n) for n in names if n is not None}
    if len(given) > 1:
        raise hf.error(f"{key} names two types: {sorted(map(str, given))}")
    kind = given.pop() if given else "default"
    if not given and kind == "default" and "factor" in table:
        raise hf.error(f"{key} has a factor but no rope_type")
    if kind not in _FIELDS:
        raise hf.error(f"{key} type {kind!r} is not known; supported: {', '.join(sorted(_FIELDS))}")
    return kind


def _build(
    hf: HFConfig,
    key: str,
    kind: str,
    theta: float,
    dim: int,
    max_context: int,
    values: dict[str, Any],
) -> RopeConfig:
    factor = values.get("factor", 1.0)
    if kind != "default" and factor < 1.0:
        raise hf.error(f"{key} factor must be at least 1, got {factor}")
    # `dynamic` stretches beyond max_position_embeddings whatever "original" length is named.
    original = max_context
    if kind in _ORIGINAL:
        original = int(values.get("original_max_position_embeddings", max_context))
    attention_factor = 1.0
    if kind == "yarn":
        attention_factor = _yarn_attention_factor(factor, values)
    if kind == "longrope":
        stretch = values.get("factor", max_context / original)
        attention_factor = values.get("attention_factor", _long_attention_factor(stretch, original))
        for name in ("short_factor", "long_factor"):
            if len(values[name]) != dim // 2:
                raise hf.error(
                    f"{key} {name} has {len(values[name])} entries for {dim} rotated channels; "
                    f"expected {dim // 2}"
                )
    if kind == "llama3" and values["high_freq_factor"] <= values["low_freq_factor"]:
        raise hf.error(f"{key}: high_freq_factor must be above low_freq_factor")
    return RopeConfig(
        kind=kind,
        theta=theta,
        dim=dim,
        factor=factor,
        original_context=original,
        low_freq_factor=values.get("low_freq_factor", 1.0),
        high_freq_factor=values.get("high_freq_factor", 1.0),
        beta_fast=values.get("beta_fast", 32.0),
        beta_slow=values.get("beta_slow", 1.0),
        attention_factor=attention_factor,
        truncate=values.get("truncate", True),
        short_factors=values.get("short_factor", ()),
        long_factors=values.get("long_factor", ()),
        mscale_all_dim=values.get("mscale_all_dim", 0.0),
    )


def _yarn_attention_factor(factor: float, values: dict[str, Any]) -> float:
    """YaRN (arXiv:2309.00071) section 3.4: cos and sin grow with the logarithm of the stretch."""
    if "attention_factor" in values:
        return values["attention_factor"]
    if values.get("mscale") and values.get("mscale_all_dim"):
        return _mscale(factor, values["mscale"]) / _mscale(factor, values["mscale_all_dim"])
    return _mscale(factor)


def _mscale(factor: float, weight: float = 1.0) -> float:
    return 1.0 if factor <= 1.0 else 0.1 * weight * math.log(factor) + 1.0


def _long_attention_factor(stretch: float, original: int) -> float:
    """LongRoPE (arXiv:2402.13753) as Phi-3 has it: cos and sin grow with the stretch."""
    return 1.0 if stretch <= 1 else math.sqrt(1 + math.log(stretch) / math.log(original))


def _value(hf: HFConfig, key: str, name: str, value: Json) -> Json:
    if name in ("short_factor", "long_factor"):
        if not isinstance(value, list):
            raise hf.error(f"{key} {name} must be a list of numbers, got {value!r}")
        return tuple(_number(hf, key, name, entry) for entry in value)
    if name == "truncate":
        if not isinstance(value, bool):
            raise hf.error(f"{key} truncate must be true or false, got {value!r}")
        return value
    if name in ("mscale", "mscale_all_dim") and value in (0, 0.0) and value is not False:
        return 0.0
    return _number(hf, key, name, value)


def _number(hf: HFConfig, key: str, name: str, value: Json) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
        raise hf.error(f"{key} {name} must be a number above zero, got {value!r}")
    if not math.isfinite(value):
        raise hf.error(f"{key} {name} must be finite, got {value!r}")
    return float(value)
