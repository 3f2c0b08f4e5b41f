"""After warm-up nothing compiles, nothing copies the cache, and one small array a step goes in."""

import random
import re

import jax
import numpy as np
import pytest

from jaxgen.engine.loop import GenerationLoop
from jaxgen.engine.lowering import abstract_logits
from jaxgen.engine.program_keys import Draw, Forward, Kind, Sizes
from jaxgen.engine.programs import Programs, step_bytes
from jaxgen.engine.runner import StepRunner
from jaxgen.engine.scoring import scoring_buckets
from jaxgen.llm import LLM
from jaxgen.sampling import Demand, SamplingParams

REQUESTS = 200
COMPILE = "/jax/core/compile/backend_compile_duration"


@pytest.fixture(scope="module")
def llm(golden_dir):
    """Every bucket there is: rows 1, 2 and 4 for decodes, 16 and 24 tokens for prompts.

    Those of 4 rows have 8 blocks, or 4 as if 8 made a large table.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("jaxgen.ragged.buckets.SMALL_TABLE", 16)
        llm = LLM(
            golden_dir("llama_tied"),
            dtype="float32",
            max_num_seqs=4,
            max_num_batched_tokens=24,
            block_size=8,
            max_model_len=64,
            num_gpu_blocks_override=12,
        )
    assert [(b.rows, b.blocks) for b in llm.engine.buckets.decode][-2:] == [(4, 4), (4, 8)]
    llm.warm_up()
    return llm


@pytest.fixture
def compiled():
    """Grows by every program that the backend compiles."""
    seen = []

    def listen(event, duration, **details):
        del duration
        if event == COMPILE:
            seen.append(details)

    jax.monitoring.register_event_duration_secs_listener(listen)
    yield seen
    jax.monitoring.unregister_event_duration_listener(listen)


def some_params(dice):
    """A request of any kind; greedy ones are as likely as all others together."""
    penalties = {
        "presence_penalty": dice.choice([0.0, 0.7]),
        "repetition_penalty": dice.choice([1.0, 1.2]),
    }
    random_ones = {
        "temperature": dice.uniform(0.5, 1.5),
        "top_k": dice.choice([0, 1, 40]),
        "top_p": dice.choice([1.0, 0.8]),
        "min_p": dice.choice([0.0, 0.05]),
        "seed": dice.choice([None, dice.randrange(2**60)]),
        "n": dice.choice([1, 1, 2]),
    }
    return SamplingParams(
        **{"temperature": 0.0} if dice.random() < 0.5 else random_ones,
        **penalties if dice.random() < 0.3 else {},
        logit_bias={dice.randrange(512): 3.0} if dice.random() < 0.2 else {},
        stop=dice.choice([(), "e", "the"]),
        logprobs=dice.choice([None, None, 0, 5]),
        prompt_logprobs=dice.choice([None, None, None, 2]),
        bad_words=dice.choice([(), (), ("the", " of a")]),
        structured_outputs=dice.choice([None, None, None, {"regex": "[a-z ]{3,}"}]),
        max_tokens=dice.randint(1, 20),
        min_tokens=dice.choice([0, 1]),
    )


def test_nothing_compiles_after_warm_up(llm, compiled, preempted):
    dice = random.Random(2)
    loop = GenerationLoop(llm.engine, llm.tokenizer, eos_ids=llm.eos_ids)
    waiting, outputs, aborted = list(range(REQUESTS)), [], 0
    while waiting or loop.has_unfinished:
        for _ in range(dice.randrange(4)):
            if waiting:
                name = str(waiting.pop())
                prompt = [dice.randrange(512) for _ in range(dice.randint(1, 40))]
                outputs.append(loop.submit(name, prompt, some_params(dice)))
        if dice.random() < 0.03 and not outputs[-1].finished:
            loop.abort(outputs[-1].request_id)
            aborted += 1
        loop.step()
    assert compiled == []
    assert llm.engine.runner.late_compiles == 0
    assert len(outputs) == REQUESTS
    assert all(output.finished for output in outputs)
    reasons = {completion.finish_reason for output in outputs for completion in output.outputs}
    assert reasons == {"stop", "length", "abort"}
    assert preempted
    assert aborted
    llm.engine.state.check()
    assert llm.engine.free_blocks == [12]


def test_decode_buckets_say_what_mixed_ones_do(llm, golden, tokens):
    """The golden tests have one shape; here rows of one token have shapes of their own."""
    case = golden("llama_tied")
    for chosen in (slice(0, 4), slice(2, 3), slice(0, 2)):
        assert tokens(llm.engine, case.prompts[chosen]) == case.greedy[chosen]


def test_a_late_compile_is_counted_and_logged(llm, compiled, caplog):
    before = llm.engine.runner.late_compiles
    llm.engine.put([1], [[1]])
    assert llm.engine.runner.late_compiles == before  # what generation computes gives these logits
    llm.engine.put([1], [[1]], all_logits=True)
    llm.engine.flush(1)
    assert llm.engine.runner.late_compiles == before + 1
    assert "late compile" in caplog.text
    assert len(compiled) == 1


def test_warm_up_is_for_an_idle_engine(llm):
    llm.engine.state.track(1)
    with pytest.raises(RuntimeError, match="warm up before"):
        llm.warm_up()
    llm.engine.flush(1)


def test_where_first_runs_cost_more_every_step_has_had_one(llm, monkeypatch):
    """What a GPU's warm-up runs, without a row, changes nothing for those who come."""
    params = SamplingParams(temperature=0.7, seed=3, max_tokens=6, ignore_eos=True, logprobs=1)
    prompts = [[5, 6, 7], [8] * 20]
    before = [output.outputs[0].token_ids for output in llm.generate(prompts, params)]
    ran = []
    sample = StepRunner.sample
    monkeypatch.setattr(StepRunner, "loads_late", True)
    monkeypatch.setattr(
        StepRunner,
        "sample",
        lambda runner, bucket, *rest: ran.append(bucket) or sample(runner, bucket, *rest),
    )
    llm.engine.warm_up()
    assert ran == list(llm.engine.buckets)
    assert [output.outputs[0].token_ids for output in llm.generate(prompts, params)] == before


