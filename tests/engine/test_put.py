"""The verbs of the engine: what is refused changes nothing, what is taken adds up."""

import numpy as np
import pytest

from jaxgen.engine.build import build_hf_engine
from jaxgen.schedule.verdict import SchedulingError, SchedulingResult
from jaxgen_checkpoints.errors import RefusedInput

VOCAB = 512


@pytest.fixture(scope="module")
def shared(golden_dir, one_shape):
    """Two cache groups (all, and a window of 10), 12 blocks of 4 tokens in each."""
    return one_shape(
        golden_dir("qwen2_tied_swa"),
        max_num_seqs=3,
        max_num_batched_tokens=16,
        max_tracked_sequences=4,
        block_size=4,
        max_model_len=24,
        num_gpu_blocks_override=12,
    )


@pytest.fixture
def engine(shared):
    yield shared
    for uid in list(shared.state.uids):
        shared.flush(uid)
    shared.state.check()
    assert shared.free_blocks == [12, 12]


def picture(engine):
    """All that a refused call must leave as it was."""
    lengths = {uid: engine.state[uid].length for uid in engine.state.uids}
    return lengths, engine.free_blocks, [table.tolist() for table in engine.state.tables]


def track(engine, *lengths):
    """Sequences 0, 1, ... of these lengths, without computing them."""
    for uid, length in enumerate(lengths):
        engine.state.track(uid)
        engine.state.reserve(uid, length)
        engine.state.commit(uid)


@pytest.mark.parametrize(
    ("tracked", "asked", "result"),
    [
        ([], {0: 16}, SchedulingResult.Success),
        ([2, 2], {0: 1, 7: 1}, SchedulingResult.Success),
        ([2, 2, 2, 2], {7: 1}, SchedulingResult.EngineSequenceLimitExceeded),
        ([], {0: 1, 1: 1, 2: 1, 3: 1}, SchedulingResult.BatchSequenceLimitExceeded),
        ([], {0: 9, 1: 8}, SchedulingResult.BatchTokenLimitExceeded),
        ([20, 20], {2: 9}, SchedulingResult.KVCacheLimitExceeded),
        ([20], {0: 5}, SchedulingResult.SequenceTokenLimitExceeded),
    ],
)
def test_every_verdict_is_reached_and_a_refusal_leaves_no_trace(engine, tracked, asked, result):
    track(engine, *tracked)
    before = picture(engine)
    uids, lengths = list(asked), list(asked.values())
    assert engine.can_schedule(uids, lengths) is result
    assert picture(engine) == before
    batch = [[5] * length for length in lengths]
    if result is SchedulingResult.Success:
        assert engine.put(uids, batch, all_logits=True).shape == (sum(lengths), VOCAB)
    else:
        with pytest.raises(SchedulingError) as caught:
            engine.put(uids, batch, all_logits=True)
        assert caught.value.result is result
        assert picture(engine) == before


@pytest.mark.parametrize("asked", [{0: 9, 7: 8}, {7: 4, 0: 13}, {7: 4, 0: 8}])
def test_without_the_dry_run_a_refusal_leaves_no_trace_either(engine, asked):
    """Too many tokens for a step, too long a sequence, too few blocks."""
    track(engine, 16, 24, 4)
    before = picture(engine)
    with pytest.raises(ValueError, match=r"\d"):
        engine.put(list(asked), [[5] * n for n in asked.values()], do_checks=False)
    assert picture(engine) == before


@pytest.mark.parametrize(
    ("uids", "batch", "words"),
    [
        ([1], [[3, -1]], "-1"),
        ([1], [[VOCAB]], str(VOCAB)),
        ([1], [[2**40]], str(2**40)),
        ([1], [[2**70]], "token ids"),
        ([1], [[1.0, 2.0]], "token ids"),
        ([1], [[True]], "token ids"),
        ([1], [[]], "token ids"),
        ([1], [[[1, 2]]], "token ids"),
        ([1], [[[1], [2, 3]]], "token ids"),
        ([1], ["word"], "token ids"),
        ([1, 1], [[1], [2]], "once"),
        ([1, 2], [[1]], "2 uids"),
        ([1, 2], [[1], [VOCAB]], "sequence 2"),
    ],
)
def test_bad_input_is_named_and_leaves_no_trace(engine, uids, batch, words):
    track(engine, 3)
    before = picture(engine)
    for do_checks in (True, False):
        with pytest.raises(RefusedInput, match=words):
            engine.put(uids, batch, do_checks)
        assert picture(engine) == before


