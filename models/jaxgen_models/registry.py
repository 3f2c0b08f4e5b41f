"""Finds the policy of a checkpoint: the user's own, the registry by architecture, or `auto` by
structure.

`auto` has to be asked for: a stranger that looks like Llama may still compute something else, so an
unknown architecture is refused by default with a sentence that says whether `auto` would take it.
"""

import difflib
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from pkgutil import iter_modules
from typing import Any

import jaxgen_models
from jaxgen_checkpoints.errors import ConfigError
from jaxgen_checkpoints.source import TensorInfo
from jaxgen_models.auto.policy import AutoPolicy, looks_like_llama
from jaxgen_models.hf_config import HFConfig
from jaxgen_models.policy import InferencePolicy, registered_policies


@dataclass(frozen=True, slots=True)
class PolicyChoice:
    """A policy over its config, and one line that says how it was found."""

    policy: InferencePolicy
    reason: str


def find_policy(
    config: Mapping[str, Any],
    tensors: Mapping[str, TensorInfo],
    policy: type[InferencePolicy] | str | None = None,
) -> PolicyChoice:
    """The policy for a checkpoint.

    Args:
      config: config.json as an object.
      tensors: what the checkpoint holds; `auto` looks at the names and shapes.
      policy: a policy class of the user's own, the name of a family, "auto", or None for the
        registry.
    Raises:
      ConfigError: the architecture is missing or unknown, or the config asks for what the family
        does not do.
    """
    hf = HFConfig(config)
    if isinstance(policy, type):
        return PolicyChoice(
            policy(policy.read_config(hf)), f"policy {policy.__name__}: given by the user"
        )
    if policy == "auto":
        name = hf.architecture or hf.model_type
        return PolicyChoice(
            AutoPolicy.from_structure(hf, tensors),
            f"policy AutoPolicy: {name} mapped by its Llama-like structure",
        )
    found, reason = _registered(hf, tensors) if policy is None else _family(policy)
    return PolicyChoice(found.of_checkpoint(hf, tensors), f"policy {found.__name__}: {reason}")


def supported_architectures() -> dict[str, type[InferencePolicy]]:
    """Architecture name -> policy, for every family folder of this package."""
    for module in iter_modules(jaxgen_models.__path__):
        if module.ispkg and module.name not in ("layers", "auto"):
            import_module(f"{jaxgen_models.__name__}.{module.name}.policy")
    return registered_policies()


def _registered(
    hf: HFConfig, tensors: Mapping[str, TensorInfo]
) -> tuple[type[InferencePolicy], str]:
    known = supported_architectures()
    name = hf.architecture
    if name in known:
        return known[name], f"registered for {name}"
    if name is None:
        for policy in known.values():
            if hf.model_type in policy.model_types:
                return policy, f"config.json has no architectures; model_type is {hf.model_type}"
        raise hf.error(
            f"architectures is missing and model_type {hf.model_type!r} is not known; "
            f"supported architectures: {', '.join(sorted(known))}"
        )
    near = difflib.get_close_matches(name, known, n=3, cutoff=0.7)
    hint = f"; nearest: {', '.join(near)}" if near else ""
    auto = (
        "; its tensors look like Llama's: policy auto (--policy auto) would map it by structure"
        if looks_like_llama(tensors)
        else ""
    )
    raise hf.error(
        f"architecture {name} is not supported; supported: {', '.join(sorted(known))}{hint}{auto}"
    )


def _family(name: str) -> tuple[type[InferencePolicy], str]:
    families = {p.family: p for p in supported_architectures().values()}
    if name not in families:
        raise ConfigError(
            f"policy {name!r} is not known; choose auto or one of {', '.join(sorted(families))}"
        )
    return families[name], "named by the user"
