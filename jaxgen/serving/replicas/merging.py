"""What all replicas tell, as if one server told it: metrics with a label each, numbers in sum."""

import re
from collections.abc import Iterable, Sequence
from typing import Any

_SUMS = (
    *("running", "waiting", "kv_used_blocks", "kv_total_blocks", "prompt_tokens"),
    *("generation_tokens", "prefix_hits", "prefix_queries", "preemptions", "steps"),
    "late_compiles",
)
_ENGINE = re.compile(r'engine="[^"]*"')


def merge_metrics(told: Iterable[tuple[str, str]]) -> str:
    """Prometheus texts of (replica, text), whose label `engine` becomes the replica's name.

    What has no such label concerns a replica's own HTTP, and is left out.
    """
    families: dict[str, tuple[list[str], list[str]]] = {}
    for name, text in told:
        samples: list[str] = []
        for line in text.splitlines():
            if line.startswith("# HELP "):
                head, samples = families.setdefault(line.split(" ", 3)[2], ([], []))
                if not head:
                    head.append(line)
            elif line.startswith("# TYPE "):
                head, samples = families.setdefault(line.split(" ", 3)[2], ([], []))
                if line not in head:
                    head.append(line)
            elif _ENGINE.search(line):
                samples.append(_ENGINE.sub(f'engine="{name}"', line, count=1))
    kept = (lines for head, samples in families.values() if samples for lines in (head, samples))
    return "".join(f"{line}\n" for lines in kept for line in lines)


def merge_status(told: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The status page's numbers of all; what no sum means is the first one's, or the largest."""
    merged = dict(told[0])
    for name in _SUMS:
        merged[name] = sum(each[name] for each in told)
    merged["last_step_seconds"] = max(each["last_step_seconds"] for each in told)
    return merged
