"""Rotary position settings as configs spell them: old `rope_scaling`, new `rope_parameters`, all
known kinds.
"""

import math
from dataclasses import dataclass
from typing import Any, Final

from jaxgen_models.hf_config import HFConfig, Json

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
    "llama3": (
        ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
        (),
    ),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeConfig:
    """Rotary embedding of `dim` channels of a head (all of it unless the family rotates a part).

    original_context: the length the frequencies were trained for (yarn, llama3), or the length
      above
    which `dynamic` stretches its base.
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
    hf: HFConfig, dim: int, max_context: int, default_theta: float = 10000.0
) -> RopeConfig:
    """The rope settings of a config in either style; unknown kinds and missing fields are
    refused.
    """
    new_style = hf.table("rope_parameters")
    old_style = hf.table("rope_scaling")
    key = "rope_parameters" if new_style is not None else "rope_scaling"
    table = dict((new_style if new_style is not None else old_style) or {})
    theta = hf.number("rope_theta", default_theta)
    if "rope_theta" in table:
        theta = _number(hf, key, "rope_theta", table.pop("rope_theta"))
    kind = _kind(hf, key, table)
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


def _kind(hf: HFConfig, key: str, table: dict[str, Any]) -> str:
    names = [table.pop(n, None) for n in ("rope_type", "type")]
    given = {n for n in names if n is not None}
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
    if kind in ("yarn", "llama3"):
        original = int(values.get("original_max_position_embeddings", max_context))
    attention_factor = 1.0
    if kind == "yarn":
        attention_factor = _yarn_attention_factor(factor, values)
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
    )


def _yarn_attention_factor(factor: float, values: dict[str, Any]) -> float:
    """YaRN (arXiv:2309.00071) section 3.4: cos and sin grow with the logarithm of the stretch."""

    def mscale(scale: float, weight: float = 1.0) -> float:
        return 1.0 if scale <= 1.0 else 0.1 * weight * math.log(scale) + 1.0

    if "attention_factor" in values:
        return values["attention_factor"]
    if values.get("mscale") and values.get("mscale_all_dim"):
        return mscale(factor, values["mscale"]) / mscale(factor, values["mscale_all_dim"])
    return mscale(factor)


def _value(hf: HFConfig, key: str, name: str, value: Json) -> Json:
    if name == "truncate":
        if not isinstance(value, bool):
            raise hf.error(f"{key} truncate must be true or false, got {value!r}")
        return value
    return _number(hf, key, name, value)


def _number(hf: HFConfig, key: str, name: str, value: Json) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
        raise hf.error(f"{key} {name} must be a number above zero, got {value!r}")
    if not math.isfinite(value):
        raise hf.error(f"{key} {name} must be finite, got {value!r}")
    return float(value)
