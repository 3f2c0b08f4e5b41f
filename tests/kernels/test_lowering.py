"""Lowering waits for other threads' lowering, and nothing lowers past it."""

import ast
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels.lowering import lower

ROOT = Path(__file__).resolve().parents[2]
SOURCES = [
    path
    for folder in ("jaxgen", "pallas_kernels", "models", "tests/kernels/device")
    for path in sorted((ROOT / folder).rglob("*.py"))
    if path != ROOT / "pallas_kernels" / "lowering.py"
]


def test_one_at_a_time():
    """A trace that sleeps lets other threads run in its middle, as Python does at any moment."""
    inside, most = 0, 0

    def traced(x: jax.Array) -> jax.Array:
        nonlocal inside, most
        inside += 1
        most = max(most, inside)
        time.sleep(0.02)
        inside -= 1
        return x + 1

    def program(number: int) -> jax.Array:
        shape = jax.ShapeDtypeStruct((number + 1,), jnp.float32)
        compiled = lower(jax.jit(lambda x: traced(x)), shape).compile()
        return compiled(jnp.zeros(number + 1))

    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(program, range(8)))
    assert most == 1
    assert [each.shape for each in found] == [(number + 1,) for number in range(8)]


def test_a_failure_lets_others_go_on():
    def refused(x: jax.Array) -> jax.Array:
        raise RuntimeError("no such program")

    shape = jax.ShapeDtypeStruct((1,), jnp.float32)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="no such program"):
            lower(jax.jit(refused), shape)
    assert lower(jax.jit(jnp.sin), shape).compile()(jnp.zeros(1)) == 0


def test_nothing_lowers_past_it():
    """A string's `lower` takes nothing, and that of `programs` a key."""
    past = [
        f"{path.relative_to(ROOT)}:{node.lineno}"
        for path in SOURCES
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.args
        if node.func.attr == "lower" and ast.unparse(node.func.value) not in ("self", "programs")
    ]
    assert not past, "use pallas_kernels.lowering.lower"
