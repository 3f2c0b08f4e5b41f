"""Ids and text are those of transformers, for every fixture, vocabulary file and GGUF."""

import base64
import json
import shutil

import pytest

from jaxgen.text import Tokenizer, gguf_tokenizer, load_tokenizer
from jaxgen_checkpoints.checkpoint import open_checkpoint
from jaxgen_checkpoints.errors import CheckpointError, CheckpointWarning, RefusedInput

FIXTURES = [
    "llama_plain",
    "llama_llama3",
    "llama_tied",
    "llama_dynamic",
    "llama_bias_headdim",
    "mistral_swa",
    "qwen2",
    "qwen2_tied_swa",
    "qwen3",
    "gemma3_multimodal",
    "mistral3",
]


def cases(folder):
    return json.loads((folder / "tokenizer_cases.json").read_text())


@pytest.mark.parametrize("name", FIXTURES)
def test_fixture(golden_dir, name):
    folder = golden_dir(name)
    tokenizer, known = load_tokenizer(folder), cases(folder)
    for key in ("bos", "eos", "pad"):
        assert getattr(tokenizer, f"{key}_id") == known[f"{key}_token_id"]
    for case in known["texts"]:
        assert tokenizer.encode(case["text"]) == case["ids"]
        bare = tokenizer.encode(case["text"], add_special_tokens=False)
        assert bare == case["ids_no_special"]
        assert tokenizer.decode(case["ids"]) == case["decode"]
        skipped = tokenizer.decode(case["ids"], skip_special_tokens=True)
        assert skipped == case["decode_skip_special"]


@pytest.mark.parametrize("name", ["llama_plain", "llama_dynamic", "mistral_swa"])
def test_sentencepiece_file_alone(golden_dir, tmp_path, name):
    folder = golden_dir(name)
    for file in ("tokenizer.model", "tokenizer_config.json", "special_tokens_map.json"):
        shutil.copy(folder / file, tmp_path)
    tokenizer = load_tokenizer(tmp_path)
    for case in cases(folder)["texts"]:
        assert tokenizer.encode(case["text"]) == case["ids"]
        assert tokenizer.decode(case["ids"]) == case["decode"]


def test_vocab_and_merges_alone(golden_dir, tmp_path):
    folder = golden_dir("qwen2")
    model = json.loads((folder / "tokenizer.json").read_text())["model"]
    (tmp_path / "vocab.json").write_text(json.dumps(model["vocab"]))
    rules = [rule if isinstance(rule, str) else " ".join(rule) for rule in model["merges"]]
    (tmp_path / "merges.txt").write_text("\n".join(["#version: 0.2", *rules]))
    config = json.loads((folder / "tokenizer_config.json").read_text())
    config["tokenizer_class"] = "Qwen2Tokenizer"
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer.eos_id == cases(folder)["eos_token_id"]
    for case in cases(folder)["texts"]:
        assert tokenizer.encode(case["text"]) == case["ids"]


def test_tiktoken_file_alone(golden_dir, tmp_path):
    folder = golden_dir("qwen2")
    full = load_tokenizer(folder)
    words = [full.token_bytes(token) for token in range(min(full.special_ids))]
    lines = [base64.b64encode(word).decode() + f" {rank}" for rank, word in enumerate(words)]
    (tmp_path / "qwen.tiktoken").write_text("\n".join(lines))
    shutil.copy(folder / "tokenizer_config.json", tmp_path)
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer.eos_id == full.eos_id
    for case in cases(folder)["texts"]:
        assert tokenizer.encode(case["text"]) == case["ids"]

    (tmp_path / "qwen.tiktoken").write_text("IQ== 0\n??? 1\n")
    with pytest.raises(CheckpointError, match=r"qwen\.tiktoken:2 is no token and rank"):
        load_tokenizer(tmp_path)


def test_config_decides_about_bos(golden_dir, tmp_path):
    folder = golden_dir("llama_plain")
    shutil.copy(folder / "tokenizer.json", tmp_path)
    config = json.loads((folder / "tokenizer_config.json").read_text())
    config |= {"add_bos_token": False, "add_eos_token": True}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    tokenizer = load_tokenizer(tmp_path)
    bare = tokenizer.encode("Hello", add_special_tokens=False)
    assert tokenizer.encode("Hello") == [*bare, tokenizer.eos_id]


