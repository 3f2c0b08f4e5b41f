"""The commands on a tiny model: what they print, how they end, and what they refuse."""

import importlib.metadata
import io
import json
import shutil
import signal
import subprocess
import sys

import numpy as np
import pytest

from jaxgen.commands import generate
from jaxgen.commands.interrupts import Interrupts

SMALL = ("--dtype", "float32", "--max-num-batched-tokens", 16, "--max-model-len", 96)
SMALL += ("--max-num-seqs", 2)


@pytest.fixture
def llama(golden_dir):
    return golden_dir("llama_plain")


@pytest.fixture
def truth(llama):
    """Prompt and greedy continuation of the recording's second prompt."""
    expected = np.load(llama / "expected.npz")
    return expected["prompt_1"].tolist(), expected["greedy_1"].tolist()


def ids(tokens):
    return ",".join(map(str, tokens))


def test_help_does_not_import_jax():
    code = (
        "import sys\nfrom jaxgen.cli import main\n"
        "for words in (['--help'], ['chat', '--help'], ['generate', 'x', '--nonsense']):\n"
        "    try: main(words)\n"
        "    except SystemExit: pass\n"
        "assert 'jax' not in sys.modules and 'numpy' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, timeout=60)


def test_generate_prints_one_json_object(run, llama, truth):
    prompt, greedy = truth
    result = run(
        *("generate", llama, "--prompt-token-ids", ids(prompt), "--prompt-token-ids", "1"),
        *("--max-tokens", 8, "--ignore-eos", "--logprobs", 2, "--json", *SMALL),
    )
    assert result.code == 0
    report = json.loads(result.out)
    first, second = report["outputs"]
    assert first["prompt_token_ids"] == prompt
    (completion,) = first["outputs"]
    assert completion["token_ids"] == greedy[:8]
    assert completion["finish_reason"] == "length"
    assert [position["token_id"] for position in completion["logprobs"]] == greedy[:8]
    assert all(len(position["top"]) == 2 for position in completion["logprobs"])
    assert report["timing"]["output_tokens"] == 16
    assert len(second["outputs"][0]["token_ids"]) == 8
    (reason,) = result.lines("policy ")
    assert "registered for LlamaForCausalLM" in reason


def test_generate_prints_text_alone(run, llama, tmp_path):
    words = ("--max-tokens", 4, "--temperature", 1.0, "--seed", 3, *SMALL)
    file = tmp_path / "prompt.txt"
    file.write_text("the river")
    one = run("generate", llama, "--prompt", "the river", *words)
    again = run("generate", llama, "--prompt-file", file, *words)
    assert one.code == again.code == 0
    assert one.out == again.out != ""
    assert "tokens/s" not in one.out
    assert "tokens/s" in one.err
    two = run("generate", llama, "--prompt", "the river", "--n", 2, *words)
    assert two.out.count("--- prompt 1, ") == 2


def test_a_snapshot_says_the_same_on_another_mesh(run, llama, truth, tmp_path):
    prompt, greedy = truth
    source, out = tmp_path / "source", tmp_path / "snapshot"
    shutil.copytree(llama, source)
    (source / "additional_chat_templates").mkdir()
    (source / "additional_chat_templates" / "rag.jinja").write_text("rag")
    assert run("convert", source, out, "--tensor-parallel-size", 2).code == 0
    assert (out / "additional_chat_templates" / "rag.jinja").read_text() == "rag"
    assert run("convert", llama, out).code == 2  # it is not empty any more
    result = run(
        *("generate", out, "--prompt-token-ids", ids(prompt), "--tensor-parallel-size", 4),
        *("--max-tokens", 8, "--ignore-eos", "--json", *SMALL),
    )
    assert result.code == 0
    (completion,) = json.loads(result.out)["outputs"][0]["outputs"]
    assert completion["token_ids"] == greedy[:8]
    assert completion["text"]


@pytest.mark.parametrize(
    ("name", "sizes"),
    [
        ("llama_plain", {}),
        ("llama_plain", {"tensor_parallel_size": 4}),
        ("mixtral", {"expert_parallel_size": 2}),
        ("mixtral", {"tensor_parallel_size": 4, "enable_expert_parallel": True}),
    ],
)
def test_inspect_counts_the_bytes_that_are_loaded(run, golden_dir, name, sizes):
    import jax

    from jaxgen.config import EngineConfig
    from jaxgen.engine.build import describe, load_model
    from jaxgen_checkpoints.checkpoint import open_checkpoint

    given = [("--" + option.replace("_", "-"), value) for option, value in sizes.items()]
    words = [word for pair in given for word in pair if word is not True]
    report = json.loads(run("inspect", golden_dir(name), "--json", *words).out)
    described = describe(open_checkpoint(golden_dir(name)), EngineConfig(**sizes))
    leaves = jax.tree.leaves(load_model(described, "auto", progress=False).weights)
    on_one = sum(leaf.addressable_shards[0].data.nbytes for leaf in leaves)
    assert report["bytes_per_device"] == on_one
    assert sum(weight["bytes_per_device"] for weight in report["weights"]) == on_one
    assert len(report["unused"]) == (2 if name == "llama_plain" else 0)
    qkv = next(weight for weight in report["weights"] if weight["attribute"] == "qkv")
    assert [name.split(".")[-2] for name in qkv["sources"]] == ["q_proj", "k_proj", "v_proj"]
    assert qkv["spec"][0] == "tensor"
    if "enable_expert_parallel" in sizes:
        assert "expert+tensor,-,-" in run("inspect", golden_dir(name), *words).out


def test_inspect_prints_a_table(run, llama):
    out = run("inspect", llama).out
    assert "layers.0-1.gate_up" in out
    assert "model.layers.*.mlp.{gate,up}_proj.weight" in out
    assert "not used: 2 tensors" in out


def test_chat_answers_and_leaves(run, llama):
    result = run("chat", llama, "--prompt", "Hi", "--max-tokens", 4, *SMALL)
    assert result.code == 0
    assert result.out.endswith("\n")
    (timing,) = result.lines("[")
    for part in ("tokens/s", "first token after", "prompt and", "loaded in", "compiled for"):
        assert part in timing


def test_an_answer_that_ctrl_c_stops_is_no_success(run, llama, monkeypatch):
    from jaxgen.commands import chat

    def say_and_interrupt(text="", *, end="\n"):
        say(text, end=end)
        if text and not end:  # a piece of the answer
            signal.raise_signal(signal.SIGINT)

    say = chat.say
    monkeypatch.setattr(chat, "say", say_and_interrupt)
    result = run("chat", llama, "--prompt", "Hi", "--max-tokens", 60, "--ignore-eos", *SMALL)
    assert result.code == 130
    assert len(result.out) > 1
    assert result.lines("interrupted")
    assert int(result.lines("[")[0].partition("prompt and ")[2].split()[0]) < 60


def test_chat_talks_until_exit(run, llama, monkeypatch):
    lines = "Hi\n\n" + "long " * 99 + "\nAnd?\n/exit\nnever\n"
    monkeypatch.setattr("sys.stdin", io.StringIO(lines))
    result = run("chat", llama, "--system", "Be kind.", "--max-tokens", 2, *SMALL)
    assert result.code == 0
    assert len(result.lines("[")) == 2
    (error,) = result.lines("error: ")  # too long, and the conversation goes on without it
    assert "longer than the context" in error


@pytest.mark.slow
def test_op_by_op_gives_the_same_tokens(run, bad_dir):
    """In a process of its own: this one checks annotations, and eager loops count in int."""
    words = ["generate", str(bad_dir / "good_base"), "--prompt-token-ids", "5,6", "--max-tokens=2"]
    words += ["--dtype=float32", "--max-model-len=16", "--max-num-batched-tokens=2", "--json"]
    compiled = run(*words)
    eager = subprocess.run(
        [sys.executable, "-m", "jaxgen", *words, "--enforce-eager"],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert eager.returncode == 0, eager.stderr
    assert json.loads(eager.stdout)["outputs"] == json.loads(compiled.out)["outputs"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("generate", "M"), "--prompt"),
        (("generate", "M", "--prompt", "a", "--prompt-token-ids", "1"), "not allowed with"),
        (("generate", "M", "--prompt-token-ids", "a"), "token ids with commas"),
        (("generate", "M", "--prompt", "a", "--chat-template", "x"), "unrecognized"),
        (("generate", "M", "--prompt", "a", "--max-tok", "1"), "unrecognized"),
        (("generate", "M", "--prompt", "a", "--top-p", "0.5"), "--top-p has no effect"),
        (("generate", "M", "--prompt", "a", "--temperature", "3"), "temperature must be"),
        (("generate", "M", "--prompt", "a", "--logprobs", "2"), "--json"),
        (("generate", "M", "--prompt-file", "nothing.txt"), "nothing.txt"),
        (("generate", "M", "--prompt-token-ids", "1,512"), "vocabulary is 0 to 511"),
        (("generate", "M", "--prompt-token-ids", "1", "--max-tokens", "999"), "context"),
        (("generate", "M", "--prompt", "a", "--dtype", "int4"), "dtype must be one of"),
        (("generate", "M", "--prompt", "a", "--max-model-len", "512"), "max_model_len"),
        (("generate", "M", "--prompt", "a", "--policy", "lama"), "choose auto or one of"),
        (("generate", "M", "--prompt", "a", "--tokenizer", "nowhere"), "nowhere"),
        (
            *[("generate", "M", "--prompt", "a", "--enforce-eager", "--tensor-parallel-size", "2")],
            "one device",
        ),
        (("inspect", "M", "--tensor-parallel-size", "64"), "needs 64 devices"),
        (("inspect", "M", "--tensor-parallel-size", "64"), "host_platform_device_count=64"),
        (("inspect", "M", "--temperature", "1"), "unrecognized"),
        (("convert", "M", "M"), "new or empty folder"),
        (("verify", "M", "--golden", "nothing.npz"), "nothing.npz"),
        (("verify", "M", "--golden", __file__), "not an .npz file, or a damaged one: expected"),
        (("verify", "M", "--golden", "x", "--prompt", "a"), "--golden"),
        (("generate", "llama-3.1-8b", "--prompt", "a"), "has no weights: name a checkpoint"),
        (("inspect", "llama-3.1-8b"), "has no weights: name a checkpoint"),
        (("bench", "latency", "--model", "llama-3.1-8b"), "--load-format dummy"),
        (("bench", "latency", "--model", "M", "--batch-size", "0"), "--batch-size"),
        (("serve", "M", "--max-num-queued-reqs", "-1"), "--max-num-queued-reqs"),
        (("serve", "M", "--shutdown-timeout", "-1"), "--shutdown-timeout"),
        (("serve", "M", "--port", "0", "--api-key", ""), "api_keys must not be empty"),
        (("serve", "M", "--port", "0", "--served-model-name", ""), "names must not be empty"),
        (("inspect", "no/such/path"), "no such path"),
        (("inspect", "missing.gguf"), "missing.gguf"),
        (("nonsense",), "invalid choice"),
    ],
)
def test_refusals_are_one_line(run, llama, words, message, monkeypatch):
    from jaxgen.engine import build

    monkeypatch.setattr(build, "load", lambda *_: pytest.fail("weights were read"))
    result = run(*(llama if word == "M" else word for word in words))
    assert result.code == 2
    assert result.out == ""
    (error,) = result.lines("error: ")
    assert message in error


