"""The config of decoders whose positions are rows of a learned table."""

from dataclasses import dataclass

from jaxgen_checkpoints.dim import Dim
from jaxgen_models.config import DecoderConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class LearnedPositionConfig(DecoderConfig):
    """position_rows: rows of the table, of which position p takes row p + position_offset."""

    position_rows: Dim
    position_offset: int = 0
