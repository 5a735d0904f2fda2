"""Chat templates render as transformers renders them."""

from __future__ import annotations

from pathlib import Path

import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from sluice.text.chat import ChatTemplate, Message
from tests.unit.text.chatml import CHATML

_SHIPPED = Path(__file__).parents[2] / "models" / "smollm2" / "chat_template.jinja"
_SOURCES = {
    "absent": "{{ tools is none }} {{ documents is not none }} {{ nothing is defined }} {{ pad_token }}",
    "qwen": (
        "{%- set ns = namespace(last=messages|length - 1) %}\n"
        "{%- for m in messages[::-1] %}\n"
        "    {%- set index = (messages|length - 1) - loop.index0 %}\n"
        "    {%- if m.content is string and m.role == 'user' %}{%- set ns.last = index %}{%- endif %}\n"
        "{%- endfor %}\n"
        "{{- ns.last }}{{ messages[0].content.split('b')[-1].strip('\\n') }}\n"
        "{%- if enable_thinking is defined and enable_thinking is false %}<think>{%- endif %}"
    ),
    "chatml": CHATML,
    "blanks": "{% for m in messages %}\n  {% if true %}\n {{ m | tojson }}\n  {% endif %}\n{% endfor %}\n\n",
    "generation": (
        "{{ bos_token }}{% for m in messages %}{% if m.role == 'assistant' %}"
        "{% generation %}{{ m.content }}{% endgeneration %}{% else %}{% continue %}{% endif %}{% endfor %}\n"
    ),
    **({"smollm2": _SHIPPED.read_text()} if _SHIPPED.is_file() else {}),
}
_CHATS = (
    [Message("user", "hi")],
    [
        Message("system", "é <b>"),
        Message("user", "a\nb"),
        Message("assistant", " c "),
        Message("user", ""),
    ],
)


@pytest.mark.parametrize("prompted", [True, False])
@pytest.mark.parametrize("chat", _CHATS)
@pytest.mark.parametrize("name", sorted(_SOURCES))
def test_the_same_prompt(name: str, chat: list[Message], prompted: bool) -> None:
    tokens = {"bos_token": "<s>", "eos_token": "</s>"}
    conversation = [{"role": turn.role, "content": turn.content} for turn in chat]
    (theirs,), _ = render_jinja_template(
        conversations=[conversation],
        chat_template=_SOURCES[name],
        add_generation_prompt=prompted,
        **tokens,
    )
    ours = ChatTemplate(_SOURCES[name], tokens).render(chat, add_generation_prompt=prompted)
    assert ours == theirs