def test_a_hub_id_that_cannot_be_fetched_is_refused(run, monkeypatch, tmp_path):
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    result = run("inspect", "nobody/no-such-model")
    assert result.code == 2
    assert "nobody/no-such-model" in result.lines("error: ")[0]


def test_interrupted(run, llama, monkeypatch):
    def interrupt(_):
        raise KeyboardInterrupt

    monkeypatch.setattr(generate, "run", interrupt)
    assert run("generate", llama, "--prompt", "a").code == 130


@pytest.mark.skipif(sys.platform == "win32", reason="signals of POSIX")
@pytest.mark.parametrize(
    ("words", "module"),
    [("'inspect', 'M'", "inspect"), ("'bench', 'host'", "bench_simulate")],
)
def test_ctrl_c_while_modules_are_imported_is_one_line(words, module, tmp_path):
    """The module of a command stands for JAX's, which take seconds and hide interrupts."""
    (tmp_path / f"{module}.py").write_text(
        "import os, signal\n"
        "try: os.kill(os.getpid(), signal.SIGINT)\n"
        "except KeyboardInterrupt: raise ImportError('an error while initializing') from None\n"
    )
    code = (
        "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        f"import jaxgen.commands; jaxgen.commands.__path__.insert(0, {str(tmp_path)!r})\n"
        f"from jaxgen.cli import main; main([{words}])"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, timeout=60)
    assert (ended.returncode, ended.stderr) == (130, b"interrupted\n")


def test_the_version_is_the_installed_one(run):
    result = run("--version")
    assert result.code == 0
    assert result.out == f"jaxgen {importlib.metadata.version('jaxgen')}\n"


def test_ctrl_c_is_heard_once_then_interrupts():
    with Interrupts() as interrupts:
        assert not interrupts.stopped
        signal.raise_signal(signal.SIGINT)
        assert interrupts.stopped
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
