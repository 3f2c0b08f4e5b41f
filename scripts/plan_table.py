"""Writes the table of docs/tpu.md from what `jaxgen plan --json` has said, one file a run.

Usage: python scripts/plan_table.py FILE.json ...
"""

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

HEAD = (
    *("model", "machine", "tensor x expert", "replicas", "weights", "step", "KV tokens"),
    *("decode", "prefill", "compiled at"),
)


def main(files: list[str]) -> None:
    """Prints one row for each plan in the files, in their order; they are of this commit."""
    git = ["git", "rev-parse", "--short", "HEAD"]
    commit = subprocess.run(git, capture_output=True, text=True, check=True).stdout.strip()
    print("| " + " | ".join(HEAD) + " |")
    print("|" + "---|" * len(HEAD))
    for file in files:
        said = json.loads(Path(file).read_text())
        for plan in said["plans"]:
            print("| " + " | ".join(row(said["model"], plan, commit)) + " |")


def row(model: str, plan: dict[str, Any], commit: str) -> list[str]:
    """The cells of one plan: what it takes, or how much is missing."""
    mesh, memory = plan["mesh"], plan["memory"]
    whole = ", whole" if plan["enable_expert_parallel"] else ""
    first = [model, plan["topology"], f"{mesh['tensor']} x {mesh['expert']}{whole}"]
    if not plan["fits"]:
        short = re.search(r"[\d.]+ GiB short", plan["shortfall"])
        missing = short[0] if short else plan["shortfall"]
        return [*first, "-", gib(memory["weights"]), "-", missing, "-", "-", "-"]
    steps = {each["name"]: f"{each['step_ms']:.1f} ms" for each in plan["estimates"]}
    return [
        *first,
        str(plan["replicas"]),
        gib(memory["weights"]),
        gib(memory["temporary"]),
        f"{plan['kv_tokens']:,}",
        steps["decode"],
        steps["prefill"],
        commit,
    ]


def gib(count: int) -> str:
    """Bytes for people."""
    return f"{count / 2**30:.2f} GiB"


if __name__ == "__main__":
    main(sys.argv[1:])
