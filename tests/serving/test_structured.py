"""Outputs of a form: whatever the model wants to say, what it says parses."""

import asyncio
import json
import re
import time

import jsonschema
import pytest
from hypothesis import given, settings, strategies as st

from jaxgen.engine.loop import GenerationLoop
from jaxgen.engine.outputs import FinishReason
from jaxgen.llm import LLM
from jaxgen.ragged.buckets import Buckets
from jaxgen.sampling import InvalidParameter, SamplingParams
from jaxgen.serving.async_engine import AsyncEngine

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 5},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "tags": {"type": "array", "items": {"enum": ["a", "böse", "c"]}, "maxItems": 3},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}
SLOW = {
    "json": {
        "type": "object",
        "properties": {f"k{i}": {"type": "string", "pattern": "^a{1,50}$"} for i in range(900)},
    }
}
PROMPTS = [[5, 6, 7], [300, 1, 2, 9], [404, 11], list(range(40, 60))]


def build(folder, **options):
    given = {
        "dtype": "float32",
        "max_num_seqs": 4,
        "max_num_batched_tokens": 16,
        "block_size": 8,
        "max_model_len": 128,
        "num_gpu_blocks_override": 40,
    }
    llm = LLM(folder, {**given, **options})
    shape = llm.engine.buckets.mixed[-1]
    llm.engine.buckets = Buckets((shape,), (shape,))
    return llm


@pytest.fixture(scope="module")
def llm(golden_dir):
    """SentencePiece with a dummy prefix: the hardest to keep to the letter of a grammar."""
    return build(golden_dir("llama_plain"))


def drawn(wanted, **changes):
    asked = {"temperature": 1.0, "seed": 1, "max_tokens": 90, "structured_outputs": wanted}
    return SamplingParams(**{**asked, **changes})


def fits(kind, text):
    if kind == "json":
        jsonschema.validate(json.loads(text), PERSON)
        return True
    if kind == "json_object":
        return isinstance(json.loads(text), dict)
    patterns = {
        "regex": r"[A-Z]{2}-\d{3,5}(,é😀)?",
        "choice": r'left|right|say "no"\n',
        "grammar": r"a(b|c){1,4}d",
        "structural_tag": r"(?s).*",
    }
    return re.fullmatch(patterns[kind], text) is not None


FORMS = {
    "json": {"json": PERSON, "disable_any_whitespace": True},
    "regex": {"regex": r"[A-Z]{2}-[0-9]{3,5}(,é😀)?"},
    "choice": {"choice": ["left", "right", 'say "no"\n']},
    "grammar": {"grammar": 'root ::= "a" mid mid? mid? mid? "d"\nmid ::= "b" | "c"'},
}


@pytest.mark.parametrize("kind", FORMS)
def test_every_sample_has_the_form(llm, kind):
    """Drawn at any temperature, three samples of one prompt, and free requests beside them."""
    asked = [
        drawn(FORMS[kind], n=3, temperature=2.0),
        SamplingParams(temperature=0, max_tokens=30, ignore_eos=True),
        drawn(FORMS[kind], temperature=0, min_tokens=60, logprobs=1),
    ]
    alone = llm.generate([PROMPTS[1]], asked[1])[0].outputs[0]
    many, free, long = llm.generate(PROMPTS[:3], asked)
    assert free.outputs[0] == alone
    for completion in [*many.outputs, *long.outputs]:
        assert completion.finish_reason is FinishReason.STOP, completion
        assert fits(kind, completion.text), completion.text
    assert len({completion.text for completion in many.outputs}) > 1 or kind == "choice"


@pytest.mark.slow
@pytest.mark.parametrize("family", ["qwen2", "gpt2", "gemma2", "qwen_v1", "llama_llama3"])
def test_every_kind_of_vocabulary(golden_dir, family):
    llm = build(golden_dir(family))
    for kind, form in FORMS.items():
        (output,) = llm.generate([PROMPTS[0]], drawn(form, n=3))
        for completion in output.outputs:
            assert fits(kind, completion.text), completion


@pytest.mark.slow
def test_a_real_model_and_its_vocabulary(smollm2_gguf):
    llm = LLM(smollm2_gguf, max_num_seqs=2, max_num_batched_tokens=64, max_model_len=256)
    question = [{"role": "user", "content": "Who was Ada Lovelace? Answer as JSON."}]
    for temperature in (0, 0.8):
        form = drawn(FORMS["json"], temperature=temperature, max_tokens=120)
        answer = llm.chat(question, form).outputs[0]
        assert fits("json", answer.text), answer
    choice = drawn({"choice": ["Paris", "Rome"]}, temperature=0)
    question = [{"role": "user", "content": "What is the capital of France?"}]
    assert llm.chat(question, choice).outputs[0].text == "Paris"


def test_tags_begin_where_a_trigger_does(llm):
    tag = {"begin": "<f>", "schema": PERSON, "end": "</f>"}
    form = {"structural_tag": {"structures": [tag], "triggers": ["<f"]}}
    forced = drawn(form, max_tokens=40)
    (output,) = llm.generate([PROMPTS[0]], forced)
    assert output.outputs[0].error is None


schemas = st.recursive(
    st.sampled_from(
        [
            {"type": "boolean"},
            {"type": "null"},
            {"type": "integer", "minimum": -5, "maximum": 40},
            {"type": "string", "maxLength": 3},
            {"type": "string", "pattern": "^[a-f]{1,3}$"},
            {"enum": ["x", 1, None, True]},
            {"const": {"k": [1]}},
        ]
    ),
    lambda inner: (
        st.dictionaries(st.sampled_from(["a", "b", "ü"]), inner, min_size=1, max_size=2).map(
            lambda parts: {
                "type": "object",
                "properties": parts,
                "required": [*parts],
                "additionalProperties": False,
            }
        )
        | inner.map(lambda one: {"type": "array", "items": one, "maxItems": 2})
        | st.lists(inner, min_size=1, max_size=2).map(lambda some: {"anyOf": some})
    ),
    max_leaves=4,
)


