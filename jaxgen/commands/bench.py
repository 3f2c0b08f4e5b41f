"""`jaxgen bench`: measures one thing, as a table for people or as one JSON object."""

import argparse
import json
import sys
from importlib import import_module
from pathlib import Path

from jaxgen.commands.interrupts import leaving_at_once

_MODULES = {
    "latency": "bench_offline",
    "throughput": "bench_offline",
    "startup": "bench_offline",
    "host": "bench_simulate",
    "simulate": "bench_simulate",
    "serve": "bench_serve",
    "kernels": "bench_kernels",
}


def run(args: argparse.Namespace) -> int:
    """Measures and prints; --output-json writes the JSON object to a file.

    The module of a bench has a function of its name, which gives the object. It may have
    `as_lines`, what people see of it without --json, and `exit_code`. Only that module is
    imported: what loads a server needs no JAX.
    """
    with leaving_at_once():
        module = import_module(f"jaxgen.commands.{_MODULES[args.bench]}")
    result = getattr(module, args.bench)(args)
    text = json.dumps(result, indent=1, allow_nan=False) + "\n"
    for_people = hasattr(module, "as_lines") and not args.json
    sys.stdout.write(module.as_lines(result) if for_people else text)
    if args.output_json:
        Path(args.output_json).write_text(text)
    return module.exit_code(result) if hasattr(module, "exit_code") else 0
