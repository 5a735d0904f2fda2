"""Grammars of each kind compile; what doesn't is refused with the reason."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from llguidance import LLTokenizer

from sluice.errors import BadRequest
from sluice.grammar.compiler import grammars_of
from sluice.grammar.language import MAX_GRAMMAR_BYTES
from sluice.types import Grammar, GrammarKind
from tests.unit.grammar.letters import letters

MODEL = Path(__file__).parents[3] / "models" / "tiny-dsv4"
VOCAB = 512


def _allows(grammar: Grammar, text: str) -> bool:
    """Whether the shipped model can write exactly ``text`` and end there."""
    tokenizer = LLTokenizer(str(MODEL / "tokenizer.json"))
    matcher = grammars_of(MODEL, VOCAB, (1,)).matcher(grammar)
    output: list[int] = []
    for token in [*tokenizer.tokenize_str(text), 1]:
        matcher.follow(output)
        if not matcher.allowed([])[0, token]:
            return False
        output.append(token)
    assert matcher.failure is None
    return True


@pytest.mark.parametrize(
    ("grammar", "good", "bad"),
    [
        (Grammar(GrammarKind.JSON_OBJECT), '{"a": [1, {"b": null}]}', "[1]"),
        (
            Grammar(
                GrammarKind.JSON_SCHEMA,
                json.dumps(
                    {
                        "type": "object",
                        "properties": {"a": {"type": "integer"}},
                        "required": ["a"],
                        "additionalProperties": False,
                    }
                ),
            ),
            '{"a": -7}',
            '{"a": "x"}',
        ),
        (Grammar(GrammarKind.REGEX, "(yes|no)!?"), "no!", "nope"),
        (Grammar(GrammarKind.LARK, 'start: "a" start "b" | "c"'), "aacbb", "aacb"),
    ],
)
def test_each_kind_allows_its_texts_only(grammar: Grammar, good: str, bad: str) -> None:
    assert _allows(grammar, good)
    assert not _allows(grammar, bad)


def test_blank_space_in_json_has_an_end() -> None:
    json_object = Grammar(GrammarKind.JSON_OBJECT)
    for indent in (None, 1, 2, 8, "\t"):
        assert _allows(json_object, json.dumps({"a": {"b": [1, {}], "c": ""}}, indent=indent))
    assert _allows(json_object, '{\r\n    "a": 1\r\n}')
    assert _allows(json_object, "{" + "\n" + " " * 32 + "}")
    for endless in ("\n\n", "\n" + " " * 33, " \n", " " * 3, "\r\r\n"):
        assert not _allows(json_object, "{" + endless + "}"), endless


@pytest.mark.parametrize(
    ("kind", "text", "reason"),
    [
        (GrammarKind.REGEX, "(", "unclosed group"),
        (GrammarKind.LARK, "start: nobody", 'unknown name: "nobody"'),
        (GrammarKind.JSON_SCHEMA, "{", "not JSON"),
        (GrammarKind.JSON_SCHEMA, "[" * 100_000, "not JSON"),
        (GrammarKind.JSON_SCHEMA, "[]", "a list, must be an object"),
        (GrammarKind.JSON_SCHEMA, '{"type": "nope"}', "Invalid type: nope"),
        (GrammarKind.JSON_SCHEMA, '{"not": {}}', "Unimplemented keys"),
        (GrammarKind.REGEX, "a" * (MAX_GRAMMAR_BYTES + 1), f"more than {MAX_GRAMMAR_BYTES} bytes"),
    ],
)
def test_what_cannot_be_used_is_refused_with_the_reason(
    kind: GrammarKind, text: str, reason: str
) -> None:
    with pytest.raises(BadRequest, match=reason) as refused:
        letters().matcher(Grammar(kind, text))
    assert refused.value.field == "grammar"


def test_a_model_that_cannot_follow_grammars_says_why(tmp_path: Path) -> None:
    wordpiece = tmp_path / "wordpiece"
    wordpiece.mkdir()
    (wordpiece / "tokenizer.json").write_text('{"model": {"type": "WordPiece"}}')
    for folder, eos_ids, reason in (
        (tmp_path, (1,), r"no tokenizer\.json"),
        (MODEL, (), "no end of sequence"),
        (wordpiece, (1,), "can't be used"),
    ):
        with pytest.raises(BadRequest, match=reason) as refused:
            grammars_of(folder, VOCAB, eos_ids).matcher(Grammar(GrammarKind.JSON_OBJECT))
        assert refused.value.field == "grammar"
