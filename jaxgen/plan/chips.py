"""What one device of each kind has, as its maker states it or as it was measured."""

from dataclasses import dataclass
from types import MappingProxyType

from jaxgen.engine.cost import Ceilings


@dataclass(frozen=True, slots=True)
class Chip:
    """One JAX device.

    platform: as `pallas_kernels.dispatch` names it. memory: bytes. ceilings: read bandwidth and
    bfloat16 matrix rate. link: bytes/s out of one device to its peers. hop: seconds that the
    smallest collective takes. measured: whether the ceilings were measured, not stated. attained:
    the share of its ceiling at which a part of a step runs. launch: seconds that a kernel takes
    beside its work.
    """

    platform: str
    memory: int
    ceilings: Ceilings
    link: float
    hop: float
    measured: bool = False
    attained: float = 1.0
    launch: float = 0.0


# TPU: cloud.google.com/tpu/docs/{v5e,v6e,v5p,tpu7x}, per chip; a 7x chip is two devices. Links:
# half of the stated two-way interconnect bandwidth. H200: docs/performance.md, NVLink 4 one way;
# attained and launch are fitted to the steps that were measured there.
CHIPS = MappingProxyType(
    {
        "v5e": Chip("tpu", 16 * 2**30, Ceilings(0.82e12, 197e12), 100e9, 3e-6),
        "v6e": Chip("tpu", 32 * 2**30, Ceilings(1.64e12, 918e12), 200e9, 3e-6),
        "v5p": Chip("tpu", 95 * 2**30, Ceilings(2.765e12, 459e12), 300e9, 3e-6),
        "tpu7x": Chip("tpu", 96 * 2**30, Ceilings(3.69e12, 1153e12), 300e9, 3e-6),
        "h200": Chip(
            "cuda",
            139 * 2**30,
            Ceilings(4.29e12, 766e12),
            450e9,
            12e-6,
            measured=True,
            attained=0.82,
            launch=2.2e-6,
        ),
    }
)
"""Kind -> device. A CPU is not here: it has no fixed memory, bandwidth or rate."""
