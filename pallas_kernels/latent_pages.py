"""One layer's cache of latent attention: per token one vector that all heads share.

As with KVPages, the layout is known here alone: on TPU zeros fill a vector's last lanes, which its
memory would leave empty.
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from pallas_kernels.dispatch import target_platform
from pallas_kernels.pages import Leaf, RaggedRows, whole_lanes


@jax.tree_util.register_dataclass
@dataclass(frozen=True, slots=True)
class LatentPages:
    """latents [pages, page, width]: of each token its latent, its rotated key, and on TPU zeros."""

    latents: Leaf

    @property
    def num_pages(self) -> int:
        """Pages in the pool."""
        return self.latents.shape[0]

    @property
    def page_size(self) -> int:
        """Tokens of one page."""
        return self.latents.shape[1]

    @property
    def width(self) -> int:
        """Channels of one token, those that fill its lanes included."""
        return self.latents.shape[2]

    def holds(self, width: int) -> bool:
        """Whether these are pages for tokens of that many channels."""
        return self.width in (width, whole_lanes(width))

    def fill(self, tokens: Float[Array, "*tokens channels"]) -> Float[Array, "*tokens width"]:
        """Tokens, or queries that meet them, as wide as the pages hold them."""
        missing = self.width - tokens.shape[-1]
        if not missing:
            return tokens
        return jnp.pad(tokens, (*((0, 0),) * (tokens.ndim - 1), (0, missing)))

    def write(self, new: Float[Array, "tokens channels"], rows: RaggedRows) -> "LatentPages":
        """Pages with the step's tokens in place; in place when donated. Padding touches nothing."""
        page, offset = rows.token_slots(
            new.shape[0], page_size=self.page_size, num_pages=self.num_pages
        )
        slots = self.latents.at[page, offset]
        new = self.fill(new).astype(self.latents.dtype)
        return LatentPages(latents=slots.set(new, mode="drop", unique_indices=True))

    def read(self, blocks: Int[Array, "*batch blocks"]) -> Float[Array, "*batch kv width"]:
        """The given pages one after another, kv = blocks * page.

        Page ids outside the pool give some page's content: the caller masks it.
        """
        found = self.latents.at[blocks].get(mode="clip")
        return found.reshape(*blocks.shape[:-1], -1, self.width)


def abstract_latent_pages(
    num_pages: int,
    *,
    page_size: int,
    width: int,
    dtype: DTypeLike,
    platform: str | None = None,
    sharding: LatentPages | None = None,
) -> LatentPages:
    """LatentPages of jax.ShapeDtypeStruct; platform and sharding as in abstract_kv_pages.

    width: channels of one token; on TPU it is raised to whole lanes.
    """
    sizes = {"num_pages": num_pages, "page_size": page_size, "width": width}
    for name, size in sizes.items():
        if size < 1:
            raise ValueError(f"{name} must be at least 1, got {size}.")
    placed = None if sharding is None else sharding.latents
    lanes = whole_lanes(width) if (platform or target_platform()) == "tpu" else width
    shape = (num_pages, page_size, lanes)
    return LatentPages(latents=jax.ShapeDtypeStruct(shape, dtype, sharding=placed))


def latent_pages(
    num_pages: int, *, page_size: int, width: int, dtype: DTypeLike, platform: str | None = None
) -> LatentPages:
    """One layer's pages, all zeros; arguments as in abstract_latent_pages."""
    abstract = abstract_latent_pages(
        num_pages, page_size=page_size, width=width, dtype=dtype, platform=platform
    )
    return jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), abstract)


def latent_pages_spec() -> LatentPages:
    """LatentPages of PartitionSpec: the same on every device, since all heads read all of it."""
    return LatentPages(latents=PartitionSpec())