@settings(max_examples=12)
@given(schema=schemas, seed=st.integers(0, 1000))
def test_whatever_the_schema_the_output_is_valid(llm, schema, seed):
    form = {"json": schema, "disable_any_whitespace": True}
    (output,) = llm.generate([PROMPTS[0]], drawn(form, seed=seed, n=2, temperature=1.5))
    for completion in output.outputs:
        if completion.finish_reason is FinishReason.STOP:
            jsonschema.validate(json.loads(completion.text), schema)
        else:
            assert completion.finish_reason is FinishReason.LENGTH


def test_preemption_changes_nothing(llm):
    """Blocks for two of four requests: some are computed anew in the middle of their objects."""
    asked = [drawn(FORMS["json"], seed=seed) for seed in range(3)]
    asked.append(SamplingParams(temperature=0, max_tokens=60, ignore_eos=True))
    alone = [
        llm.generate([prompt], params)[0].outputs[0]
        for prompt, params in zip(PROMPTS, asked, strict=True)
    ]
    engine = llm.engine
    hogs = [1]
    engine.state.track(1)
    engine.state.reserve(1, 16 * 8)
    engine.state.track(2)
    engine.state.reserve(2, 12 * 8)
    loop = GenerationLoop(engine, llm.tokenizer, eos_ids=llm.eos_ids)
    outputs = [
        loop.submit(str(number), prompt, params)
        for number, (prompt, params) in enumerate(zip(PROMPTS, asked, strict=True))
    ]
    while loop.has_unfinished:
        loop.step()
    for uid in (*hogs, 2):
        engine.flush(uid)
    assert loop.counters.preemptions > 0
    assert [output.outputs[0] for output in outputs] == alone


def test_min_tokens_and_end_tokens_keep_to_the_grammar(llm):
    form = {"regex": "[a-z]+"}
    (output,) = llm.generate([PROMPTS[0]], drawn(form, min_tokens=20, max_tokens=25, n=4))
    for completion in output.outputs:
        assert len(completion.token_ids) >= 20
        assert re.fullmatch("[a-z]+", completion.text)


def test_rules_that_forbid_everything_end_with_an_error(llm):
    some = [token for token in range(500) if b"0" not in llm.tokenizer.token_bytes(token)]
    form = drawn({"regex": "[0-9]{4}"}, allowed_token_ids=some)
    (output,) = llm.generate([PROMPTS[0]], form)
    assert re.fullmatch("[1-9]{4}", output.outputs[0].text)
    others = [token for token in range(480) if b"x" not in llm.tokenizer.token_bytes(token)]
    (output,) = llm.generate([PROMPTS[0]], drawn({"regex": "x"}, allowed_token_ids=others))
    assert output.outputs[0].finish_reason is FinishReason.ERROR
    assert "forbid every token" in output.outputs[0].error


def test_bad_words_are_not_said(llm):
    """The first word that it would say, in the middle of a text too; and a word of two tokens."""
    greedy = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
    said = llm.generate([PROMPTS[0]], greedy)[0].outputs[0].token_ids
    words = [llm.tokenizer.token_text(said[0]), llm.tokenizer.decode(said[1:3])]
    changed = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True, bad_words=words)
    (output,) = llm.generate([PROMPTS[0]], changed)
    assert said[0] not in output.outputs[0].token_ids
    assert output.outputs[0].finish_reason is FinishReason.LENGTH


def test_a_slow_schema_holds_up_nobody(llm):
    """Beside it, streams go on; it ends with an error or an output of its own."""

    async def main():
        engine = AsyncEngine(
            GenerationLoop(llm.engine, llm.tokenizer, eos_ids=llm.eos_ids),
            name="x",
            tokenizer=llm.tokenizer,
        )
        await engine.start()
        gaps, last = [], time.monotonic()

        async def free():
            nonlocal last
            params = SamplingParams(temperature=0, max_tokens=100, ignore_eos=True)
            async for _ in engine.generate("free", PROMPTS[0], params):
                gaps.append(time.monotonic() - last)
                last = time.monotonic()

        async def slow():
            async for delta in engine.generate("slow", PROMPTS[1], drawn(SLOW)):
                if delta.finished:
                    return delta.completions[0]

        _, end = await asyncio.gather(free(), slow(), return_exceptions=True)
        await engine.stop()
        return gaps, end

    gaps, end = asyncio.run(main())
    assert len(gaps) > 10
    assert isinstance(end, InvalidParameter) or end.finish_reason is not None


@pytest.mark.parametrize(
    ("form", "words"),
    [
        ({"regex": "(?=a)b"}, "look-around"),
        ({"json": {"type": "object", "if": {}}}, "if"),
        ({"grammar": "start: missing"}, "missing"),
        ({"structural_tag": {"format": {}}}, "structures"),
        (
            {"structural_tag": {"structures": [{"begin": [1], "end": "a"}], "triggers": ["a"]}},
            "must be text",
        ),
        ({"structural_tag": {"structures": [5], "triggers": 5}}, "cannot be read"),
    ],
)
def test_what_the_library_cannot_do_is_refused_in_its_words(llm, form, words):
    with pytest.raises(InvalidParameter, match=words) as refused:
        llm.generate([PROMPTS[0]], drawn(form))
    assert refused.value.param == "structured_outputs"
