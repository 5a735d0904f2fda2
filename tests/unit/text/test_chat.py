"""Chat templates: what is rendered, what a template may do, and refusals by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from sluice.errors import BadRequest, CheckpointError
from sluice.text.chat import ChatTemplate, Message
from tests.unit.text.chatml import CHATML

_HI = Message("user", "hi")


def _render(source: str, *messages: Message, **tokens: str) -> str:
    return ChatTemplate(source, tokens).render(messages or [_HI])


def test_golden_with_the_default_system_turn() -> None:
    assert _render(CHATML, _HI) == (
        "<|im_start|>system\nBe kind.<|im_end|>\n"
        "<|im_start|>user\nhi<|im_end|>\n"
        "<|im_start|>assistant\n"
    )


def test_golden_of_a_longer_chat() -> None:
    messages = [Message("system", "S"), _HI, Message("assistant", "yes?"), Message("user", "b")]
    assert _render(CHATML, *messages) == (
        "<|im_start|>system\nS<|im_end|>\n"
        "<|im_start|>user\nhi<|im_end|>\n"
        "<|im_start|>assistant\nyes?<|im_end|>\n"
        "<|im_start|>user\nb<|im_end|>\n"
        "<|im_start|>assistant\n"
    )


def test_without_a_generation_prompt_it_ends_with_the_last_turn() -> None:
    rendered = ChatTemplate(CHATML, {}).render([_HI], add_generation_prompt=False)
    assert rendered.endswith("<|im_start|>user\nhi<|im_end|>\n")


def test_developer_is_system_for_a_template_that_does_not_know_it() -> None:
    developer = Message("developer", "Be brief.")
    assert _render(CHATML, developer, _HI) == _render(CHATML, Message("system", "Be brief."), _HI)
    knows = "{% for m in messages %}{% if m.role == 'developer' %}<dev>{% endif %}{% endfor %}"
    assert _render(knows, developer) == "<dev>"


def test_special_tokens_and_absent_ones() -> None:
    source = "{{ bos_token }}|{{ eos_token }}|{{ pad_token }}"
    assert _render(source, bos_token="<s>", eos_token="</s>") == "<s>|</s>|"


def test_lines_of_blocks_leave_no_blanks() -> None:
    source = (
        "{% for m in messages %}\n  {% if true %}\n{{ m.content }}\n  {% endif %}\n{% endfor %}\n"
    )
    assert _render(source) == "hi\n"


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("{% for m in [1, 2, 3] %}{% if m == 2 %}{% break %}{% endif %}{{ m }}{% endfor %}", "1"),
        ("{% generation %}{{ messages[0].content }}{% endgeneration %}", "hi"),
        ("{{ {'é': '<b>'} | tojson }}", '{"é": "<b>"}'),
        ("{{ strftime_now('%Y') | length }}", "4"),
        ("{{ messages[0].name is defined }}", "False"),
        ("{{ '<' ~ messages[0].content ~ '>' }}", "<hi>"),
    ],
)
def test_what_published_templates_use(source: str, expected: str) -> None:
    assert _render(source) == expected


def test_optional_fields_reach_the_template_when_given() -> None:
    source = "{% for m in messages %}{{ m.name }}:{{ m.reasoning_content }}{% endfor %}"
    assert _render(source, Message("assistant", "x", "bob", "hm")) == "bob:hm"


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{{ messages[0].content.nothing.more }}", "nothing"),
        ("{{ messages[0].content + 1 }}", "str"),
        ("{{ 1 / 0 }}", "division"),
        ("{{ ''.__class__.__mro__ }}", "unsafe"),
        ("{{ messages.append(1) }}", "unsafe"),
    ],
)
def test_a_template_that_refuses_or_fails_is_the_bodys_fault(source: str, reason: str) -> None:
    with pytest.raises(BadRequest, match=reason) as caught:
        _render(source)
    assert caught.value.field == "messages"


def test_a_templates_own_switches() -> None:
    source = "{{ bos_token }}{% if enable_thinking is false %}<no>{% endif %}{{ rest | tojson }}"
    template = ChatTemplate(source, {"bos_token": "<s>"})
    variables = {"enable_thinking": False, "rest": [1]}
    assert template.render([_HI], variables=variables) == "<s><no>[1]"


@pytest.mark.parametrize(
    "name",
    ["messages", "add_generation_prompt", "bos_token", "tools", "raise_exception", "range"],
)
def test_a_switch_may_not_take_a_name_that_means_something(name: str) -> None:
    with pytest.raises(BadRequest, match=name) as caught:
        ChatTemplate("x", {"bos_token": "<s>"}).render([_HI], variables={name: 1})
    assert caught.value.field == "chat_template_kwargs"


def test_switches_that_have_no_tokens_or_no_end_are_refused() -> None:
    deep: list[object] = []
    for _ in range(100_000):
        deep = [deep]
    for value in ("\ud800", deep):
        with pytest.raises(BadRequest, match="refuses"):
            ChatTemplate("{{ v if v is string else v | tojson }}", {}).render(
                [_HI], variables={"v": value}
            )


def test_a_broken_template_names_its_line() -> None:
    with pytest.raises(CheckpointError, match=r"chat_template\.jinja, line 2"):
        ChatTemplate("ok\n{% if %}", {})


def _folder(folder: Path, jinja: str | None = None, **config: Any) -> Path:
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    if jinja is not None:
        (folder / "chat_template.jinja").write_text(jinja)
    return folder


def _loaded(folder: Path) -> str | None:
    template = ChatTemplate.load(folder)
    return None if template is None else template.render([_HI])


@pytest.mark.parametrize(
    ("in_config", "expected"),
    [
        ("config {{ bos_token }}", "config <s>"),
        ([{"name": "tools", "template": "t"}, {"name": "default", "template": "d"}], "d"),
        ([{"name": "tools", "template": "t"}], None),
        (None, None),
        (5, None),
    ],
)
def test_a_template_in_the_tokenizers_config(
    tmp_path: Path, in_config: Any, expected: str | None
) -> None:
    bos = {"content": "<s>", "special": True}
    assert _loaded(_folder(tmp_path, chat_template=in_config, bos_token=bos)) == expected


def test_the_file_of_its_own_wins(tmp_path: Path) -> None:
    folder = _folder(tmp_path, "file {{ eos_token }}", chat_template="config", eos_token="</s>")
    assert _loaded(folder) == "file </s>"


def test_a_broken_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"chat_template\.jinja"):
        ChatTemplate.load(_folder(tmp_path, "{% nope %}"))


def test_no_folder_has_no_template(tmp_path: Path) -> None:
    assert ChatTemplate.load(tmp_path) is None
