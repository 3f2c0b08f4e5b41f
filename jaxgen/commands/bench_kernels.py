"""`jaxgen bench kernels`: every kernel beside its reference, and beside this device's roofline."""

import argparse
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp

from jaxgen.bench.kernels.case import Compiled, Measured
from jaxgen.bench.kernels.shapes import cases
from jaxgen.bench.roofline import measure_ceilings
from jaxgen.commands.terminal import note, table
from jaxgen.engine.cost import Ceilings
from jaxgen_checkpoints.errors import RefusedInput

_COMPILING = 8
_HEAD = ("kernel", "shape", "us", "TB/s", "TFLOP/s", "roofline us", "share", "error")


def kernels(args: argparse.Namespace) -> dict[str, Any]:
    """Ceilings of the device, and of each case what it took. RefusedInput if none is named so."""
    platform = jax.default_backend()
    chosen = [
        case
        for case in cases(platform)
        if (not args.kernels or case.kernel in args.kernels) and args.match in case.name
    ]
    if not chosen:
        raise RefusedInput(f"no case on {platform} has {args.match!r} in its name")
    seed = time.time_ns() % 2**31 if args.seed is None else args.seed
    # A CPU multiplies bfloat16 by detours, which would be no ceiling.
    ceilings = measure_ceilings(jnp.dtype(jnp.float32 if platform == "cpu" else jnp.bfloat16))
    with ThreadPoolExecutor(_COMPILING) as pool:
        compiled = list(pool.map(Compiled, chosen))
    measured = []
    for each in compiled:  # when nothing is compiled any more: what lowers keeps Python's lock busy
        measured.append(each.measure(seed))
        note(_line(measured[-1], ceilings))
    return {
        "platform": platform,
        "device": jax.devices()[0].device_kind,
        "shapes": "toys" if platform == "cpu" else "models",
        "bandwidth_tb_s": ceilings.bandwidth / 1e12,
        "matrix_tflop_s": ceilings.matrix_rate / 1e12,
        "kernels": [_as_json(each, ceilings) for each in measured],
    }


def exit_code(result: dict[str, Any]) -> int:
    """1 if some kernel says something else than its reference."""
    return int(not all(each["ok"] for each in result["kernels"]))


def as_lines(result: dict[str, Any]) -> str:
    """A table, and what its last columns are shares of."""
    rows: list[tuple[str, ...]] = [_HEAD]
    for each in result["kernels"]:
        right = f"{each['error']:.1e}" if each["ok"] else f"WRONG: {each['error']:.1e}"
        rows.append(
            (
                each["kernel"],
                each["name"],
                f"{each['us']:.1f}",
                f"{each['tb_s']:.3g}",
                f"{each['tflop_s']:.3g}",
                f"{each['roofline_us']:.1f}",
                f"{100 * each['roofline_share']:.0f}%",
                right,
            )
        )
    return (
        f"{table(rows, right=range(2, len(_HEAD)))}\n"
        f"{result['device']}, measured in this run: reads {result['bandwidth_tb_s']:.3g} TB/s, "
        f"large products {result['matrix_tflop_s']:.3g} TFLOP/s"
        f"{'; toy shapes: a CPU is here to be tested' if result['shapes'] == 'toys' else ''}\n"
    )


def _as_json(measured: Measured, ceilings: Ceilings) -> dict[str, Any]:
    case, seconds, least = measured.case, measured.seconds, measured.roofline(ceilings)
    return {
        "kernel": case.kernel,
        "name": case.name,
        "us": 1e6 * seconds,
        "tb_s": case.bytes_read / seconds / 1e12,
        "tflop_s": case.flops / seconds / 1e12,
        "roofline_us": 1e6 * least,
        "roofline_share": least / seconds,
        "error": measured.error,
        "ok": measured.ok,
    }


def _line(measured: Measured, ceilings: Ceilings) -> str:
    """What is told of it at once: the table comes when all have been measured."""
    share = measured.roofline(ceilings) / measured.seconds
    wrong = "" if measured.ok else " WRONG"
    name = f"{measured.case.kernel}, {measured.case.name}"
    return f"{name}: {1e6 * measured.seconds:.1f} us, {100 * share:.0f}% of the roofline{wrong}"
