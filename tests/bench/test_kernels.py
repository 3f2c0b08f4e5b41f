"""`jaxgen bench kernels` checks and times every kernel; on a CPU, at toy shapes."""

import json

import jax.numpy as jnp
import pytest

from jaxgen.bench.kernels.case import Case, Compiled, Measured
from jaxgen.cli import main
from jaxgen.commands import bench_kernels
from jaxgen.engine.cost import Ceilings


@pytest.mark.slow
def test_every_kernel_is_told(tmp_path, capsys):
    out = tmp_path / "kernels.json"
    assert main(["bench", "kernels", "--output-json", str(out)]) == 0
    lines = capsys.readouterr().out.splitlines()
    told = json.loads(out.read_text())
    assert lines[0].split()[:3] == ["kernel", "shape", "us"]
    assert "toy shapes" in lines[-1]
    names = {each["kernel"] for each in told["kernels"]}
    assert names == {"attention", "latent attention", "layer products", "layer chain", "experts"}
    for each in told["kernels"]:
        assert each["ok"], each
        assert 0 < each["error"] < 1e-2
        assert each["roofline_share"] == pytest.approx(each["roofline_us"] / each["us"])
    assert told["shapes"] == "toys"
    assert told["bandwidth_tb_s"] > 0


def test_what_is_named_is_measured(capsys):
    words = ["--kernels", "attention", "--match", "prefill", "--json"]
    assert main(["bench", "kernels", *words]) == 0
    (only,) = json.loads(capsys.readouterr().out)["kernels"]
    assert (only["kernel"], only["name"]) == ("attention", "toy, prefill")
    assert main(["bench", "kernels", "--match", "64 x 4096"]) == 2
    assert "64 x 4096" in capsys.readouterr().err


def test_nothing_is_timed_while_others_are_compiled(monkeypatch):
    """Whoever lowers holds Python's lock: a call of 250 us took 5 ms beside it."""
    done = []

    class Recorded:
        def __init__(self, case):
            self._case = case
            done.append("compiled")

        def measure(self, seed):
            done.append("timed")
            return Measured(self._case, error=0.0, seconds=1e-3)

    monkeypatch.setattr(bench_kernels, "Compiled", Recorded)
    monkeypatch.setattr(bench_kernels, "measure_ceilings", lambda dtype: Ceilings(1e12, 1e14))
    assert main(["bench", "kernels", "--json"]) == 0
    half = len(done) // 2
    assert half > 1
    assert done == ["compiled"] * half + ["timed"] * half


def test_a_wrong_kernel_is_seen():
    """One that differs from its reference, and one that gives no number at all."""

    def operation(given, carried, implementation):
        off = 0.0 if implementation == "reference" else given
        return jnp.ones(4) + off, carried

    def inputs(error):
        return lambda key: ([jnp.float32(error)], None)

    for error, fine in ((1e-3, True), (2e-2, False), (float("nan"), False)):
        case = Case("one", "two", operation, inputs(error), inputs(error), 8.0, 2.0)
        measured = Compiled(case).measure(seed=0)
        assert measured.ok is fine
        assert measured.seconds > 0


def test_the_roofline_is_the_slower_of_reading_and_multiplying():
    case = Case("one", "two", None, None, None, bytes_read=100.0, flops=1000.0)
    measured = Measured(case, error=0.0, seconds=50.0)
    assert measured.roofline(Ceilings(bandwidth=10.0, matrix_rate=1000.0)) == 10.0
    assert measured.roofline(Ceilings(bandwidth=1000.0, matrix_rate=10.0)) == 100.0
