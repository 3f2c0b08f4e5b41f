"""A file is one idea that a person reads in one sitting, says which, and names nobody's machine."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
CODE = ("jaxgen", "models", "checkpoints", "pallas_kernels")
SOURCES = sorted(
    path.relative_to(ROOT)
    for folder in (*CODE, "tests", "scripts")
    for path in (ROOT / folder).rglob("*.py")
)
TEXTS = sorted(
    path.relative_to(ROOT)
    for folder in (*CODE, "tests", "scripts", "docs", "notebooks", ".ci")
    for path in (ROOT / folder).rglob("*")
    if path.is_file() and not {"__pycache__", "fixtures"} & set(path.relative_to(ROOT).parts)
) + [path.relative_to(ROOT) for path in ROOT.iterdir() if path.is_file() and path.name != ".git"]
FILE_LINES, KERNEL_LINES, FUNCTION_LINES = 300, 400, 60
NAMELESS = {"utils.py", "common.py", "helpers.py", "misc.py"}
SOMEBODYS_MACHINE = re.compile(r"/(?:work|root|home|Users|farm)/|\.librar[y]/|\.\./shared")


def parse(path: Path) -> ast.Module:
    return ast.parse((ROOT / path).read_text())


Function = ast.FunctionDef | ast.AsyncFunctionDef


def span(node: ast.stmt) -> int:
    return (node.end_lineno or 0) - node.lineno + 1


def length(function: Function) -> int:
    """Lines of a function's own: its docstring and the functions inside it are not counted."""
    documented = ast.get_docstring(function, clean=False) is not None
    said = span(function.body[0]) if documented else 0
    inner = sum(length(node) for node in nested(function))
    return span(function) - said - inner


def nested(function: Function) -> list[Function]:
    inside = (node for node in ast.walk(function) if node is not function)
    return [node for node in inside if isinstance(node, Function)]


def test_every_file_says_its_one_idea() -> None:
    silent = [str(path) for path in SOURCES if not ast.get_docstring(parse(path))]
    assert not silent, "a module docstring of one to three sentences is missing"


def test_files_are_read_in_one_sitting() -> None:
    too_long = []
    for path in SOURCES:
        lines = len((ROOT / path).read_text().splitlines())
        budget = KERNEL_LINES if path.parts[0] == "pallas_kernels" else FILE_LINES
        if lines > budget:
            too_long.append(f"{path}: {lines} lines, at most {budget}")
    assert not too_long, "a file that needs section banners is two files"


def test_functions_fit_on_a_screen() -> None:
    too_long = [
        f"{path}:{node.lineno} {node.name}: {length(node)} lines, at most {FUNCTION_LINES}"
        for path in SOURCES
        for node in ast.walk(parse(path))
        if isinstance(node, Function) and length(node) > FUNCTION_LINES
    ]
    assert not too_long


def test_no_file_is_named_after_nothing() -> None:
    assert not [str(path) for path in SOURCES if path.name in NAMELESS]


def test_no_file_names_somebodys_machine() -> None:
    found = []
    for path in TEXTS:
        try:
            text = (ROOT / path).read_text()
        except UnicodeDecodeError:
            continue
        found += [f"{path}: {match.group()}" for match in SOMEBODYS_MACHINE.finditer(text)]
    assert not found


@pytest.mark.parametrize("folder", ["pallas_kernels", "models/jaxgen_models"])
def test_checked_packages_keep_annotations_evaluated(folder: str) -> None:
    postponed = [
        str(path)
        for path in SOURCES
        if path.is_relative_to(folder)
        and "from __future__ import annotations" in (ROOT / path).read_text()
    ]
    assert not postponed, "postponed annotations switch the shape checks off"
