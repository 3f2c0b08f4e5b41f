"""Streamed pieces are never taken back and add up to the decoded text, up to the stop string."""

import functools

import pytest
import tokenizers
from hypothesis import given, settings, strategies as st
from tokenizers import decoders, models, pre_tokenizers

from jaxgen.text import IncrementalDetokenizer, Tokenizer, load_tokenizer

WORDS = "Hello, wörld! 🙂👩\u200d🚀 今天天气 اهلا\n\n  x"


@pytest.fixture(scope="module")
def byte_level(golden_dir):
    return load_tokenizer(golden_dir("qwen2"))


@pytest.fixture(scope="module")
def pieces(golden_dir):
    return load_tokenizer(golden_dir("llama_plain"))


@functools.cache
def word_pieces():
    """A vocabulary that is neither byte-level nor SentencePiece."""
    words = ["[UNK]", "he", "##llo", "wor", "##ld", "!"]
    vocabulary = {word: place for place, word in enumerate(words)}
    backend = tokenizers.Tokenizer(models.WordPiece(vocabulary, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.decoder = decoders.WordPiece()
    return Tokenizer(backend)


def stream(tokenizer, ids, **options):
    detokenizer = IncrementalDetokenizer(tokenizer, **options)
    deltas = [detokenizer.push(token) for token in ids]
    deltas.append(detokenizer.finish())
    assert "".join(deltas) == detokenizer.text
    return detokenizer, deltas


@settings(max_examples=150, deadline=None)
@given(ids=st.lists(st.integers(0, 511), max_size=30), skip=st.booleans())
def test_any_ids_add_up_to_the_decoded_text(byte_level, ids, skip):
    detokenizer, _ = stream(byte_level, ids, skip_special_tokens=skip)
    assert detokenizer.text == byte_level.decode(ids, skip_special_tokens=skip)


@settings(max_examples=80, deadline=None)
@given(text=st.text(max_size=20), words=st.lists(st.integers(259, 499), max_size=10))
def test_sentencepiece_adds_up_too(pieces, text, words):
    ids = [*words, *pieces.encode(text, add_special_tokens=False), *words]
    detokenizer, deltas = stream(pieces, ids)
    assert detokenizer.text == pieces.decode(ids, skip_special_tokens=True)
    assert "\ufffd" not in "".join(deltas).replace("\ufffd", "", text.count("\ufffd"))


@settings(max_examples=100, deadline=None)
@given(text=st.text(alphabet=WORDS, min_size=1, max_size=40), data=st.data())
def test_the_first_stop_string_ends_the_text(byte_level, text, data):
    stops = data.draw(st.lists(st.text(alphabet=WORDS, min_size=1, max_size=3), max_size=3))
    include = data.draw(st.booleans())
    full = byte_level.decode(byte_level.encode(text))
    ends = [(full.find(stop) + len(stop), full.find(stop), stop) for stop in stops if stop in full]
    end, start, stop = min(ends, default=(len(full), len(full), None))

    detokenizer, _ = stream(
        byte_level, byte_level.encode(text), stop=stops, include_stop_str_in_output=include
    )

    assert detokenizer.text == full[: end if include else start]
    assert detokenizer.stop == stop


def test_characters_come_whole(byte_level):
    _, deltas = stream(byte_level, byte_level.encode("é🙂今"))
    assert [delta for delta in deltas if delta] == ["é", "🙂", "今"]
    broken = byte_level.encode("🙂")[:-1]
    _, deltas = stream(byte_level, broken)
    assert deltas == [""] * len(broken) + ["\ufffd"]


def test_only_what_may_become_a_stop_string_is_held_back(byte_level):
    ids = [byte_level.encode(letter)[0] for letter in "abcabd!"]
    detokenizer, deltas = stream(byte_level, ids, stop=["abd"])
    assert deltas == ["", "", "abc", "", "", "", "", ""]
    assert (detokenizer.text, detokenizer.stop) == ("abc", "abd")
    _, deltas = stream(byte_level, ids[:5], stop=["abd"])
    assert deltas == ["", "", "abc", "", "", "ab"]


def test_stop_strings_wait_for_min_tokens(byte_level):
    ids = [byte_level.encode(letter)[0] for letter in "xaxbxc"]
    detokenizer, _ = stream(byte_level, ids, stop=["x"], min_tokens=3)
    assert detokenizer.text == "xaxb"


def test_special_tokens_are_skipped_or_shown(byte_level):
    ids = [*byte_level.encode("a"), byte_level.eos_id, *byte_level.encode("b")]
    assert stream(byte_level, ids)[0].text == "ab"
    assert stream(byte_level, ids, skip_special_tokens=False)[0].text == "a<|im_end|>b"
    assert stream(byte_level, ids, skip_special_tokens=False, stop=["<|im"])[0].text == "a"


def test_a_continuation_keeps_its_first_space(pieces):
    ids = pieces.encode("and", add_special_tokens=False)
    assert stream(pieces, ids)[0].text == "and"
    assert stream(pieces, ids, continues_text=True)[0].text == " and"


@settings(deadline=None)
@given(ids=st.lists(st.integers(0, 5), max_size=12))
def test_other_vocabularies(ids):
    assert word_pieces().rules is None
    detokenizer, _ = stream(word_pieces(), ids)
    assert detokenizer.text == word_pieces().decode(ids)
