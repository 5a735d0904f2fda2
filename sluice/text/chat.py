"""The chat template of a model folder: messages in, one prompt out.

A template comes with the weights, so it runs in Jinja's immutable sandbox, with the few names that templates
of published models rely on (Hugging Face `transformers`, "Chat templates"): `raise_exception`, `tojson`
without HTML escapes, `strftime_now`, loop controls, the `generation` block, and the special tokens.
"""

from __future__ import annotations

import datetime
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from jinja2 import TemplateError, TemplateSyntaxError, nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from sluice.errors import BadRequest, CheckpointError
from sluice.text.tokenizer import read_json, token_text
from sluice.text.tools import Call, Tool

FILE = "chat_template.jinja"
# A template is the model author's program: it fails in any way that a program can.
_FAILURES = (
    TemplateError,
    ArithmeticError,
    AttributeError,
    LookupError,
    RecursionError,
    TypeError,
    ValueError,
)


@dataclass(frozen=True)
class Message:
    """One turn. What is None or empty doesn't reach the template, except ``content``."""

    role: str
    content: str
    name: str | None = None
    reasoning_content: str | None = None
    tool_calls: tuple[Call, ...] = ()
    tool_call_id: str | None = None

    def fields(self) -> dict[str, Any]:
        """What the template sees."""
        given = {
            "name": self.name,
            "reasoning_content": self.reasoning_content,
            "tool_calls": [call.fields() for call in self.tool_calls] or None,
            "tool_call_id": self.tool_call_id,
        }
        extra = {name: value for name, value in given.items() if value is not None}
        return {"role": self.role, "content": self.content, **extra}


class ChatTemplate:
    """One compiled template. Immutable; safe to share between threads."""

    def __init__(self, source: str, special_tokens: Mapping[str, str], name: str = FILE) -> None:
        """Raises `CheckpointError` for a template that doesn't compile."""
        self.source = source
        self._special_tokens = dict(special_tokens)
        self._words = frozenset(re.findall(r"\w+", source))
        try:
            self._template = _environment().from_string(source)
        except TemplateSyntaxError as error:
            raise CheckpointError(
                f"{name}, line {error.lineno}: {error.message}",
                stage="start",
                remedy="repair the chat template in the model folder",
            ) from error

    @classmethod
    def load(cls, model_dir: Path) -> ChatTemplate | None:
        """The folder's template: chat_template.jinja, else tokenizer_config.json's; None without."""
        config = read_json(model_dir / "tokenizer_config.json")
        path = model_dir / FILE
        if path.is_file():
            return cls(path.read_text(encoding="utf-8"), _special_tokens(config), str(path))
        source = _default_template(config.get("chat_template"))
        if source is None:
            return None
        name = f"{model_dir / 'tokenizer_config.json'}: chat_template"
        return cls(source, _special_tokens(config), name)

    def knows(self, word: str) -> bool:
        """Whether ``word`` stands anywhere in the template."""
        return word in self._words

    def render(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Tool] = (),
        add_generation_prompt: bool = True,
        variables: Mapping[str, object] | None = None,
    ) -> str:
        """The prompt. ``variables`` are a template's own switches, such as Qwen3's enable_thinking.

        Raises `BadRequest` when the template refuses the messages, or a variable's name is taken.
        """
        turns = [message.fields() for message in messages]
        # A template that never heard of this role would print it as one the model never saw.
        if not self.knows("developer"):
            for turn in turns:
                turn["role"] = "system" if turn["role"] == "developer" else turn["role"]
        own: dict[str, object] = {
            **self._special_tokens,
            "messages": turns,
            "add_generation_prompt": add_generation_prompt,
            # None, not undefined: published templates ask "tools is not none".
            "tools": [tool.fields() for tool in tools] or None,
            "documents": None,
        }
        self._check_names(own, variables or {})
        try:
            prompt = self._template.render({**(variables or {}), **own})
            prompt.encode()  # half a surrogate pair has no tokens
        except _FAILURES as error:
            raise BadRequest(
                f"the chat template refuses these messages: {error}", field="messages"
            ) from error
        return prompt

    def _check_names(self, own: Mapping[str, object], variables: Mapping[str, object]) -> None:
        taken = sorted({*own, *self._template.environment.globals} & {*variables})
        if taken:
            raise BadRequest(
                f"chat_template_kwargs may not set {', '.join(taken)}",
                field="chat_template_kwargs",
                remedy="these have fields of their own, or are not supported",
            )


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=["jinja2.ext.loopcontrols", _GenerationBlock],
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.datetime.now().strftime(form)
    return environment


class _GenerationBlock(Extension):
    """Marks the assistant's tokens for training; here it prints what it holds."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> nodes.Node | list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _raise_exception(message: str) -> NoReturn:
    raise TemplateError(message)


def _to_json(value: Any, indent: int | None = None) -> str:
    return json.dumps(value, ensure_ascii=False, indent=indent)


def _default_template(value: Any) -> str | None:
    """One template, or the one called "default" of a list of named ones."""
    if isinstance(value, str):
        return value
    named = value if isinstance(value, list) else []
    for entry in named:
        if isinstance(entry, dict) and entry.get("name") == "default":
            return _default_template(entry.get("template"))
    return None


def _special_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    """bos_token, eos_token and their like, as text."""
    texts = {name: token_text(value) for name, value in config.items() if name.endswith("_token")}
    return {name: text for name, text in texts.items() if text is not None}
