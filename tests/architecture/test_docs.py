"""What the documents tell a reader to type is true: commands, options, imports and links exist."""

import importlib
import re
import shlex
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).resolve().parents[2]
DOCUMENTS = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])
LANGUAGES = {"bash", "python", "python run", "json", "text", "toml", "mermaid"}
UNCHECKED = {"git", "cd", "uv", "python3"}  # other people's programs, as a reader has them


class Block(NamedTuple):
    """One fenced block of a document; `language` is the whole info string."""

    document: str
    line: int
    language: str
    text: str


def blocks(document: Path) -> Iterator[Block]:
    fence = re.compile(r"^( *)```(.*)\n((?:.*\n)*?)\1```", re.MULTILINE)
    content = document.read_text()
    for match in fence.finditer(content):
        line = content.count("\n", 0, match.start()) + 1
        yield Block(document.name, line, match[2].strip(), match[3])


BLOCKS = [block for document in DOCUMENTS for block in blocks(document)]


def commands() -> Iterator[tuple[str, list[str]]]:
    """Every command line of every bash block, with where it stands; `$` variables come first."""
    for block in BLOCKS:
        if block.language == "bash":
            for line in block.text.replace("\\\n", " ").splitlines():
                words = shlex.split(line, comments=True)
                while words and re.fullmatch(r"[A-Z_]+=.*", words[0]):
                    words.pop(0)
                if words:
                    yield f"{block.document}:{block.line}: {line.strip()}", words


def cli_help(words: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    main = importlib.import_module("jaxgen.cli").main
    subcommand = words[1:3] if words[1] == "bench" else words[1:2]
    with pytest.raises(SystemExit) as stopped:
        main([*subcommand, "--help"])
    assert stopped.value.code == 0
    return capsys.readouterr().out


def check_make(words: list[str]) -> None:
    targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    for word in words[1:]:
        assert "=" in word or word in targets, f"the Makefile has no target {word}"


def check_pip(words: list[str]) -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = extras["optional-dependencies"]
    for word in words:
        for named in re.findall(r"^(?:jaxgen|\.)\[(.*)\]$", word):
            for extra in named.split(","):
                assert extra in extras, f"pyproject.toml has no extra {extra}"


def check_paths(words: list[str]) -> None:
    for word in words[1:]:
        if re.fullmatch(r"[\w.-]+(/[\w.-]+)+(\.py)?", word) and not word.startswith("."):
            assert (ROOT / word).exists(), f"{word} does not exist"


def test_every_block_says_what_it_is() -> None:
    unmarked = [
        f"{block.document}:{block.line} {block.language!r}"
        for block in BLOCKS
        if block.language not in LANGUAGES
    ]
    assert not unmarked, f"mark each block with one of {sorted(LANGUAGES)}"


def test_every_command_exists(capsys: pytest.CaptureFixture[str]) -> None:
    for where, words in commands():
        program = words[0].removeprefix(".venv/bin/")
        if program == "make":
            check_make(words)
        elif program == "jaxgen":
            known = cli_help(words, capsys)
            options = [word.split("=")[0] for word in words if word.startswith("--")]
            assert not [option for option in options if option not in known], where
        elif program in {"pip", "uv"}:
            check_pip(words)
        elif program in {"python", "pytest", "ruff", "lint-imports", "ty", "pyright"}:
            check_paths(words)
        else:
            assert program in UNCHECKED, f"{where}: no check knows {program}"


@pytest.mark.parametrize(
    "block",
    [block for block in BLOCKS if block.language.startswith("python")],
    ids=lambda block: f"{block.document}:{block.line}",
)
def test_python_blocks_work(block: Block, monkeypatch: pytest.MonkeyPatch) -> None:
    """`python run` is executed in the project's folder; plain `python` must compile and import."""
    code = compile(block.text, f"{block.document}:{block.line}", "exec")
    if block.language == "python run":
        monkeypatch.chdir(ROOT)
        exec(code, {"__name__": block.document})
        return
    for line in block.text.splitlines():
        if re.match(
            r"(from|import) (jaxgen|jaxgen_models|jaxgen_checkpoints|pallas_kernels)", line
        ):
            exec(line, {})


def test_relative_links_lead_somewhere() -> None:
    broken = [
        f"{document.relative_to(ROOT)}: {target}"
        for document in DOCUMENTS
        for target in re.findall(r"\]\((?!https?:|#|mailto:)([^)#]+)", document.read_text())
        if not (document.parent / target).exists()
    ]
    assert not broken
