"""Prints docs/models.md: every family of the registry, what it accepts and which fixtures prove it.

A test compares the page with this output, so that it cannot drift; `make models` rewrites it.
"""

from collections import defaultdict
from pathlib import Path

from jaxgen_checkpoints.checkpoint import open_checkpoint
from jaxgen_models.policy import InferencePolicy
from jaxgen_models.registry import find_policy, supported_architectures

ROOT = Path(__file__).resolve().parents[1]
GOLDEN = ROOT / "tests" / "fixtures" / "golden"

HEAD = """\
# Models

Generated from the registry by `make models`; a test keeps it true. Every fixture is a tiny
checkpoint of the family with logits and greedy tokens recorded from transformers; the tests compare
logits within 2e-4 in float32 and greedy tokens exactly. Every family runs on tensor meshes of any
size: heads, ffn and vocabulary are padded where they do not divide.

An architecture that is not listed is refused. If its tensors and config look like Llama's,
`--policy auto` maps it by structure, verifies that nothing is missing or left over, and says so.

| family | architectures | what it is | cache | verified with |
|---|---|---|---|---|
"""


def policy_of(name: str) -> InferencePolicy:
    """The policy of a fixture."""
    checkpoint = open_checkpoint(GOLDEN / name)
    return find_policy(checkpoint.config, checkpoint.source.tensors()).policy


def fixtures_by_family() -> dict[str, list[str]]:
    """Fixture names under the family whose policy reads their config."""
    found: dict[str, list[str]] = defaultdict(list)
    for folder in sorted(GOLDEN.iterdir()):
        if (folder / "config.json").is_file():
            found[policy_of(folder.name).family].append(folder.name)
    return found


def cache_kinds(names: list[str]) -> str:
    """What the layers of a family's fixtures keep of the past."""
    kinds = set()
    for name in names:
        policy = policy_of(name)
        latent = any(type(cache).__name__ == "LatentCache" for cache in policy.layer_caches(1))
        windows = policy.config.windows
        kinds.add("latent" if latent else "keys and values")
        if any(window is not None for window in windows):
            kinds.add("window" if all(window is not None for window in windows) else "hybrid")
    order = ("keys and values", "latent", "window", "hybrid")
    return ", ".join(kind for kind in order if kind in kinds)


def main() -> None:
    """Print the page."""
    fixtures = fixtures_by_family()
    policies = {policy.family: policy for policy in supported_architectures().values()}
    rows = []
    for family, policy in sorted(policies.items()):
        names = fixtures.get(family, [])
        architectures = ", ".join(f"`{name}`" for name in policy.architectures)
        about = " ".join((policy.__doc__ or "").split("\n\n")[0].split())
        proof = ", ".join(names) or "nothing yet"
        rows.append(f"| {family} | {architectures} | {about} | {cache_kinds(names)} | {proof} |")
    print(HEAD + "\n".join(rows))


if __name__ == "__main__":
    main()
