"""What the small files beside a vocabulary say of single tokens counts as in transformers."""

import json
import shutil

import pytest
import tokenizers

from jaxgen.text import load_tokenizer
from jaxgen.text.added_tokens import add_tokens
from jaxgen_checkpoints.errors import CheckpointError


@pytest.fixture
def folder(golden_dir, tmp_path):
    """A byte-level tokenizer.json whose last id is 511, with a config of its own."""
    golden = golden_dir("llama_tied")
    shutil.copy(golden / "tokenizer.json", tmp_path)
    config = json.loads((golden / "tokenizer_config.json").read_text())

    def write(change):
        (tmp_path / "tokenizer_config.json").write_text(json.dumps({**config, **change}))
        return tmp_path

    write({})
    return write


def entry(content, **flags):
    return {"content": content, "normalized": False, "special": False, **flags}


def test_the_config_adds_tokens_and_marks_them(folder):
    listed = {
        "600": entry("<|second|>", lstrip=True),
        "520": entry("<|first|>", special=True),
        "510": entry("<|im_start|>", special=True),
    }
    path = folder({"added_tokens_decoder": listed})
    source = json.loads((path / "tokenizer.json").read_text())
    for token in source["added_tokens"]:
        token["special"] = False
    (path / "tokenizer.json").write_text(json.dumps(source))
    tokenizer = load_tokenizer(path)
    ids = tokenizer.encode("a <|second|><|first|><|im_start|>")
    assert ids[1:] == [513, 512, 510]
    assert tokenizer.decode(ids, skip_special_tokens=True) == "a<|second|>"


@pytest.mark.parametrize(
    "listed",
    [{"520": "<|first|>"}, {"520": {"special": True}}, {"last": entry("<|x|>")}, ["<|x|>"]],
)
def test_a_list_of_other_things_is_refused(folder, listed):
    path = folder({"added_tokens_decoder": listed})
    with pytest.raises(
        CheckpointError, match=r"tokenizer_config\.json: added_tokens_decoder lists"
    ):
        load_tokenizer(path)


class Counting:
    """A tokenizer that counts how often tokens are added to it."""

    def __init__(self, backend):
        self.backend, self.calls = backend, 0

    def __getattr__(self, name):
        return getattr(self.backend, name)

    def add_tokens(self, tokens):
        self.calls += 1
        return self.backend.add_tokens(tokens)

    add_special_tokens = add_tokens


def test_many_added_tokens_are_added_at_once(folder):
    """Each call goes over every added token: one by one Gemma's 6,400 took 17 s."""
    path = folder({})
    listed = {str(n): entry(f"<unused{n}>", special=n % 2 == 0) for n in range(512, 612)}
    further = [f"<|further{n}|>" for n in range(9)]
    counting = Counting(tokenizers.Tokenizer.from_file(str(path / "tokenizer.json")))
    entries = {"added_tokens_decoder": listed, "additional_special_tokens": further}
    add_tokens(counting, path, entries, None)
    assert counting.calls == 2
    assert counting.backend.token_to_id("<unused611>") == 611
    assert counting.backend.token_to_id("<|further8|>") == 620


@pytest.mark.parametrize("key", ["additional_special_tokens", "extra_special_tokens"])
@pytest.mark.parametrize(
    "given", [["<|call|>", "<|im_end|>"], {"call": "<|call|>"}, [entry("<|call|>")]]
)
def test_further_special_tokens(folder, key, given):
    path = folder({key: given, "pad_token": "<pad>"})
    tokenizer = load_tokenizer(path)
    assert tokenizer.pad_id == 512
    ids = tokenizer.encode("a<|call|>")
    assert ids[1:] == [513]
    assert tokenizer.decode(ids, skip_special_tokens=True) == "a"
    # A model without rows for them has no such tokens.
    fitting = load_tokenizer(path, vocab_size=513)
    assert fitting.pad_id == 512
    assert max(fitting.encode("a<|call|>")) < 512


@pytest.mark.parametrize("given", ["<|call|>", 5])
def test_further_tokens_that_are_no_list_are_refused(folder, given):
    with pytest.raises(CheckpointError, match=r"additional_special_tokens .* must be a list"):
        load_tokenizer(folder({"additional_special_tokens": given}))


def test_added_tokens_json_counts_where_the_config_lists_none(golden_dir, tmp_path):
    golden = golden_dir("gpt2")
    for name in ("vocab.json", "merges.txt"):
        shutil.copy(golden / name, tmp_path)
    size = len(json.loads((golden / "vocab.json").read_text()))
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "<|end|>"}')
    added = tmp_path / "added_tokens.json"
    added.write_text(json.dumps({"<|tool|>": size + 1, "<|end|>": size}))
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer.eos_id == size
    ids = tokenizer.encode("a<|tool|><|end|>")
    assert ids[1:] == [size + 1, size]
    assert tokenizer.decode(ids, skip_special_tokens=True) == "a<|tool|>"
    added.write_text('{"<|tool|>": "513"}')
    with pytest.raises(CheckpointError, match=r"added_tokens\.json must give each token its id"):
        load_tokenizer(tmp_path)


def test_an_end_of_which_the_config_says_nothing_stays_as_the_vocabulary_has_it(golden_dir, folder):
    source = json.loads((golden_dir("llama_tied") / "tokenizer.json").read_text())
    begin = {"id": "<|im_start|>", "ids": [510], "tokens": ["<|im_start|>"]}
    source["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [
            {"SpecialToken": {"id": begin["id"], "type_id": 0}},
            {"Sequence": {"id": "A", "type_id": 0}},
        ],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {begin["id"]: begin},
    }
    named = {"bos_token": begin["id"], "add_bos_token": None, "add_eos_token": None}
    path = folder(named)
    (path / "tokenizer.json").write_text(json.dumps(source))
    bare = load_tokenizer(path).encode("a", add_special_tokens=False)
    for said, expected in [
        ({}, [510, *bare]),
        ({"add_eos_token": False}, [510, *bare]),
        ({"add_eos_token": True}, [510, *bare, 511]),
        ({"add_bos_token": False}, bare),
        ({"add_bos_token": False, "add_eos_token": True}, [*bare, 511]),
    ]:
        assert load_tokenizer(folder({**named, **said})).encode("a") == expected, said


def test_a_prefix_space_is_asked_for(golden_dir, tmp_path):
    golden = golden_dir("gpt2")
    for name in ("vocab.json", "merges.txt"):
        shutil.copy(golden / name, tmp_path)
    plain = load_tokenizer(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text('{"add_prefix_space": true}')
    assert load_tokenizer(tmp_path).encode("the") == plain.encode(" the") != plain.encode("the")
