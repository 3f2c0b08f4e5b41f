"""A plan says what an engine does, to the byte."""

import jax
import pytest

from jaxgen.config import EngineConfig
from jaxgen.engine.build import build_hf_engine
from jaxgen.engine.lowering import kept_logits_bytes
from jaxgen.engine.program_keys import Sizes
from jaxgen.engine.programs import Programs
from jaxgen.engine.scoring import scoring_buckets
from jaxgen.plan import parse_topology, plan_deployment
from jaxgen.plan.program import count_kernels, read_collectives
from jaxgen_checkpoints.errors import RefusedInput
from jaxgen_checkpoints.json_file import read_json_object

LIMITS = {"dtype": "float32", "max_num_seqs": 2, "max_num_batched_tokens": 16, "block_size": 8}
FAST = [("qwen2_tied_swa", 2, 1, False)]
MESHES = [(1, 1), (2, 1), (4, 1), (1, 2), (2, 2)]
LAYOUTS = {
    "qwen2_tied_swa": [(shards, 1, False) for shards in (1, 2, 4)],
    "mixtral": [(*mesh, whole) for mesh in MESHES for whole in (False, True)],
    "deepseek_v3": [(*mesh, whole) for mesh in MESHES for whole in (False, True)],
    "qwen2_moe": [(4, 1, True)],
    "gpt_oss": [(3, 1, True)],
}


@pytest.mark.newest
@pytest.mark.parametrize(
    ("name", "shards", "groups", "whole"),
    [
        pytest.param(name, *layout, marks=() if (name, *layout) in FAST else pytest.mark.slow)
        for name, layouts in LAYOUTS.items()
        for layout in layouts
    ],
)
def test_bytes_are_those_of_the_engine(golden_dir, name, shards, groups, whole):
    folder = golden_dir(name)
    config = EngineConfig.from_any(
        LIMITS,
        tensor_parallel_size=shards,
        expert_parallel_size=groups,
        enable_expert_parallel=whole,
    )
    content = read_json_object(folder / "config.json")
    plan = plan_deployment(content, parse_topology(f"cpu:{shards * groups}"), config)
    engine = build_hf_engine(folder, config)
    first = jax.devices()[0]

    def bytes_on_first(tree):
        return sum(
            shard.data.nbytes
            for leaf in jax.tree.leaves(tree)
            for shard in leaf.addressable_shards
            if shard.device == first
        )

    assert plan.fits
    assert plan.enable_expert_parallel == whole
    assert plan.memory.weights == bytes_on_first(engine.model.leaves)
    assert plan.memory.kv == bytes_on_first(engine.runner.pages)
    assert list(plan.kv_blocks) == list(engine.free_blocks)
    sizes = Sizes.smallest(len(plan.kv_blocks), LIMITS["block_size"], LIMITS["max_num_seqs"])
    step = Programs(engine.model, sizes).temporary_bytes(scoring_buckets(engine.buckets)[-1])
    kept = kept_logits_bytes(engine.model, engine.buckets)
    assert plan.memory.temporary == step + kept
    assert all(program.aliased for program in plan.programs)
    reduced = {c.kind for c in plan.programs[0].collectives}
    over_experts = {"all-reduce"} if groups > 1 else set()
    assert reduced == ({"all-reduce", "all-gather"} if shards > 1 else over_experts)


class NoRoom:
    """What is lowered and cannot be compiled."""

    def compile(self):
        said = "Ran out of memory in memory space hbm. Used 20G of 15G hbm."
        raise jax.errors.JaxRuntimeError(f"RESOURCE_EXHAUSTED: {said}\n\nLargest allocations: ...")


def test_a_step_that_the_compiler_has_no_room_for_does_not_fit(golden_dir, monkeypatch):
    monkeypatch.setattr("jaxgen.plan.program.Programs.lower", lambda *_: NoRoom())
    content = read_json_object(golden_dir("qwen2_tied_swa") / "config.json")
    plan = plan_deployment(content, parse_topology("cpu:1"), EngineConfig.from_any(LIMITS))
    assert not plan.fits
    assert "step of 2 tokens in 2 rows does not compile" in plan.shortfall
    assert "Used 20G of 15G hbm. Lower max_num_batched_tokens or max_num_seqs" in plan.shortfall


def test_collectives_are_read_from_hlo():
    hlo = """
      %a = f32[4,8]{1,0:T(8,128)} all-reduce(%x), to_apply=%add
      %b = (bf16[2]{0}, bf16[16]{0}) all-gather-start(%y), dimensions={0}
      %c = bf16[16]{0} all-gather-done(%b)
      %d = f8e4m3fn[32]{0} collective-permute(%z)
      %e = f32[9]{0} all-reduce(%x), replica_groups=mesh['data'=2,'expert'=2,'tensor'=1] {'expert'}
      %f = f32[7]{0} all-reduce(%x), replica_groups=mesh['data'=2,'expert'=2,'tensor'=1] {'tensor'}
      %g = f32[7]{0} all-reduce(%x), replica_groups={{0},{1}}, to_apply=%add
      %h = f32[7]{0} all-reduce(%x), replica_groups=[2,1]<=[2], to_apply=%add
      %i = f32[7]{0} all-reduce(%x), replica_groups=[1,2]<=[2], to_apply=%add
    """
    found = {c.kind: (c.count, c.bytes) for c in read_collectives(hlo)}
    assert found == {
        "all-reduce": (3, 128 + 36 + 28),
        "all-gather": (1, 32),
        "collective-permute": (1, 32),
    }


@pytest.mark.parametrize(
    "name",
    ["v9:2x2", "h200", "v5e:two", "cpu:900", "cpu:2x2", "cpu:0", "cpu:12345", "v5e:0x2", "h200:16"],
)
def test_unknown_topologies_are_refused(name):
    with pytest.raises(RefusedInput, match=name):
        parse_topology(name)


@pytest.mark.parametrize(
    ("name", "packages"),
    [("v5e:2x2", "libtpu"), ("h200:8", "--no-deps jax-cuda13-plugin jax-cuda13-pjrt")],
)
def test_a_missing_compiler_is_named(monkeypatch, name, packages):
    monkeypatch.setattr("importlib.util.find_spec", lambda module: None)
    with pytest.raises(RefusedInput, match=packages):
        parse_topology(name)


def test_kernels_are_those_of_the_entry():
    hlo = """
    %inner { %x = f32[2] dot(%a, %b) }
    ENTRY %main (a: f32[2]) -> f32[2] {
      %a = f32[2]{0} parameter(0)
      %b = f32[2]{0} fusion(%a), kind=kLoop, calls=%inner
      %c = (f32[2]{0}, s8[8]{0}) custom-call(%b), custom_call_target="gemm"
      %r = f32[2]{0} custom-call(), custom_call_target="AllocateBuffer"
      %d = f32[2]{0} get-tuple-element(%c), index=0
      ROOT %e = f32[2]{0} copy(%d)
    }
    """
    assert count_kernels(hlo) == 3
