"""The least work that a step can be done with: bytes read and FLOPs of its matrix products.

Every weight that is needed is read once, and every live key and value; of a mixture of experts
only the experts that a token has chosen. Two FLOPs a weight and token; attention is added.
"""

import math
from dataclasses import dataclass

from jaxgen.engine.model import Model
from jaxgen.engine.pages import block_bytes
from jaxgen_models.latent_config import LatentMoEConfig
from jaxgen_models.moe_config import MoEConfig


@dataclass(frozen=True, slots=True)
class Ceilings:
    """Read bandwidth in bytes/s and rate of matrix products in FLOP/s, of one device."""

    bandwidth: float
    matrix_rate: float


@dataclass(frozen=True, slots=True)
class StepCost:
    """Least work on one device."""

    bytes_read: int
    flops: int

    def seconds(self, ceilings: Ceilings) -> float:
        """The roofline: the larger of the two times."""
        return max(self.bytes_read / ceilings.bandwidth, self.flops / ceilings.matrix_rate)


def step_cost(model: Model, *, tokens: int, rows: int, context: int) -> StepCost:
    """One step on one device of the mesh, all its parts together; arguments as `step_parts`."""
    parts = step_parts(model, tokens=tokens, rows=rows, context=context)
    return StepCost(sum(p.bytes_read for p in parts), sum(p.flops for p in parts))


def step_parts(
    model: Model, *, tokens: int, rows: int, context: int
) -> tuple[StepCost, StepCost, StepCost]:
    """The products with weights, the routed experts and the attention of one step on one device.

    One runs after the other, so that what one waits for memory the other cannot multiply. tokens:
    in the step, all rows together. rows: sequences, each of which gets logits. context: keys that a
    row's last token sees. Prompts are taken to be whole: their tokens see half of it on average.
    Experts are taken to be chosen evenly and independently; of devices with experts of their own
    it is the one that most of those chosen are likely to be on.
    """
    config = model.config
    itemsize = model.dtype.itemsize
    vocabulary = int(config.vocab_size) * int(config.model_dim) // model.tensor_shards
    experts, read, active = _experts(model, tokens)
    weights = model.bytes_per_device() // itemsize - experts
    body = weights - (vocabulary if config.tied else 2 * vocabulary)
    seen = context if tokens == rows else -(-context // 2)
    return (
        StepCost((body + vocabulary) * itemsize, 2 * (body * tokens + vocabulary * rows)),
        StepCost(read * itemsize, 2 * active),
        StepCost(rows * _kv_bytes(model, context), tokens * _attention_flops(model, seen)),
    )


def _experts(model: Model, tokens: int) -> tuple[int, int, int]:
    """Weights of the routed experts on one device, padding included: held, read by so many tokens,
    and the products of a weight with a token.
    """
    config = model.config
    if not isinstance(config, MoEConfig):
        return 0, 0, 0
    count, chosen = int(config.num_experts), config.router.top_k
    experts = -(-count // model.layout.shards("experts"))
    width = -(-int(config.expert_ffn_dim) // model.layout.shards("expert_ffn"))
    held = sum(config.sparse) * experts * 3 * int(config.model_dim) * width
    each, groups = held // experts, -(-count // experts)
    touched = _most(experts, 1 - (1 - chosen / count) ** tokens, groups)
    visits = _most(chosen * tokens, min(1, experts / count), groups)
    return held, int(each * touched), int(each * visits)


def _most(trials: int, chance: float, groups: int) -> float:
    """Successes to be expected in the luckiest of so many groups of trials."""
    if groups == 1 or not 0 < chance < 1:
        return trials * chance
    odds, never = math.log(chance / (1 - chance)), trials * math.log1p(-chance)
    most, below = 0.0, 0.0
    for successes in range(trials):
        ways = math.lgamma(successes + 1) + math.lgamma(trials - successes + 1)
        below += math.exp(math.lgamma(trials + 1) - ways + never + successes * odds)
        most += 1 - min(below, 1) ** groups
    return most


def _kv_bytes(model: Model, context: int) -> int:
    """Bytes of one row's live keys and values on one device."""
    windows = model.policy.cache_windows
    return sum(
        size * (context if window is None else min(window, context))
        for size, window in zip(block_bytes(model, 1), windows, strict=True)
    )


def _attention_flops(model: Model, seen: int) -> int:
    """FLOPs of one token's attention over so many keys, all layers together, on one device."""
    config = model.config
    if isinstance(config, LatentMoEConfig):
        each = 2 * (2 * int(config.latent_dim) + int(config.head_dim))
    else:
        each = 4 * int(config.head_dim)
    keys = sum(seen if window is None else min(window, seen) for window in config.windows)
    return each * int(config.heads) * keys // model.tensor_shards
