"""What breaks a step off ends its requests and nothing else: the next one is served as if new."""

import shutil

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from jaxgen.engine.loop import GenerationLoop
from jaxgen.engine.outputs import FinishReason
from jaxgen.engine.programs import Forward, Programs
from jaxgen.engine.runner import StepFailed
from jaxgen.sampling import SamplingParams
from jaxgen_checkpoints.errors import CheckpointWarning

GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)


@pytest.fixture(scope="module")
def case(golden):
    return golden("mistral_swa")


@pytest.fixture(scope="module")
def engine(case, one_shape):
    return one_shape(case.folder)


def die_after(monkeypatch, steps, error):
    """The forward after `steps` others takes the donated cache and then raises."""
    choose, taken = Programs.__getitem__, []

    def dying(programs, key):
        program = choose(programs, key)
        if not isinstance(key, Forward):
            return program

        def run(*args):
            taken.append(key)
            results = program(*args)
            if len(taken) == steps + 1:
                raise error
            return results

        return run

    monkeypatch.setattr(Programs, "__getitem__", dying)


@pytest.mark.parametrize(
    ("error", "raised", "words"),
    [
        (jax.errors.JaxRuntimeError("INTERNAL: gone"), StepFailed, "INTERNAL: gone"),
        (KeyboardInterrupt(), KeyboardInterrupt, "KeyboardInterrupt"),
    ],
    ids=["device", "interrupt"],
)
def test_a_step_that_dies_with_the_cache_ends_all_requests(
    case, engine, tokens, monkeypatch, error, raised, words
):
    loop = GenerationLoop(engine)
    engine.state.track(9)  # a sequence of `put`: its past is gone too
    engine.state.reserve(9, 3)
    outputs = [loop.submit(str(i), prompt, GREEDY) for i, prompt in enumerate(case.prompts)]
    with monkeypatch.context() as patch:
        die_after(patch, 6, error)
        for _ in range(6):
            loop.step()
        with pytest.raises(raised):
            loop.step()
    for output in outputs:
        assert output.outputs[0].finish_reason is FinishReason.ERROR
        assert words in output.outputs[0].error
    assert not loop.has_unfinished
    assert len(engine.state) == 0
    engine.state.check()
    after = loop.submit("0", case.prompts[3], GREEDY)
    while loop.has_unfinished:
        loop.step()
    assert after.outputs[0].token_ids == case.greedy[3]
    assert tokens(engine, case.prompts[:2]) == case.greedy[:2]


def test_an_interrupt_within_the_host_state_leaves_nothing_of_it(case, engine, tokens, monkeypatch):
    """Between two lines of a change: blocks have lost their owners, their tables name them yet."""
    loop = GenerationLoop(engine)
    outputs = [loop.submit(str(i), prompt, GREEDY) for i, prompt in enumerate(case.prompts)]
    for _ in range(3):
        loop.step()

    def interrupted(*_):
        for allocator in engine.state.allocators:
            allocator._counts[:] = 0
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(engine.state, "reserve_rows", interrupted)
        with pytest.raises(KeyboardInterrupt):
            loop.step()
    assert {output.outputs[0].finish_reason for output in outputs} == {FinishReason.ERROR}
    assert not loop.has_unfinished
    engine.state.check()
    assert tokens(engine, [case.prompts[2]]) == [case.greedy[2]]


def test_a_step_that_dies_after_dispatch_is_found_when_it_is_read(
    case, engine, tokens, monkeypatch
):
    loop = GenerationLoop(engine)
    output = loop.submit("0", case.prompts[2], GREEDY)
    for _ in range(4):
        loop.step()

    def fail(_):
        raise jax.errors.JaxRuntimeError("INTERNAL: found late")

    with monkeypatch.context() as patch:
        patch.setattr(jax, "device_get", fail)
        with pytest.raises(StepFailed, match="found late"):
            loop.step()
    assert "found late" in output.outputs[0].error
    assert tokens(engine, [case.prompts[2]]) == [case.greedy[2]]


def test_a_put_that_dies_forgets_every_sequence(case, engine, tokens, monkeypatch):
    engine.put([1], [case.prompts[1]], all_logits=True)
    with monkeypatch.context() as patch:
        die_after(patch, 0, jax.errors.JaxRuntimeError("INTERNAL: gone"))
        with pytest.raises(StepFailed):
            engine.put([2], [case.prompts[2]], all_logits=True)
    assert len(engine.state) == 0
    got = engine.put([1], [case.prompts[1]], all_logits=True)
    np.testing.assert_allclose(got, case.logits[1], atol=2e-4, rtol=0)
    engine.flush(1)


def test_logits_that_are_not_finite_end_their_request_alone(case, one_shape, generate, tmp_path):
    """One token's embedding is NaN: who has it fails, nobody else, not even in its old blocks."""
    used = {token for ids in (*case.prompts, *case.greedy) for token in ids}
    poison = next(token for token in range(512) if token not in used)
    folder = shutil.copytree(case.folder, tmp_path / "poisoned")
    for file in folder.glob("*.safetensors"):
        tensors = load_file(file)
        if "model.embed_tokens.weight" in tensors:
            tensors["model.embed_tokens.weight"][poison] = np.nan
            save_file(tensors, file, metadata={"format": "pt"})
    with pytest.warns(CheckpointWarning, match="not finite"):
        engine = one_shape(folder, num_gpu_blocks_override=8)
    (failed,) = generate(engine, [[poison] * 64], SamplingParams(max_tokens=1))
    assert failed.outputs[0].finish_reason is FinishReason.ERROR
    assert "not finite" in failed.outputs[0].error
    assert failed.outputs[0].token_ids == []
    assert np.isnan(engine.runner.pages[-1].values).all()
    # The last page stays so: entries of freed and of absent blocks are clipped to it.
    engine.state.track(1)
    engine.state.reserve(1, 16)
    assert 7 in engine.state.tables[0][engine.state[1].index]
    for number in (3, 2, 1, 0):
        (clean,) = generate(engine, [case.prompts[number]], GREEDY)
        assert clean.outputs[0].token_ids == case.greedy[number]
    bad, good = generate(engine, [[poison], case.prompts[1]], GREEDY)
    assert bad.outputs[0].finish_reason is FinishReason.ERROR
    assert good.outputs[0].token_ids == case.greedy[1]
    assert np.isnan(engine.runner.pages[-1].values[7]).all()
