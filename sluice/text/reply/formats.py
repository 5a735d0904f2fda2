"""How a family of models writes reasoning and tool calls, and which family a model folder is of."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from sluice.text.chat import ChatTemplate
from sluice.text.reply import dsml, hermes, kimi
from sluice.text.reply.calls import CallBody, CallParser, Markers
from sluice.text.reply.lark import Lark
from sluice.text.reply.parts import Content, Part, ReplyParser
from sluice.text.reply.reasoning import MARKERS as THINK_MARKERS
from sluice.text.reply.reasoning import ReasoningParser, Thinking
from sluice.text.tokenizer import read_json
from sluice.text.tools import Call, Tool


class ToolFormatName(Enum):
    """Setting ``tool_format``."""

    AUTO = "auto"
    HERMES = "hermes"
    DSML = "dsml"
    KIMI = "kimi"


class ReasoningName(Enum):
    """Setting ``reasoning``."""

    AUTO = "auto"
    THINK = "think"
    NONE = "none"


@dataclass(frozen=True)
class ToolFormat:
    """One family's tool calls. ``grammar`` continues after ``trigger``, the text that begins them."""

    markers: Markers
    trigger: str
    new_body: Callable[[], CallBody]
    write: Callable[[Sequence[Call]], str]
    grammar: Callable[[Sequence[Tool], bool, Lark], str]
    inner: tuple[str, ...] = ()  # markers inside of a call

    @property
    def spellings(self) -> tuple[str, ...]:
        """Everything that may be a special token, and must show in the text all the same."""
        return (*self.markers.outside, self.markers.close, *self.inner)

    def calls(self, tools: Sequence[Tool], lark: Lark, *, many: bool, free: bool) -> str:
        """Grammar of an answer that is calls of ``tools``: one, or as many as the model likes.

        ``free`` also allows any text, and calls where that turns to them.
        """
        calls = self.grammar(tools, many, lark)
        if not free:
            return f"{lark.text(self.trigger)} {calls}"
        return f"/(?s:.*)/ | {lark.seek(self.trigger)} {calls}"


TOOL_FORMATS = {
    ToolFormatName.HERMES: ToolFormat(
        hermes.MARKERS, hermes.MARKERS.open, hermes.HermesBody, hermes.write, hermes.grammar
    ),
    ToolFormatName.DSML: ToolFormat(
        dsml.MARKERS, dsml.SECTION, dsml.DsmlBody, dsml.write, dsml.grammar
    ),
    ToolFormatName.KIMI: ToolFormat(
        kimi.MARKERS, kimi.SECTION, kimi.KimiBody, kimi.write, kimi.grammar, (kimi.ARGUMENTS,)
    ),
}


@dataclass(frozen=True)
class ReplyFormat:
    """How one model's answers are read."""

    tools: ToolFormat
    thinks: bool

    def spellings(self, *, with_tools: bool) -> tuple[str, ...]:
        """Special tokens with these spellings must show in the text that is parsed."""
        thinking = THINK_MARKERS if self.thinks else ()
        return (*thinking, *self.tools.spellings) if with_tools else thinking

    def parser(
        self, thinking: Thinking, *, with_tools: bool, eager: bool, new_id: Callable[[], str]
    ) -> ReplyParser | None:
        """For one answer; None when all of it is content."""
        calls = CallParser(self.tools.markers, self.tools.new_body, new_id, eager=eager)
        if thinking is Thinking.OVER:
            return calls if with_tools else None
        reasoning = ReasoningParser(thinking)
        return _Both(reasoning, calls) if with_tools else reasoning


class _Both:
    """Calls are looked for in what is not reasoning."""

    def __init__(self, reasoning: ReasoningParser, calls: CallParser) -> None:
        self._reasoning = reasoning
        self._calls = calls

    def push(self, text: str) -> Sequence[Part]:
        return self._through(self._reasoning.push(text))

    def finish(self) -> Sequence[Part]:
        return [*self._through(self._reasoning.finish()), *self._calls.finish()]

    def _through(self, parts: Sequence[Part]) -> list[Part]:
        passed = (
            self._calls.push(part.text) if isinstance(part, Content) else [part] for part in parts
        )
        return list(itertools.chain.from_iterable(passed))


def choose_format(
    model_dir: Path,
    template: ChatTemplate | None,
    tools: ToolFormatName = ToolFormatName.AUTO,
    reasoning: ReasoningName = ReasoningName.AUTO,
) -> ReplyFormat:
    """What is said, else what the template's own words show, else what the architecture is known for."""
    source = template.source if template is not None else ""
    name = _tools_of(source, model_dir) if tools is ToolFormatName.AUTO else tools
    thinks = (
        THINK_MARKERS[0] in source
        if reasoning is ReasoningName.AUTO
        else (reasoning is ReasoningName.THINK)
    )
    return ReplyFormat(TOOL_FORMATS[name], thinks)


def _tools_of(source: str, model_dir: Path) -> ToolFormatName:
    for name, format_ in TOOL_FORMATS.items():
        if format_.trigger in source or format_.markers.open in source:
            return name
    kind = str(read_json(model_dir / "config.json").get("model_type", ""))
    if kind.startswith("deepseek"):
        return ToolFormatName.DSML
    return ToolFormatName.KIMI if kind.startswith("kimi") else ToolFormatName.HERMES
