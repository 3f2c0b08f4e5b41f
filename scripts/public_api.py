"""Prints the public face of the four packages: each name of an `__all__`, with its signature.

Signatures are taken from the source text, so that they read the same on every Python and JAX.
"""

import ast
import importlib
import inspect
import re
import textwrap
from collections.abc import Iterator

PACKAGES = ("jaxgen", "jaxgen_models", "jaxgen_checkpoints", "pallas_kernels")


def signature(function: ast.FunctionDef | ast.AsyncFunctionDef) -> str:
    """`name(arguments) -> result` on one line, decorators and body left out."""
    result = f" -> {ast.unparse(function.returns)}" if function.returns else ""
    return f"{function.name}({ast.unparse(function.args)}){result}"


def class_lines(node: ast.ClassDef) -> Iterator[str]:
    """The class with its bases, then its public fields and methods in the order of the source."""
    yield f"class {node.name}({', '.join(ast.unparse(base) for base in node.bases)})"
    for part in node.body:
        if isinstance(part, ast.AnnAssign) and not ast.unparse(part.target).startswith("_"):
            default = f" = {ast.unparse(part.value)}" if part.value else ""
            yield f"    {ast.unparse(part.target)}: {ast.unparse(part.annotation)}{default}"
        elif isinstance(part, ast.FunctionDef) and re.match(r"[^_]|__init__$|__call__$", part.name):
            yield f"    {signature(part)}"


def describe(name: str, value: object) -> Iterator[str]:
    """Lines for one public name; a plain value is described by its type."""
    if inspect.ismodule(value):
        yield f"module {name}"
        return
    unwrapped = inspect.unwrap(value) if callable(value) else value
    if not (inspect.isclass(unwrapped) or inspect.isfunction(unwrapped)):
        yield f"{name}: {type(value).__name__}"
        return
    node = ast.parse(textwrap.dedent(inspect.getsource(unwrapped))).body[0]
    if isinstance(node, ast.ClassDef):
        yield from class_lines(node)
    elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        yield f"def {signature(node)}"


def main() -> None:
    """Print every package that declares `__all__`."""
    for package in PACKAGES:
        module = importlib.import_module(package)
        for name in sorted(getattr(module, "__all__", ())):
            lines = describe(name, getattr(module, name))
            print("\n".join(f"{package}: {line}" for line in lines))


if __name__ == "__main__":
    main()
