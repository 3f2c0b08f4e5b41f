"""The sampler on a mesh: replicated state, inside shard_map, the tokens of one device."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec as P

from jaxgen.sampling import SamplingParams, abstract_state, admit, init, sample, slot_row

VOCAB = 29


def run(mesh):
    whole = None if mesh is None else NamedSharding(mesh, P())
    state = init(3, VOCAB, whole)
    plain = SamplingParams(temperature=1.1, top_k=9, top_p=0.9, logprobs=2)
    penalised = SamplingParams(repetition_penalty=1.3, logit_bias={4: 2.0}, min_p=0.01)
    for slot, params in enumerate((plain, penalised, SamplingParams(temperature=0))):
        row = slot_row(params, vocab_size=VOCAB, seed=slot, prompt_ids=[1, 2], output_ids=[3])
        state = admit(state, slot, row)
    step = sample
    if mesh is not None:
        gathered = functools.partial(jax.lax.all_gather, axis_name="tensor", axis=1, tiled=True)
        step = jax.shard_map(
            lambda logits, *others: sample(gathered(logits), *others),
            mesh=mesh,
            in_specs=(P(None, "tensor"), P(), P(), P()),
            out_specs=P(),
            check_vma=False,
        )
    compiled = jax.jit(step, donate_argnums=1)
    logits = np.random.default_rng(0).normal(0, 2, (5, 3, 32)).astype(np.float32)
    drawn = []
    for step_logits in logits:
        state, out = compiled(step_logits, state, jnp.arange(3), jnp.ones(3, bool))
        drawn.append(jax.tree.map(np.asarray, out))
    assert compiled._cache_size() == 1
    shapes = abstract_state(3, VOCAB, whole)
    assert jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), state) == jax.tree.map(
        lambda leaf: (leaf.shape, leaf.dtype), shapes
    )
    return drawn


def test_a_mesh_draws_the_tokens_of_one_device():
    alone = run(None)
    meshed = run(jax.make_mesh((2,), ("tensor",), axis_types=(jax.sharding.AxisType.Auto,)))
    for one, many in zip(alone, meshed, strict=True):
        np.testing.assert_array_equal(one.tokens, many.tokens)
        np.testing.assert_allclose(one.logprobs, many.logprobs, atol=1e-6)
