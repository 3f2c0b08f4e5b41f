"""Block sizes of the Hopper product: measured ones where a tuner stored them, else a rule."""

from dataclasses import dataclass, replace

import jax

from pallas_kernels.hopper import SMS
from pallas_kernels.product.checks import ProductProblem
from pallas_kernels.tuning import tuned

ROWS = 64  # tokens of one warpgroup
GRANULE = 8  # tokens are padded to multiples of it
_MOST_BLOCKS = 4  # warpgroups that compute, beside the one that loads
_BLOCKS_OF_WIDE_TILES = 2  # their accumulators are twice as wide
_MOST_COLUMNS = 256  # rows of the weight that such a tile has, both parts together
_TILE_COSTS = 24  # what a tile costs beside its products, in their columns
_LEAST_USED = 0.75  # share of its arithmetic that a kernel must not waste
_SHARED_MEMORY = 227 * 1024 - 3072  # bytes for tiles
_SMALLEST = 32 << 20  # bytes of a weight; below, a launch costs more than there is to gain
_LEAST_WORK = 8 << 30  # multiplications of a product of many tokens; the least that was measured


@dataclass(frozen=True, slots=True)
class Plan:
    """How a product is cut.

    blocks: warpgroups of 64 tokens in a tile. columns: rows of the weight in a tile, of each part
    if there are two. depth: their elements in one step. slots: steps in flight. cluster: 1, or 2
    blocks of threads that share tokens or weights. clusters: on the chip, at most. shares_weights:
    the blocks of a cluster have different tokens and the same rows of the weight, not the reverse.
    """

    blocks: int
    columns: int
    depth: int
    slots: int
    cluster: int
    clusters: int
    shares_weights: bool = False

    @property
    def height(self) -> int:
        """Tokens of a tile."""
        return self.blocks * ROWS

    def chunk(self, size: int) -> int:
        """Columns that are stored at a time, in numbers of `size` bytes: few, for shared memory,
        and where it can be a whole line of the widest swizzle.
        """
        columns, rows, line = self.columns, self.height, 128 // size
        if columns % line == 0:
            return line
        while columns % 16 == 0 and rows * columns * size > 2**15:
            columns //= 2
        return columns

    def chunks(self, size: int) -> int:
        """How many of them lie in shared memory: two, so that one is filled while one is stored."""
        return min(2, self.columns // self.chunk(size))


def swizzle(columns: int, size: int) -> int:
    """Bytes of the widest swizzle that fits rows of so many numbers of `size` bytes; 0 for none."""
    return next((each for each in (128, 64, 32) if columns * size % each == 0), 0)


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


def fit(
    problem: ProductProblem,
    *,
    columns: int,
    depth: int,
    cluster: int,
    shares_weights: bool = False,
) -> Plan | None:
    """The plan with these sizes and as many slots as there is room for; None if it cannot be."""
    most = _BLOCKS_OF_WIDE_TILES if shares_weights else _MOST_BLOCKS
    blocks = min(-(-problem.tokens // ROWS), most)
    plan = Plan(blocks, columns, depth, 2, cluster, SMS // cluster, shares_weights)
    size = problem.out_dtype.itemsize
    room = _SHARED_MEMORY - plan.height * plan.chunk(size) * plan.chunks(size) * size
    slots = min(room // ((plan.height + problem.parts * columns) * depth * 2), 12)
    wrong = problem.inputs % depth or columns > problem.outputs or columns % GRANULE
    # A row of the result is stored in whole lines of the swizzle, wherever its last tile begins.
    wrong = wrong or problem.outputs * size % (swizzle(plan.chunk(size), size) or 1)
    if wrong or slots < 2 or (shares_weights and columns % (GRANULE * cluster)):
        return None
    return replace(plan, slots=slots)


def _by_rule(problem: ProductProblem) -> Plan | str:
    """Where nothing is stored: by the number of tokens."""
    weight = problem.parts * problem.outputs * problem.inputs
    if problem.parts == 1 or problem.tokens <= ROWS * 2:
        return "XLA's own product is as fast, as far as was measured"
    if problem.tokens > ROWS * _MOST_BLOCKS:
        return _wide(problem) if problem.tokens * weight >= _LEAST_WORK else "there is little to do"
    return _even(problem) if weight * 2 >= _SMALLEST else "the weight is small"


def _even(problem: ProductProblem) -> Plan | str:
    """Gate and up of 129 to 256 tokens: one tile of tokens, the same share of the weight for every
    SM, in as few rounds as registers let. On an H200, 256 tokens of Llama-8B: 102 us, XLA 119 us.
    """
    for rounds in range(1, 1 + problem.outputs // GRANULE):
        columns = -(-problem.outputs // (SMS * rounds * GRANULE)) * GRANULE
        plan = fit(problem, columns=columns, depth=64, cluster=1)
        if columns * problem.parts <= 128 and plan is not None:
            return plan
    return "no tile fits"


def _wide(problem: ProductProblem) -> Plan | str:
    """More tokens: two blocks of threads of 128 tokens share up to 256 rows of the weight, of a
    number that fills the last round best. The activation costs no pass over the results then: on an
    H200 a Llama-8B layer of 2048 or 8192 tokens takes 2% less time, a step 2 to 4%. Products that
    are not gated were no faster than XLA's.
    """
    best, least = None, 0
    for columns in range(_MOST_COLUMNS // problem.parts, 64 // problem.parts, -2 * GRANULE):
        plan = fit(problem, columns=columns, depth=64, cluster=2, shares_weights=True)
        if plan is None:
            continue
        rounds = -(-_pairs(problem, plan) * -(-problem.outputs // columns) // plan.clusters)
        time = rounds * (columns * problem.parts + _TILE_COSTS)
        if best is None or time < least:
            best, least = plan, time
    if best is None:
        return "no tile fits"
    useful = problem.tokens * problem.outputs * problem.parts
    if useful < _LEAST_USED * least * best.clusters * best.height * best.cluster:
        return "its tiles would leave too many SMs idle"
    return best


def _pairs(problem: ProductProblem, plan: Plan) -> int:
    """Pairs of tiles of tokens."""
    return -(-problem.tokens // (plan.height * plan.cluster))
