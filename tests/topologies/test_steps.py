"""Whole steps compiled for TPUs that are not there, and what does not fit on them."""

import json

import pytest

from jaxgen.cli import main

SMALL = ["--max-num-seqs", "2", "--max-num-batched-tokens", "16", "--dtype", "bfloat16"]


@pytest.mark.filterwarnings("ignore::pallas_kernels.dispatch.FallbackWarning")
@pytest.mark.parametrize(
    ("fixture", "topology", "mesh"),
    [
        ("llama_plain", "v5e:2x2", ["--tensor-parallel-size", "4"]),
        ("mixtral", "v6e:2x4", ["--tensor-parallel-size", "2", "--expert-parallel-size", "2"]),
        ("deepseek_v3", "v5p:4x4x4", ["--tensor-parallel-size", "2", "--enable-expert-parallel"]),
        pytest.param(
            *("mixtral", "v5e:2x2", ["--tensor-parallel-size", "4", "--enable-expert-parallel"]),
            marks=pytest.mark.slow,
        ),
        ("gemma3", "tpu7x:2x2x1", []),
    ],
)
def test_steps_compile_for_tpus(golden_dir, capsys, fixture, topology, mesh):
    arguments = ["plan", str(golden_dir(fixture)), "--topology", topology, "--json", *SMALL, *mesh]
    assert main(arguments) == 0
    (plan,) = json.loads(capsys.readouterr().out)["plans"]
    assert plan["fits"]
    assert plan["kv_tokens"] > 0
    assert [estimate["step_ms"] > 0 for estimate in plan["estimates"]] == [True, True]
    assert all(program["aliased"] for program in plan["programs"])


def test_one_process_plans_the_same_machine_again(golden_dir, capsys):
    """JAX's own cache, which is on in tests as in the command, cannot read such programs."""
    arguments = ["plan", str(golden_dir("llama_plain")), "--topology", "v5e:2x2", "--json", *SMALL]
    plans = []
    for _ in range(2):
        assert main(arguments) == 0
        (plan,) = json.loads(capsys.readouterr().out)["plans"]
        plans.append({key: plan[key] for key in ("memory", "kv_tokens", "estimates")})
    assert plans[0] == plans[1]


def test_what_does_not_fit_says_how_much_is_missing_and_what_would_help(capsys):
    arguments = ["plan", "llama-3.1-8b", "--topology", "v5e:2x2", *SMALL]
    assert main(arguments) == 2
    err = capsys.readouterr().err
    assert "0.24 GiB short" in err
    assert "tensor_parallel_size = 2 would hold them" in err


def test_block_tables_beyond_scalar_memory_are_refused_before_anything_is_compiled(capsys):
    context = ["--max-model-len", "131072", "--max-num-seqs", "256"]
    mesh = ["--tensor-parallel-size", "4"]
    assert main(["plan", "llama-3.1-8b", "--topology", "v5e:2x2", *context, *mesh]) == 2
    err = capsys.readouterr().err
    assert "256 rows and 2048 blocks" in err
    assert "lower max_num_seqs or max_model_len, or raise block_size" in err