def test_gguf_byte_level(smollm2_gguf, smollm2_expected):
    tokenizer = gguf_tokenizer(open_checkpoint(smollm2_gguf).gguf_tokenizer, vocab_size=49152)
    known = json.loads((smollm2_expected / "expected.json").read_text())
    for case in known["tokenizer"]["texts"]:
        assert tokenizer.encode(case["text"]) == case["ids"]
        assert tokenizer.decode(case["ids"]) == case["text"]
    # Digits one by one: " 5" is no word.
    assert [tokenizer.token_text(token) for token in tokenizer.encode("a  5")] == ["a", "  ", "5"]
    for prompt in known["prompts"]:
        if prompt["kind"] == "chat":
            assert tokenizer.render_chat(prompt["messages"]) == prompt["text"]
            assert tokenizer.encode_chat(prompt["messages"]) == prompt["ids"]
        else:
            assert tokenizer.encode(prompt["text"]) == prompt["ids"]
        greedy = prompt["f32_dequant"]
        assert tokenizer.decode(greedy["greedy_ids"]) == greedy["text"]
    assert (tokenizer.bos_id, tokenizer.eos_id) == (1, 2)


def test_gguf_sentencepiece(golden_dir):
    """The same pieces as metadata and as tokenizer.model give the same ids."""
    folder = golden_dir("llama_plain")
    model = json.loads((folder / "tokenizer.json").read_text())
    by_id = sorted(model["model"]["vocab"].items(), key=lambda entry: entry[1])
    tokens = [token for token, _ in by_id]
    special = {entry["content"] for entry in model["added_tokens"]}
    bytes_ = {f"<0x{byte:02X}>" for byte in range(256)}
    joined = ["".join(rule) for rule in model["model"]["merges"]]
    scores = {token: float(-place) for place, token in reversed(list(enumerate(joined)))}
    kinds = [3 if token in special else 6 if token in bytes_ else 1 for token in tokens]
    kinds[tokens.index("<unk>")] = 2
    metadata = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": [scores.get(token, -1e6) for token in tokens],
        "tokenizer.ggml.token_type": kinds,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
    }
    tokenizer = gguf_tokenizer(metadata)
    for case in cases(folder)["texts"]:
        assert tokenizer.encode(case["text"]) == case["ids"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tokenizer.ggml.pre": "martian"}, "pre 'martian' is not known"),
        ({"tokenizer.ggml.model": "rwkv"}, "model 'rwkv' is not supported"),
        ({"tokenizer.ggml.merges": None}, "merges is missing"),
        ({"tokenizer.ggml.merges": ["a"]}, "rules of two words, not 'a'"),
        ({"tokenizer.ggml.merges": ["a z"]}, "tokens and merges do not fit"),
        ({"tokenizer.ggml.token_type": [1]}, "1 entries for 3 tokens"),
    ],
)
def test_gguf_refusals(change, message):
    metadata = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": ["a", "b", "ab"],
        "tokenizer.ggml.merges": ["a b"],
    }
    assert gguf_tokenizer(metadata).encode("ab") == [2]
    with pytest.raises(CheckpointError, match=message):
        gguf_tokenizer(metadata | change)


def test_missing_and_corrupt_files_are_named(bad_dir):
    with pytest.raises(CheckpointError, match=r"looked for tokenizer\.json, vocab\.json"):
        load_tokenizer(bad_dir / "tokenizer_missing")
    with pytest.raises(CheckpointError, match=r"tokenizer_corrupt/tokenizer\.json cannot be read"):
        load_tokenizer(bad_dir / "tokenizer_corrupt")


def test_a_tokenizer_larger_than_the_vocabulary(bad_dir):
    folder = bad_dir / "tokenizer_larger_than_vocab"
    vocab = json.loads((folder / "config.json").read_text())["vocab_size"]
    with pytest.warns(CheckpointWarning, match="text that needs the ids beyond will be refused"):
        tokenizer = load_tokenizer(folder, vocab_size=vocab)
    text = tokenizer.decode([tokenizer.size - 1])
    with pytest.raises(RefusedInput, match=f"vocabulary ends at {vocab}"):
        tokenizer.encode(text)
    assert max(tokenizer.encode("a", add_special_tokens=False)) < vocab


def test_sentencepiece_model_that_is_none(tmp_path):
    (tmp_path / "tokenizer.model").write_bytes(b"\x0a\xff\xff\xff")
    with pytest.raises(CheckpointError, match=r"tokenizer\.model is no SentencePiece model"):
        load_tokenizer(tmp_path)


def test_odd_ids_and_odd_text(golden_dir):
    tokenizer: Tokenizer = load_tokenizer(golden_dir("qwen2"), vocab_size=512)
    assert tokenizer.decode([10**6, -1, 511]) == ""
    assert tokenizer.token_bytes(511) == b""
    with pytest.raises(RefusedInput, match="not valid Unicode"):
        tokenizer.encode("\ud800")


def test_tokens_have_bytes(golden_dir):
    """Logprobs report a token's bytes even where they are no character by themselves."""
    tokenizer = load_tokenizer(golden_dir("qwen2"))
    text = "naïve 🙂"
    ids = tokenizer.encode(text)
    assert b"".join(tokenizer.token_bytes(token) for token in ids) == text.encode()
    assert any(tokenizer.token_text(token) == "\ufffd" for token in ids)
    assert tokenizer.token_bytes(tokenizer.eos_id) == b"<|im_end|>"
