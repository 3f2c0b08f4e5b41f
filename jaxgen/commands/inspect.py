"""`jaxgen inspect`: what maps where, from headers alone: no weight is read or placed."""

import argparse
from itertools import groupby

from jaxgen.commands.layout_report import ModelReport, WeightReport, report_model
from jaxgen.commands.model_config import with_weights
from jaxgen.commands.opening import engine_options
from jaxgen.commands.terminal import say, say_json, size, table
from jaxgen.config import EngineConfig
from jaxgen.engine.build import describe
from jaxgen_checkpoints.checkpoint import open_checkpoint
from jaxgen_checkpoints.source import printable_name

MOST_UNUSED = 20


def run(args: argparse.Namespace) -> int:
    """Prints a table, or one JSON object with every weight."""
    config = EngineConfig.from_any(None, **engine_options(args))
    described = describe(open_checkpoint(with_weights(args.model)), config, policy=args.policy)
    report = report_model(described, config.dtype)
    if args.json:
        say_json({"model": args.model, **report.as_json()})
    else:
        _print(args.model, report)
    return 0


def _print(model: str, report: ModelReport) -> None:
    mesh = ", ".join(f"{axis} {count}" for axis, count in report.mesh.items() if count > 1)
    facts = [
        ("model", model),
        ("source", report.source),
        ("policy", report.reason.removeprefix("policy ")),
        ("mesh", mesh or "one device"),
        ("parameters", f"{report.parameters:,}"),
        ("weights", f"{size(report.bytes_per_device)} a device, as {report.dtype}"),
        ("KV cache", f"{size(report.kv_bytes_per_token)} a token and device"),
    ]
    say(table(facts))
    say()
    header = ("parameter", "from", "stored", "canonical", "placed", "sharding", "a device")
    rows: list[tuple[str, ...]] = [header]
    for (name, sources), run in _runs(report.weights):
        first = run[0]
        rows.append(
            (
                name,
                sources,
                "+".join(first.stored),
                _shape(first.canonical_shape),
                _shape(first.placed_shape),
                _spec(first.spec),
                size(sum(weight.bytes_per_device for weight in run)),
            )
        )
    say(table(rows, right=(6,)))
    if report.unused:
        say()
        say(f"not used: {len(report.unused)} tensors of the checkpoint")
        for name in report.unused[:MOST_UNUSED]:
            say(f"  {printable_name(name)}")
        if len(report.unused) > MOST_UNUSED:
            say(f"  ... and {len(report.unused) - MOST_UNUSED} more (--json lists all)")


def _runs(
    weights: list[WeightReport],
) -> list[tuple[tuple[str, str], list[WeightReport]]]:
    """Weights that differ in their layer's number alone, in runs of layers that follow each other.

    Example: (("layers.0-29.qkv", "q_proj + k_proj + v_proj"), [30 weights]).
    """
    attributes = dict.fromkeys(weight.attribute for weight in weights)
    runs = []
    for attribute in attributes:
        same = [weight for weight in weights if weight.attribute == attribute]
        for _, group in groupby(same, key=WeightReport.likeness):
            run = list(group)
            runs.append((_titles(run), run))
    return runs


def _titles(run: list[WeightReport]) -> tuple[str, str]:
    first, last = run[0], run[-1]
    name, sources = first.attribute, first.sources
    if first.layer is not None:
        number = str(first.layer) if first is last else f"{first.layer}-{last.layer}"
        name = f"layers.{number}.{first.attribute}"
        sources = tuple(
            dict.fromkeys(source.replace(f".{first.layer}.", ".*.") for source in sources)
        )
    return name, printable_name(_joined(sources))


def _joined(names: tuple[str, ...]) -> str:
    """Names with what they share in front written once: model.layers.*.mlp.{gate,up}_proj.weight"""
    if len(names) == 1:
        return names[0]
    shortest = min(map(len, names))
    same = [len(set(letters)) == 1 for letters in zip(*names, strict=False)]
    front = same.index(False) if False in same else shortest
    back = 0
    while back < shortest - front and len({name[-1 - back] for name in names}) == 1:
        back += 1
    middles = [name[front : len(name) - back] for name in names]
    shown = ",".join(middles) if len(middles) <= 4 else f"{middles[0]},..,{middles[-1]}"
    return f"{names[0][:front]}{{{shown}}}{names[0][len(names[0]) - back :] if back else ''}"


def _shape(shape: tuple[int, ...]) -> str:
    return "x".join(map(str, shape))


def _spec(spec: tuple[str | tuple[str, ...] | None, ...]) -> str:
    """One word for each axis: `tensor` where it is divided, `-` where it is not."""
    words = [axis if isinstance(axis, str) else "+".join(axis or "-") for axis in spec]
    return ",".join(words) if any(spec) else "-"
