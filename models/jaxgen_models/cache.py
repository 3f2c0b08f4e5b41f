"""What one layer keeps of the past: the engine allocates, shards and counts whatever it is told."""

from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from jax.typing import DTypeLike

from jaxgen_checkpoints.heads import HeadLayout
from jaxgen_models.config import DecoderConfig
from jaxgen_models.layers.collective import TENSOR_AXIS
from pallas_kernels.latent_pages import LatentPages, abstract_latent_pages, latent_pages_spec
from pallas_kernels.pages import KVPages, abstract_kv_pages, kv_pages_spec

type LayerPages = Any
"""One layer's pages, of the kind that its attention takes: KVPages, LatentPages."""


@runtime_checkable
class LayerCache(Protocol):
    """One kind of pages, over all devices together."""

    def abstract(self, num_pages: int, *, page_size: int, dtype: DTypeLike) -> LayerPages:
        """The pages' shapes, as a tree of jax.ShapeDtypeStruct."""
        ...

    def spec(self) -> LayerPages:
        """Which mesh axes divide them, as a tree of PartitionSpec."""
        ...


@dataclass(frozen=True, slots=True)
class KVCache:
    """Keys and values of `kv_slots` heads, divided over the tensor axis.

    kv_slots: KV heads of all shards together, copies and empty places included.
    """

    kv_slots: int
    head_dim: int

    @classmethod
    def of(cls, config: DecoderConfig, tensor_shards: int) -> "KVCache":
        """What a layer of grouped-query attention keeps on this many shards."""
        layout = HeadLayout(int(config.heads), int(config.kv_heads), tensor_shards)
        return cls(layout.kv_slots, int(config.head_dim))

    def abstract(self, num_pages: int, *, page_size: int, dtype: DTypeLike) -> KVPages:
        """As LayerCache."""
        return abstract_kv_pages(
            num_pages,
            page_size=page_size,
            kv_heads=self.kv_slots,
            head_dim=self.head_dim,
            dtype=dtype,
        )

    def spec(self) -> KVPages:
        """As LayerCache."""
        return kv_pages_spec(TENSOR_AXIS)


@dataclass(frozen=True, slots=True)
class LatentCache:
    """One vector a token that all heads share; every device has all of it."""

    width: int

    def abstract(self, num_pages: int, *, page_size: int, dtype: DTypeLike) -> LatentPages:
        """As LayerCache."""
        return abstract_latent_pages(num_pages, page_size=page_size, width=self.width, dtype=dtype)

    def spec(self) -> LatentPages:
        """As LayerCache."""
        return latent_pages_spec()
