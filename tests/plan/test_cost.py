"""The least work of a step with experts, on the device that has most of it."""

import jax.numpy as jnp
import numpy as np
import pytest

from jaxgen.config import EngineConfig
from jaxgen.engine.build import describe
from jaxgen.engine.cost import step_parts
from jaxgen.engine.model import build_model
from jaxgen_checkpoints.checkpoint import open_checkpoint
from jaxgen_checkpoints.load import abstract


@pytest.fixture
def experts_part(golden_dir):
    """Bytes and FLOPs of the experts of qwen3_moe: 8, of which 3 are a token's; 2 layers' worth."""

    def cost(tokens, **mesh):
        described = describe(open_checkpoint(golden_dir("qwen3_moe")), EngineConfig(**mesh))
        shapes = abstract(described.weights, described.layout, jnp.bfloat16)
        model = build_model(described.policy, shapes, described.layout)
        return step_parts(model, tokens=tokens, rows=tokens, context=8)[1]

    return cost


def test_slices_share_the_work_evenly(experts_part):
    whole, sliced = experts_part(5), experts_part(5, tensor_parallel_size=4)
    assert whole.bytes_read == pytest.approx(4 * sliced.bytes_read, rel=1e-4)
    assert whole.flops == 4 * sliced.flops


@pytest.mark.parametrize("tokens", [1, 7, 200])
def test_whole_experts_wait_for_the_device_that_has_most(experts_part, tokens):
    sliced = experts_part(tokens, tensor_parallel_size=4)
    whole = experts_part(tokens, tensor_parallel_size=4, enable_expert_parallel=True)
    dice = np.random.default_rng(0)
    order = dice.random((1000, tokens, 8)).argsort(axis=2)[:, :, :3]
    chosen = (order[..., None] == np.arange(8)).any(axis=2).reshape(1000, tokens, 4, 2)
    touched = chosen.any(axis=1).sum(axis=2).max(axis=1).mean()
    visits = chosen.sum(axis=(1, 3)).max(axis=1).mean()
    everything = experts_part(4000, tensor_parallel_size=4).bytes_read
    assert whole.bytes_read / everything == pytest.approx(touched / 2, rel=0.1)
    assert whole.flops / sliced.flops == pytest.approx(visits / (3 * tokens / 4), rel=0.15)
