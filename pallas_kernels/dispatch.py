"""Which implementation of an operation runs: by platform, unless an argument or a setting says.

An implementation is a module with `run(...)` and `unsupported(problem) -> str | None`, the reason
why it cannot serve. If no kernel of the platform fits, the portable one runs and says so once.
"""

import importlib
import warnings
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cache
from types import MappingProxyType, ModuleType
from typing import Any

import jax

_chosen: ContextVar[Mapping[str, str]] = ContextVar("chosen", default=MappingProxyType({}))
_platform: ContextVar[str | None] = ContextVar("platform", default=None)


class FallbackWarning(UserWarning):
    """No kernel of this platform serves a shape; a slower implementation runs instead."""


class UnsupportedShape(ValueError):
    """The implementation that was asked for by name cannot serve this problem."""


@dataclass(frozen=True, slots=True)
class Operation:
    """One operation: its implementations by name, and the kernels to try on each platform.

    modules: implementation name -> importable module. kernels: platform -> names, best first.
    fallback: what runs where no kernel fits; it serves everything.
    """

    name: str
    modules: Mapping[str, str]
    kernels: Mapping[str, tuple[str, ...]]
    fallback: str

    def choose(self, problem: Any, implementation: str | None = None) -> ModuleType:  # noqa: ANN401
        """The implementation for this problem, whose str() names its shape.

        Raises UnsupportedShape if one was asked for by name (argument or `using`) and cannot serve.
        """
        name = implementation or _chosen.get().get(self.name)
        if name is not None:
            return self._named(name, problem)
        platform = target_platform()
        reasons = []
        for candidate in self.kernels.get(platform, ()):
            module = self._load(candidate)
            reason = module.unsupported(problem)
            if reason is None:
                return module
            reasons.append(f"{candidate}: {reason}")
        if platform != "cpu":
            why = "; ".join(reasons) or "there is no kernel for this platform"
            _warn_once(
                f"{self.name} on {platform} falls back to the {self.fallback} implementation "
                f"for {problem}: {why}."
            )
        return self._load(self.fallback)

    def has_kernel(self, problem: Any) -> bool:  # noqa: ANN401
        """Whether `choose` would give a kernel of the target platform; says nothing if not."""
        names = self.kernels.get(target_platform(), ())
        asked = _chosen.get().get(self.name)
        if asked is not None:
            return asked in names and self._load(asked).unsupported(problem) is None
        return any(self._load(name).unsupported(problem) is None for name in names)

    def _named(self, name: str, problem: Any) -> ModuleType:  # noqa: ANN401
        if name not in self.modules:
            known = ", ".join(self.modules)
            raise ValueError(f"{self.name} has the implementations {known}; got {name!r}.")
        module = self._load(name)
        reason = module.unsupported(problem)
        if reason is not None:
            raise UnsupportedShape(
                f"{self.name}: the implementation {name!r} cannot serve {problem}: {reason}. "
                "Leave the choice open, or choose another one."
            )
        return module

    def _load(self, name: str) -> ModuleType:
        # Imported on first use: the GPU and TPU sides of Pallas take most of a second to import.
        return importlib.import_module(self.modules[name])


def target_platform() -> str:
    """The platform that traced code will run on: "cpu", "cuda", "tpu" or another of XLA's names."""
    platform = _platform.get() or jax.default_backend()
    return "cuda" if platform == "gpu" else platform


@contextmanager
def using(**implementations: str) -> Generator[None]:
    """Choose implementations by operation name while tracing: `with using(ragged_attention="gpu")`.

    What jit has already traced stays as it is, and other threads are not affected.
    """
    token = _chosen.set({**_chosen.get(), **implementations})
    try:
        yield
    finally:
        _chosen.reset(token)


def chosen() -> Mapping[str, str]:
    """The implementations that `using` names here and now."""
    return _chosen.get()


@contextmanager
def lowering_for(platform: str) -> Generator[None]:
    """Choose for another platform than the default backend's: for ahead-of-time compilation."""
    token = _platform.set(platform)
    try:
        yield
    finally:
        _platform.reset(token)


def prepare_loading(platform: str) -> None:
    """What a process needs before it loads programs that others compiled, kernels and all."""
    if platform in ("gpu", "cuda"):
        # Where Mosaic's runtime lies is found in the environment, which importing it sets.
        importlib.import_module("jax.experimental.mosaic.gpu")


@cache
def _warn_once(message: str) -> None:
    warnings.warn(message, FallbackWarning, stacklevel=5)
