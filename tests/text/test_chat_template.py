"""Chats render as transformers renders them; a template that misbehaves fails alone."""

import json
import shutil

import pytest

from jaxgen.text import ChatTemplate, ChatTemplateError, load_tokenizer

HELLO = [{"role": "user", "content": "Hello"}]


@pytest.mark.parametrize(
    "name",
    [
        "llama_plain",
        "llama_llama3",
        "llama_tied",
        "mistral_swa",
        "qwen2",
        "qwen3",
        "gemma3_multimodal",  # whose template takes texts and lists of parts
        "mistral3",  # and this one's is in a file of its own
    ],
)
def test_fixture_chats(golden_dir, name):
    folder = golden_dir(name)
    tokenizer = load_tokenizer(folder)
    for case in json.loads((folder / "tokenizer_cases.json").read_text())["chats"]:
        options = {"add_generation_prompt": case["add_generation_prompt"]}
        if "error" in case:
            with pytest.raises(ChatTemplateError):
                tokenizer.render_chat(case["messages"], **options)
            continue
        assert tokenizer.render_chat(case["messages"], **options) == case["rendered"]
        assert tokenizer.encode_chat(case["messages"], **options) == case["ids"]


@pytest.mark.parametrize(
    ("name", "message"),
    [("chat_template_broken", "unexpected"), ("chat_template_hostile", "__class__")],
)
def test_bad_templates_fail_on_use_only(bad_dir, name, message):
    tokenizer = load_tokenizer(bad_dir / name)
    assert tokenizer.encode("a")
    with pytest.raises(ChatTemplateError, match=message):
        tokenizer.render_chat(HELLO)


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    "source",
    [
        "{% for i in range(10**12) %}x{% endfor %}",
        "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
        "{{ 'x' * 10**10 }}",
        "{{ ('x' * 10**6) * 10**6 }}",
        "{% set n = namespace(s='x') %}{% for i in range(99) %}{% set n.s = n.s + n.s %}"
        "{% endfor %}",
        "{{ 9 ** 99999999 }}",
        "{{ '%999999999d' % 1 }}",
        "{% set big = 'x' * 900000 %}{% for i in range(9999) %}{{ big }}{% endfor %}",
        "{{ ''.__class__ }}",
        "{{ raise_exception.__globals__ }}",
        "{{ messages.append(1) }}",
        "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
        "{{ undefined.attribute }}",
        "{{ raise_exception('roles must alternate') }}",
        "{{ 1 + messages }}",
        "{{ 'a' ** 'b' }}",
    ],
)
def test_misbehaviour_is_an_error(source):
    with pytest.raises(ChatTemplateError):
        ChatTemplate(source).render(HELLO)


def test_conventions_of_hub_templates():
    source = (
        "{{ bos_token }}{% for m in messages %}\n"
        "    {% if m.role == 'skip' %}{% continue %}{% endif %}\n"
        "{% generation %}{{ m.content | trim }}{% endgeneration %};{% endfor %}\n"
        "{{ tools | tojson }}{{ strftime_now('%%') }}{{ thinking }}{{ '%2d;' % (3 * 4 + 2 ** 4) }}"
    )
    template = ChatTemplate(source, {"bos_token": "<s>"})
    chat = [{"role": "skip", "content": "no"}, {"role": "user", "content": " é<b> "}]
    rendered = template.render(chat, tools=[{"é": "<b>"}], thinking="on")
    assert rendered == '<s>é<b>;[{"é": "<b>"}]%on28;'


def test_named_templates():
    template = ChatTemplate({"default": "plain", "tool_use": "tools"})
    assert template.render(HELLO) == "plain"
    assert template.render(HELLO, tools=[{"name": "f"}]) == "tools"
    with pytest.raises(ChatTemplateError, match="there are: default, tool_use"):
        template.render(HELLO, name="rag")


def test_further_templates_are_files_of_their_own(golden_dir, tmp_path):
    shutil.copy(golden_dir("llama_tied") / "tokenizer.json", tmp_path)
    (tmp_path / "tokenizer_config.json").write_text('{"chat_template": "older"}')
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "additional_chat_templates" / "tool_use.jinja").write_text("tools")
    (tmp_path / "chat_template.jinja").write_text("plain")
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer.render_chat(HELLO) == "plain"
    assert tokenizer.render_chat(HELLO, tools=[{"name": "f"}]) == "tools"


@pytest.mark.parametrize(("source", "end"), [("{{m}}", "start  "), ("{{m | trim}}", "start")])
def test_the_final_message_can_be_continued(source, end):
    source = "{% for x in messages %}[" + source.replace("m", "x.content") + "]</s>{% endfor %}"
    source = source.replace("trix.content", "trim")
    chat = [*HELLO, {"role": "assistant", "content": "start  "}]
    options = {"continue_final_message": True, "add_generation_prompt": False}
    assert ChatTemplate(source).render(chat, **options) == "[Hello]</s>[" + end
    parts = [{"role": "assistant", "content": [{"type": "text", "text": "a"}]}]
    block = ChatTemplate("{{ messages[0].content[0].text }}!")
    assert block.render(parts, **options) == "a"
    with pytest.raises(ChatTemplateError, match="exclude each other"):
        block.render(parts, continue_final_message=True)
    with pytest.raises(ChatTemplateError, match="drops the final message"):
        ChatTemplate("nothing").render(chat, **options)
