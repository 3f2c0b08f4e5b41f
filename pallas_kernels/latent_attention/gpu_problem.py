"""What is fixed when a latent attention kernel for Hopper is built."""

from typing import Any, NamedTuple

LATENT, WIDTH = 512, 576  # channels of a value and of a key: all of DeepSeek's models
# A block's index shifted by this is 0, which the compiler does not know: addresses that hang on it
# are computed in every turn of a loop, where they would fill the registers if kept.
NEVER = 24


class Problem(NamedTuple):
    """heads: a multiple of 8, some of which may be padding."""

    heads: int
    page_size: int
    dtype: Any
    scale: float
    interpret: Any
