"""Imports point down: between the four packages, between families, and out to third parties."""

import subprocess
import sys
from pathlib import Path

import grimp
import pytest

PACKAGES = ("jaxgen", "jaxgen_models", "jaxgen_checkpoints", "pallas_kernels")
GROUND = {"jax", "jaxlib", "numpy", "jaxtyping"}
READING = {"ml_dtypes", "safetensors", "orbax", "gguf", "etils", "tensorstore"}
THIRD_PARTIES = {
    "pallas_kernels": GROUND,
    "jaxgen_checkpoints": GROUND | READING | {"tqdm"},
    "jaxgen_models": GROUND | {"flax", "ml_dtypes"},
}


@pytest.fixture(scope="module")
def graph() -> grimp.ImportGraph:
    return grimp.build_graph(*PACKAGES, include_external_packages=True, cache_dir=None)


def families(graph: grimp.ImportGraph) -> list[str]:
    """Folders of jaxgen_models that hold a policy: a new family is covered by existing."""
    folders = graph.find_children("jaxgen_models")
    return sorted(name for name in folders if f"{name}.policy" in graph.modules)


def test_import_linter_contracts_hold(repo_root: Path) -> None:
    # In a process of its own: import-linter reconfigures logging and switches our loggers off.
    linter = Path(sys.executable).with_name("lint-imports")
    done = subprocess.run(
        [linter, "--no-cache"], cwd=repo_root, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stdout


def test_a_family_never_imports_a_family(graph: grimp.ImportGraph) -> None:
    names = families(graph)
    assert len(names) > 1
    crossing = [
        f"{found.importer} imports {found.imported}"
        for one in names
        for other in names
        if one != other
        for found in graph.find_matching_direct_imports(f"{one}.** -> {other}.**")
        + graph.find_matching_direct_imports(f"{one}.** -> {other}")
        + graph.find_matching_direct_imports(f"{one} -> {other}.**")
    ]
    assert not crossing, "put what families share into jaxgen_models.layers"


@pytest.mark.parametrize("package", THIRD_PARTIES)
def test_lower_floors_use_only_their_third_parties(graph: grimp.ImportGraph, package: str) -> None:
    allowed = THIRD_PARTIES[package] | set(PACKAGES) | sys.stdlib_module_names
    modules = {package} | graph.find_descendants(package)
    strangers = {
        f"{module} imports {imported}"
        for module in modules
        for imported in graph.find_modules_directly_imported_by(module)
        if imported.split(".")[0] not in allowed
    }
    assert not strangers


def test_the_scheduler_knows_nothing_of_jax(graph: grimp.ImportGraph) -> None:
    schedule = {"jaxgen.schedule"} | graph.find_descendants("jaxgen.schedule")
    reached = set().union(*(graph.find_upstream_modules(module) for module in schedule))
    assert not reached & {"jax", "jaxlib", "flax", "jaxtyping"}