def test_sequences_go_on_and_free_what_they_held(engine):
    assert engine.n_kv_cache_groups == 2
    assert engine.query(5, 99, 99) == (24, 6)
    assert engine.query(5, 10, 2) == (8, 2)
    whole = engine.put([5, 6], [np.arange(9, dtype=np.int64), [3]], all_logits=True)
    assert engine.free_blocks == [12 - 3 - 1] * 2
    assert engine.get_remaining_block_capacity(5) == 3
    assert engine.query(5, 8, 1) == (7, 1)
    engine.put([5], [[1] * 7], all_logits=True)
    # The query at position 16 sees 7 to 16: the windowed group needs no block before block 1.
    assert engine.free_blocks == [12 - 4 - 1, 12 - 3 - 1]
    engine.flush(5)
    engine.flush(5)
    engine.flush(404)
    assert engine.free_blocks == [11, 11]
    assert engine.query(5, 99, 99) == (24, 6)
    assert engine.get_remaining_block_capacity(5) == 0
    engine.flush(6)
    again = engine.put([5, 6], [range(9), [3]], all_logits=True)
    np.testing.assert_array_equal(again, whole)
    assert engine.put([], []).shape == (0, VOCAB)


def test_logits_that_were_given_stay_as_they_are(engine):
    """Steps take the memory of logits of earlier ones, but not of those that somebody has."""
    first = engine.put([1], [[3, 4, 5]])
    seen = np.asarray(first)
    second = engine.put([1], [[6, 7, 8]])
    np.testing.assert_array_equal(np.asarray(first), seen)
    assert (np.asarray(second) != seen).any()


def test_a_window_never_holds_more_than_it_needs(engine):
    held = []
    for position in range(24):
        engine.put([1], [[position]], all_logits=True)
        held.append(12 - engine.free_blocks[1])
        engine.state.check()
    assert max(held) == 3  # the 9 tokens behind the next one, wherever a block begins
    assert engine.free_blocks == [12 - 6, 12 - 3]


def test_forget_everything_begins_anew(engine):
    first = engine.put([1], [[4, 5, 6]], all_logits=True)
    engine.state.allocators[0].allocate(2)  # for a sequence that an interrupt kept from owning them
    engine.state.tables[1][2, 1] = 5
    engine.forget_everything()
    assert engine.free_blocks == [12, 12]
    engine.state.check()
    np.testing.assert_array_equal(engine.put([1], [[4, 5, 6]], all_logits=True), first)


@pytest.mark.parametrize(
    "config",
    [
        {
            "max_context": 24,
            "max_ragged_batch_size": 16,
            "max_ragged_sequence_count": 3,
            "tp_size": 2,
        },
        {
            "state_manager": {
                "max_context": 24,
                "max_ragged_batch_size": 16,
                "max_ragged_sequence_count": 3,
                "max_tracked_sequences": 4,
                "memory_config": {"mode": "allocate", "size": 12},
            },
            "tensor_parallel": {"tp_size": 2},
        },
    ],
    ids=["flat", "nested"],
)
def test_configs_as_users_of_deepspeed_write_them(golden_dir, config):
    """Nothing is compiled here: sizes are known when an engine is built."""
    engine = build_hf_engine(golden_dir("llama_tied"), config)
    assert engine.limits.max_tokens == 16
    assert engine.limits.max_sequences == 3
    assert engine.state.max_context == 24
    assert engine.model.tensor_shards == 2
    if "state_manager" in config:
        assert engine.free_blocks == [12]
        assert engine.state.max_tracked == 4


def test_a_context_beyond_the_models_is_refused_before_weights_are_read(golden_dir, monkeypatch):
    monkeypatch.setattr("jaxgen.engine.build.load_model", None)
    with pytest.raises(RefusedInput, match="max_position_embeddings = 256"):
        build_hf_engine(golden_dir("llama_plain"), {"max_model_len": 257})


def test_a_snapshot_moves_to_another_mesh(golden, one_shape, tokens, tmp_path):
    """Nine query heads over three KV heads would not divide by two either: see test_mesh."""
    case = golden("llama_bias_headdim")
    source = one_shape(case.folder, tensor_parallel_size=4)
    source.serialize(tmp_path / "snapshot")
    restored = one_shape(tmp_path / "snapshot", tensor_parallel_size=2)
    assert tokens(restored, case.prompts[:3]) == case.greedy[:3]
    with pytest.raises(RefusedInput, match="snapshot already"):
        source.serialize(tmp_path / "snapshot")