def test_one_transfer_a_step_and_no_wait_but_for_tokens(llm, monkeypatch):
    """Implicit transfers raise; the explicit ones are counted."""
    sent, read = [], []
    send, fetch = StepRunner._send, StepRunner.read
    monkeypatch.setattr(
        StepRunner, "_send", lambda runner, packed: sent.append(packed.size) or send(runner, packed)
    )
    monkeypatch.setattr(
        StepRunner, "read", lambda runner, results: read.append(1) or fetch(runner, results)
    )
    loop = GenerationLoop(llm.engine)
    params = SamplingParams(temperature=0.8, seed=1, max_tokens=12, ignore_eos=True, logprobs=2)
    for number in range(3):
        loop.submit(str(number), [7 + number] * 5, params)
    loop.step()  # admits: each request's settings go in once
    assert (len(sent), len(read)) == (1, 0)
    loop.step()
    steps = 2
    with jax.transfer_guard("disallow"):
        while loop.has_unfinished:
            loop.step()
            steps += 1
            assert len(read) == steps - 1  # the host stays one step ahead
    assert len(sent) == steps - 1  # the last call had nothing left to send
    assert all(np.isfinite(size) for size in sent)


def test_memory_is_kept_for_the_step_that_needs_most(llm):
    """Scoring a prompt takes room that no other step does."""
    runner, buckets = llm.engine.runner, llm.engine.buckets
    draw = runner.compiled(Draw(buckets.mixed[-1].rows, Demand.ANY)).memory_analysis()
    needed = [
        step_bytes(runner.compiled(Forward(buckets.mixed[-1], kind)).memory_analysis(), draw)
        for kind in (Kind.NEXT, Kind.SCORED)
    ]
    sizing = Programs(llm.engine.model, Sizes.smallest(1, 8, 4))
    assert sizing.temporary_bytes(scoring_buckets(buckets)[-1]) == max(needed)


@pytest.mark.parametrize("shards", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_the_cache_is_updated_in_place(golden_dir, one_shape, shards):
    """Pages and logits are aliased, and no copy of a layer's pages is in the program."""
    engine = one_shape(
        golden_dir("qwen2_tied_swa"),
        max_num_seqs=2,
        max_num_batched_tokens=16,
        num_gpu_blocks_override=4096,
        tensor_parallel_size=shards,
    )
    (bucket,) = engine.buckets.mixed
    program = engine.runner.compiled(Forward(bucket))
    leaves = jax.tree.leaves(engine.runner.pages)
    cache = sum(leaf.nbytes for leaf in leaves) // shards
    memory = program.memory_analysis()
    logits = abstract_logits(engine.model, bucket.rows)
    assert memory.alias_size_in_bytes == cache + logits.size * logits.dtype.itemsize
    assert memory.temp_size_in_bytes < leaves[0].nbytes // shards
    shape = ",".join(map(str, leaves[0].sharding.shard_shape(leaves[0].shape)))
    made = re.findall(rf"= f32\[{shape}\]\S* (\w[\w-]*)\(", program.as_text())
    assert made
    assert not {name for name in made if name.startswith("copy")}
