"""Everything here needs TPU's compiler, which `make test-topologies` brings along."""

import importlib.util
from pathlib import Path

import pytest

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skips this folder's tests where libtpu is not installed."""
    if importlib.util.find_spec("libtpu") is not None:
        return
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.skip(reason="needs libtpu: make test-topologies"))
