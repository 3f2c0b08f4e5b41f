"""What there are programs for: the forward of a bucket, the draw of a number of rows."""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from jaxgen.engine.scoring import scoring_buckets
from jaxgen.ragged.buckets import Bucket, Buckets
from jaxgen.sampling import Demand


class Kind(StrEnum):
    """What a forward gives."""

    NEXT = "next"
    """Logits of each row's last token, to draw from."""
    SCORED = "scored"
    """The same, and how likely each token of the prompts was."""
    ALL_LOGITS = "all_logits"
    HIDDEN = "hidden"

    @property
    def draws(self) -> bool:
        """Whether there are logits to draw from."""
        return self in (Kind.NEXT, Kind.SCORED)


@dataclass(frozen=True, slots=True)
class Forward:
    """The program of a forward over a bucket's batches."""

    bucket: Bucket
    kind: Kind = Kind.NEXT


@dataclass(frozen=True, slots=True)
class Draw:
    """The program that draws a token for each of so many rows."""

    rows: int
    demand: Demand


type ProgramKey = Forward | Draw


@dataclass(frozen=True, slots=True)
class Sizes:
    """What programs are compiled for beside their keys. num_blocks: of each cache group."""

    num_blocks: tuple[int, ...]
    block_size: int
    num_slots: int

    @classmethod
    def smallest(cls, groups: int, block_size: int, num_slots: int) -> "Sizes":
        """Of the smallest cache whose steps need as much beside their arguments as any cache's.

        With a single block a group, XLA would know where all lies and leave out the looking up.
        """
        return cls((2,) * groups, block_size, num_slots)


def generation_programs(buckets: Buckets, demands: Sequence[Demand]) -> list[ProgramKey]:
    """What generation can need; demands: the kinds of draws that are compiled apart."""
    return [
        *(Forward(bucket) for bucket in buckets),
        *(Forward(bucket, Kind.SCORED) for bucket in scoring_buckets(buckets)),
        *draws(buckets, demands),
    ]


def draws(buckets: Buckets, demands: Sequence[Demand]) -> list[Draw]:
    """Of every kind, for every number of rows."""
    rows = sorted({bucket.rows for bucket in buckets})
    return [Draw(count, demand) for count in rows for demand in demands]
