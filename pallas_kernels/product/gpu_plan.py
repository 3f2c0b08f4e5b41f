"""Block sizes of the Hopper product: measured ones where a tuner stored them, else a rule."""

from dataclasses import dataclass

import jax

from pallas_kernels.product.checks import ProductProblem
from pallas_kernels.tuning import tuned

ROWS = 64  # tokens of one warpgroup
GRANULE = 8  # tokens are padded to multiples of it
_MOST_BLOCKS = 4  # warpgroups that compute, beside the one that loads
_SMS = 132  # of an H100 or H200
_SHARED_MEMORY = 227 * 1024 - 3072  # bytes for tiles
_SMALLEST = 32 << 20  # bytes of a weight; below, a launch costs more than there is to gain


@dataclass(frozen=True, slots=True)
class Plan:
    """How a product is cut.

    blocks: warpgroups of 64 tokens in a tile. columns: rows of the weight in a tile, of each part
    if there are two. depth: their elements in one step. slots: steps in flight. cluster: 1, or 2
    blocks of threads that share the tokens. clusters: on the chip, at most.
    """

    blocks: int
    columns: int
    depth: int
    slots: int
    cluster: int
    clusters: int

    def chunk(self, size: int) -> int:
        """Columns that are stored at a time, in numbers of `size` bytes: few, for shared memory."""
        columns, rows = self.columns, self.blocks * ROWS
        while columns % 16 == 0 and rows * columns * size > 2**15:
            columns //= 2
        return columns


def choose(problem: ProductProblem) -> Plan | str:
    """The plan that serves the problem, or why XLA's own product should."""
    if problem.inputs % ROWS or problem.outputs % GRANULE or problem.outputs < 2 * GRANULE:
        return f"rows of the weight must be multiples of {ROWS}, their number one of {GRANULE}"
    stored = _stored(problem)
    if stored is not None:
        plan = None if stored["by"] == "xla" else fit(problem, **stored["plan"])
        return plan or "XLA's own product was measured to be as fast"
    return _by_rule(problem)


def _stored(problem: ProductProblem) -> dict | None:
    """What was measured for this weight, at the smallest number of tokens that is no smaller."""
    if jax.default_backend() != "gpu":
        return None
    key = f"{problem.parts}x{problem.outputs}x{problem.inputs}"
    measured = tuned("product").get(key, [])
    return next((each for each in measured if each["tokens"] >= problem.tokens), None)


def fit(problem: ProductProblem, *, columns: int, depth: int, cluster: int) -> Plan | None:
    """The plan with these sizes and as many slots as there is room for; None if it cannot be."""
    blocks = min(-(-problem.tokens // ROWS), _MOST_BLOCKS)
    clusters = _SMS // cluster
    plan = Plan(blocks, columns, depth, 2, cluster, clusters)
    size = problem.out_dtype.itemsize
    room = _SHARED_MEMORY - blocks * ROWS * plan.chunk(size) * size
    slots = min(room // ((blocks * ROWS + problem.parts * columns) * depth * 2), 12)
    wrong = problem.inputs % depth or columns > problem.outputs or columns % GRANULE
    if wrong or slots < 2:
        return None
    return Plan(blocks, columns, depth, slots, cluster, clusters)


def _by_rule(problem: ProductProblem) -> Plan | str:
    """Where nothing is stored: gate and up of 129 to 256 tokens, in as few rounds as registers let.

    On an H200, 256 tokens of Llama-8B: 102 us, XLA 119 us.
    """
    if problem.parts == 1 or not ROWS * 2 < problem.tokens <= ROWS * _MOST_BLOCKS:
        return "XLA's own product is as fast, as far as was measured"
    if problem.parts * problem.outputs * problem.inputs * 2 < _SMALLEST:
        return "the weight is small"
    for rounds in range(1, 1 + problem.outputs // GRANULE):
        columns = -(-problem.outputs // (_SMS * rounds * GRANULE)) * GRANULE
        plan = fit(problem, columns=columns, depth=64, cluster=1)
        if columns * problem.parts <= 128 and plan is not None:
            return plan
    return "no tile fits"
