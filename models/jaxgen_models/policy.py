"""A policy says how one family of checkpoints becomes a model: config, container map, modules.

Defining a subclass with `architectures` registers it; nothing else has to be edited to add a
family.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, ClassVar

from jaxgen_checkpoints.container_map import ContainerMap
from jaxgen_checkpoints.heads import HeadLayout
from jaxgen_checkpoints.source import TensorInfo
from jaxgen_models.cache import KVCache, LayerCache
from jaxgen_models.config import DecoderConfig
from jaxgen_models.decoder import Decoder
from jaxgen_models.hf_config import HFConfig

_REGISTRY: dict[str, type["InferencePolicy"]] = {}


class InferencePolicy(ABC):
    """One family. `architectures` are the names in config.json that it accepts.

    `model_types` are what it accepts where a config names no architecture. `refuses` names options
    of the family's own that are refused, each with a value that is; what no family does is not
    listed. A `strict` policy refuses a checkpoint that holds a tensor it has no place for; others
    warn.
    """

    architectures: ClassVar[tuple[str, ...]] = ()
    model_types: ClassVar[tuple[str, ...]] = ()
    family: ClassVar[str] = ""
    refuses: ClassVar[Mapping[str, object]] = MappingProxyType({})
    strict: ClassVar[bool] = False
    decoder: ClassVar[type[Decoder]] = Decoder

    def __init_subclass__(cls, **kwargs: object) -> None:
        super().__init_subclass__(**kwargs)
        for name in cls.__dict__.get("architectures", ()):
            other = _REGISTRY.get(name)
            if other is not None and other.__qualname__ != cls.__qualname__:
                raise TypeError(f"{name} is already served by {other.__qualname__}")
            _REGISTRY[name] = cls

    def __init__(self, config: DecoderConfig) -> None:
        self.config = config

    @classmethod
    def of_checkpoint(cls, hf: HFConfig, tensors: Mapping[str, TensorInfo]) -> "InferencePolicy":
        """The policy over a checkpoint's config. What a family's configs leave open, the tensors
        say, where there are some.
        """
        del tensors
        return cls(cls.read_config(hf))

    @classmethod
    @abstractmethod
    def read_config(cls, hf: HFConfig) -> DecoderConfig:
        """The sizes and switches of a checkpoint's config; refuses what the family does not do."""

    @abstractmethod
    def build_container_map(self) -> ContainerMap:
        """Where each tensor of the checkpoint goes."""

    def build_model(self, weights: Mapping[str, Any], tensor_shards: int) -> Decoder:
        """The modules over loaded weights (or over their shapes)."""
        layout = HeadLayout(self.config.heads, self.config.kv_heads, tensor_shards)
        return self.decoder(self.config, weights, layout.group, self.layer_cache_groups)

    def layer_caches(self, tensor_shards: int) -> tuple[LayerCache, ...]:
        """What each layer keeps of the past, on a mesh of so many tensor shards."""
        return (KVCache.of(self.config, tensor_shards),) * int(self.config.num_layers)

    @property
    def cache_windows(self) -> tuple[int | None, ...]:
        """The window of each cache group: layers that keep the same part of the past share a
        group.
        """
        return tuple(dict.fromkeys(self.config.windows))

    @property
    def layer_cache_groups(self) -> tuple[int, ...]:
        """For each layer the index of its cache group."""
        groups = {window: i for i, window in enumerate(self.cache_windows)}
        return tuple(groups[w] for w in self.config.windows)


def registered_policies() -> dict[str, type[InferencePolicy]]:
    """Architecture name -> policy, for everything that has been imported."""
    return dict(_REGISTRY)
