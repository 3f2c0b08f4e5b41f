"""An engine's programs are compiled while its weights are loaded, and given up with them."""

import threading

import pytest

from jaxgen.config import EngineConfig
from jaxgen.engine import build
from jaxgen.engine.frame import Frame
from jaxgen.engine.program_keys import Sizes, draws, generation_programs
from jaxgen.engine.program_store import ProgramStore
from jaxgen.engine.programs import Programs
from jaxgen.engine.scoring import scoring_buckets
from jaxgen.llm import LLM
from jaxgen.opened import open_model
from jaxgen.sampling import Demand, SamplingParams
from jaxgen_checkpoints.errors import CheckpointError, RefusedInput
from pallas_kernels.dispatch import lowering_for

LIMITS = {
    **{"dtype": "float32", "max_num_seqs": 1, "max_num_batched_tokens": 8},
    **{"block_size": 8, "max_model_len": 32},
}
GREEDY = SamplingParams(temperature=0.0, max_tokens=5, ignore_eos=True)


@pytest.fixture
def opened(golden_dir):
    def with_options(**options):
        return open_model(golden_dir("llama_tied"), EngineConfig.from_any(LIMITS, **options))

    return with_options


@pytest.fixture(scope="module")
def plain(golden_dir):
    return LLM(golden_dir("llama_tied"), LIMITS)


def test_a_warm_up_waits_for_what_was_compiled_ahead(opened, golden):
    llm = LLM.of(opened(), compile_ahead=True)
    runner = llm.engine.runner
    llm.warm_up()
    assert runner.compiled_steps == len(
        generation_programs(llm.engine.buckets, runner.sampling_kinds)
    )
    case = golden("llama_tied")
    (output,) = llm.generate([case.prompts[1]], GREEDY)
    assert output.outputs[0].token_ids == case.greedy[1][:5]
    assert runner.late_compiles == 0


def test_where_weights_cannot_be_loaded_nothing_compiles_on(opened, monkeypatch):
    lowered, begun, told = [], threading.Event(), threading.Event()
    lower = Programs.lower

    def slowly(programs, key):
        lowered.append(key)
        begun.set()
        assert told.wait(60)
        return lower(programs, key)

    def fail(*_, **__):
        assert begun.wait(60)
        raise CheckpointError("a shard ends too soon")

    monkeypatch.setattr(ProgramStore, "serves", lambda _: False)
    monkeypatch.setattr(Programs, "lower", slowly)
    monkeypatch.setattr(build, "load_model", fail)
    with pytest.raises(CheckpointError, match="too soon"):
        LLM.of(opened(), compile_ahead=True)
    (thread,) = [each for each in threading.enumerate() if each.name.startswith("ahead")]
    told.set()
    thread.join(60)
    assert not thread.is_alive()
    assert len(lowered) == 1


def test_steps_that_run_op_by_op_are_not_compiled_ahead(opened, monkeypatch):
    monkeypatch.delattr(Frame, "ahead")
    assert LLM.of(opened(enforce_eager=True), compile_ahead=True).engine.config.enforce_eager


@pytest.mark.parametrize("ahead", [False, True])
def test_no_room_for_a_cache_is_refused(opened, monkeypatch, ahead):
    if not ahead:
        monkeypatch.delattr(build, "load_model")  # no weight is read
    with pytest.raises(RefusedInput, match="no memory is left for the KV cache"):
        LLM.of(opened(kv_cache_memory_bytes=1), compile_ahead=ahead)


def test_a_short_row_has_a_bucket_where_a_kernel_serves_it():
    shape = {
        **{"architectures": ["LlamaForCausalLM"], "model_type": "llama", "torch_dtype": "bfloat16"},
        **{"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 1},
        **{"num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 512},
        "max_position_embeddings": 2**14,
    }

    def widths(**options):
        config = EngineConfig.from_any(options)
        model = build.describe(build.config_checkpoint(shape), config).shapes(config.dtype)
        return [bucket.blocks for bucket in Frame(model, config).buckets if bucket.rows == 1]

    assert widths() == [256]
    with lowering_for("cuda"):
        assert widths() == [132, 256]
        assert widths(dtype="float16") == widths(tensor_parallel_size=2) == [256]
        assert widths(max_model_len=4096) == [64]


def test_draws_are_kept_when_the_cache_gets_its_size(plain):
    buckets = plain.engine.buckets
    programs = Programs(plain.engine.model, Sizes((1,), 8, 1))
    kept = draws(buckets, [Demand.ANY])
    assert programs.temporary_bytes(scoring_buckets(buckets)[-1], beside=kept) > 0
    resized = programs.resized((7,))
    assert resized.sizes.num_blocks == (7,)
    assert [resized[key] is programs[key] for key in kept] == [True] * len(kept)
    assert len(resized) == len(kept)  # the forward was for one block
