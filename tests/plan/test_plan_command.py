"""What `jaxgen plan` prints and draws of machines; the plans themselves are made up here."""

import json
from dataclasses import replace
from types import SimpleNamespace

import pytest

from jaxgen.cli import main
from jaxgen.plan import Deployment
from jaxgen.plan.deployment import Memory
from jaxgen.plan.estimate import Estimate
from jaxgen.plan.program import Collectives, Program
from jaxgen.ragged.buckets import Bucket

GIB = 2**30
ESTIMATE = Estimate(
    name="decode",
    tokens=64,
    rows=64,
    context=4096,
    bytes_read=12_500_000_000,
    flops=1_250_000_000_000,
    memory_ms=15.25,
    matrix_ms=6.35,
    collective_ms=1.5,
    launch_ms=0,
    step_ms=17.0,
    bound="memory",
    tokens_per_second=3764.7,
)
PROGRAM = Program(
    "decode",
    Bucket(64, 64, 128, decode=True),
    temporary_bytes=GIB,
    code_bytes=159_000_000,
    aliased=True,
    collectives=(Collectives("all-reduce", 64, 33_500_000),),
    kernels=300,
    compile_seconds=12.0,
)


def made_up(config, topology, engine_config, **_):
    """v5e holds the model, whatever it is, and v6e does not."""
    fits = topology.name.startswith("v5e")
    return Deployment(
        topology=topology.name,
        devices=16,
        mesh={"expert": 1, "tensor": 4},
        enable_expert_parallel=False,
        replicas=4,
        dtype="bfloat16",
        max_model_len=8192,
        memory=Memory(16 * GIB, 14 * GIB, 4 * GIB, GIB if fits else 0, 9 * GIB if fits else 0),
        kv_bytes_per_token=131072,
        shortfall=None if fits else "2 bytes short: lower max_num_seqs",
        kv_tokens=73728 if fits else 0,
        programs=(PROGRAM,) if fits else (),
        estimates=(ESTIMATE,) if fits else (),
    )


@pytest.fixture(autouse=True)
def _no_compiler(monkeypatch):
    monkeypatch.setattr("jaxgen.commands.plan.plan_deployment", made_up)
    monkeypatch.setattr(
        "jaxgen.commands.plan.parse_topology", lambda name: SimpleNamespace(name=name)
    )


PLAN = ("plan", "llama-3.1-8b", "--topology", "v5e:4x4")


def test_one_table_over_several_machines(capsys):
    assert main([*PLAN, "--topology", "v6e:2x4"]) == 0
    out, err = capsys.readouterr()
    rows = [line.split() for line in out.splitlines()]
    (held,) = (row for row in rows if row[:3] == ["v5e:4x4", "16", "4"])
    assert held[-1] == "73,728"
    (refused,) = (line for line in out.splitlines() if line.startswith("v6e:2x4"))
    assert "does not fit" in refused
    assert "v6e:2x4: 2 bytes short: lower max_num_seqs" in err
    assert "12.5 GB, 15.25 ms" in out
    assert "1.25 TFLOP, 6.35 ms" in out
    assert "64 all-reduce of 33.5 MB" in out
    assert "program of 159.0 MB, compiled in 12 s" in out
    assert "15,059" in out  # tokens/s of four replicas


def test_a_cache_that_is_shorter_than_a_sequence_is_told(capsys, monkeypatch):
    short = lambda *given: replace(made_up(*given), kv_tokens=4096)
    monkeypatch.setattr("jaxgen.commands.plan.plan_deployment", lambda *given, **_: short(*given))
    assert main([*PLAN, "--topology", "v6e:2x4"]) == 0
    assert "holds 4096 tokens, fewer than one sequence of max_model_len = 8192" in (
        capsys.readouterr().err
    )


def test_where_nothing_fits_is_a_refusal():
    assert main(["plan", "llama-3.1-8b", "--topology", "v6e:2x4"]) == 2


def test_json_says_all_of_it(capsys):
    assert main([*PLAN, "--json"]) == 0
    (plan,) = json.loads(capsys.readouterr().out)["plans"]
    assert plan["programs"][0]["collectives"] == [
        {"kind": "all-reduce", "count": 64, "bytes": 33_500_000}
    ]
    assert plan["estimates"][0]["flops"] == ESTIMATE.flops


def test_a_picture_of_memory_rooflines_and_times(tmp_path, monkeypatch):
    pytest.importorskip("matplotlib").rcParams["svg.fonttype"] = "none"
    picture = tmp_path / "plan.svg"
    assert main([*PLAN, "--topology", "v6e:2x4", "--plot", str(picture)]) == 0
    drawn = picture.read_text()
    for words in ("memory of one device", "under the roofline", "collectives", "v6e:2x4"):
        assert words in drawn


def test_a_picture_that_cannot_be_drawn_is_refused(tmp_path, capsys):
    pytest.importorskip("matplotlib")
    assert main([*PLAN, "--plot", str(tmp_path / "plan.doc")]) == 2
    assert "plan.doc" in capsys.readouterr().err
