"""Every malformed checkpoint: one precise error and exit code 2, or a warning; never silence."""

import json
import sys
from pathlib import Path

import pytest

BAD = Path(__file__).resolve().parents[1] / "fixtures" / "bad"
CASES = json.loads((BAD / "manifest.json").read_text())["cases"]
SMALL = ("--max-num-batched-tokens", 16, "--max-num-seqs", 1, "--max-model-len", 48)

# Where the manifest leaves the choice, this is ours.
LOADS = {
    "good_base",
    "good_sharded",
    "both_bin_and_safetensors",
    "architectures_absent",
    "duplicate_tensor",
    "index_wrong_shard",
    "nan_weights",
    "inf_weights",
    "extra_tensor",
    "extra_layer",
    "tokenizer_larger_than_vocab",
    "eos_out_of_range",
    "unreadable_bytes_in_name",
}
SILENT = {"good_base", "good_sharded", "both_bin_and_safetensors", "architectures_absent"}
CHATS = {"chat_template_broken", "chat_template_hostile"}
FORBIDDEN = ("_outside", "/etc/hostname")

_opened: list[str] = []
_watching = False


def _hear(event: str, arguments: tuple) -> None:
    if _watching and event == "open":
        _opened.append(str(arguments[0]))


sys.addaudithook(_hear)


@pytest.fixture
def folder(request, tmp_path, monkeypatch):
    """The case's folder; the test runs elsewhere, and files that it opens are listed."""
    name = request.param
    path = BAD / name
    if name == "symlink_loop":
        path = tmp_path / "loop"
        path.mkdir()
        (path / "config.json").write_bytes((BAD / "good_base" / "config.json").read_bytes())
        (path / "model.safetensors").symlink_to("loop")
        (path / "loop").symlink_to("model.safetensors")
        (path / "sub").symlink_to(".")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys.modules[__name__], "_watching", True)
    _opened.clear()
    yield path
    assert not list(tmp_path.rglob("PICKLE_WAS_EXECUTED"))
    assert not [name for name in _opened for part in FORBIDDEN if part in name]


@pytest.fixture
def loads(monkeypatch) -> list[str]:
    """What has been asked to place arrays on a device."""
    from jaxgen.engine import build

    seen, real = [], build.load

    def spy(*args, **kwargs):
        seen.append("load")
        return real(*args, **kwargs)

    monkeypatch.setattr(build, "load", spy)
    return seen


def mentions(text: str, words: list[str]) -> bool:
    return all(word in text for word in words)


@pytest.mark.parametrize(
    "folder", sorted(CASES.keys() - LOADS - CHATS - {"tokenizer_missing"}), indirect=True
)
def test_refused(run, folder, loads, request):
    words = CASES[request.node.callspec.params["folder"]]["message_should_mention"]
    result = run("generate", folder, "--prompt-token-ids", "1,2", "--max-tokens", 1, *SMALL)
    assert result.code == 2
    assert result.out == ""
    (error,) = result.lines("error: ")
    assert mentions(error, words)
    assert "Traceback" not in result.err
    assert not loads


@pytest.mark.parametrize("folder", sorted(LOADS - {"nan_weights"}), indirect=True)
def test_loads(run, folder, loads, request):
    name = request.node.callspec.params["folder"]
    result = run("generate", folder, "--prompt-token-ids", "1,2", "--max-tokens", 1, *SMALL)
    assert result.code == 0
    assert loads == ["load"]
    warnings = result.lines("warning: ")
    assert bool(warnings) != (name in SILENT)
    if warnings:
        assert mentions(" ".join(warnings), CASES[name]["message_should_mention"])
        assert result.err.isprintable() or all(line.isprintable() for line in warnings)


@pytest.mark.parametrize("folder", ["nan_weights"], indirect=True)
def test_logits_that_are_no_numbers_give_no_answer(run, folder):
    result = run("generate", folder, "--prompt-token-ids", "1,2", "--max-tokens", 1, *SMALL)
    assert result.code == 2
    assert result.out == ""
    words = CASES["nan_weights"]["message_should_mention"]
    assert mentions(" ".join(result.lines("warning: ")), words)
    assert "not finite" in " ".join(result.lines("error: "))


@pytest.mark.parametrize("folder", sorted(CHATS), indirect=True)
def test_chat_templates_are_refused_in_use(run, folder, loads):
    result = run("chat", folder, "--prompt", "a", *SMALL)
    assert result.code == 2
    (error,) = result.lines("error: ")
    assert "chat_template" in error
    assert not loads
    assert run("generate", folder, "--prompt", "a", "--max-tokens", 1, *SMALL).code == 0


@pytest.mark.parametrize("folder", ["tokenizer_missing"], indirect=True)
def test_without_tokenizer_token_ids_still_go(run, folder, loads):
    result = run("generate", folder, "--prompt", "a", "--max-tokens", 1, *SMALL)
    assert result.code == 2
    assert "tokenizer" in result.lines("error: ")[0]
    assert "tokenizer.json" in result.lines("warning: ")[0]
    assert not loads
    result = run("generate", folder, "--prompt-token-ids", "1,2", "--max-tokens", 1, *SMALL)
    assert result.code == 0
    assert result.out.strip().isdigit()
