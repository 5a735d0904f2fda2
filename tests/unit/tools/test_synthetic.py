"""Synthetic documents: every answer follows from earlier text."""

from __future__ import annotations

import random
import re

import pytest

from tools.synthetic import (
    KEYS,
    WORDS,
    Kind,
    copy_question,
    filler_text,
    random_document,
    recall_document,
    recall_question,
)


@pytest.mark.parametrize("seed", range(20))
def test_recall_answers_repeat_their_definition(seed: int) -> None:
    document = recall_document(random.Random(seed), pairs=6, queries=9, filler_chars=200)
    defined = dict(re.findall(r"(?m)^([A-Z])= (\w+)$", document.text))
    asked = re.findall(r"(?m)^([A-Z])\? (\w+)$", document.text)
    assert len(defined) == 6
    assert len(asked) == 9
    assert all(defined[key] == value for key, value in asked)
    answers = [s.text for s in document.segments if s.kind is Kind.ANSWER]
    assert answers == [f" {value}" for _, value in asked]


@pytest.mark.parametrize("seed", range(20))
def test_recall_question_stops_where_the_answer_begins(seed: int) -> None:
    question = recall_question(random.Random(seed), pairs=5, filler_chars=seed * 20)
    key = question.prompt[-2]
    assert question.prompt.endswith(f"\n{key}?")
    assert f"{key}={question.answer}\n" in question.prompt
    assert question.answer.strip() in WORDS
    assert question.prompt[-question.distance_chars :].startswith(f"{key}=")
    assert question.distance_chars > seed * 20


@pytest.mark.parametrize("seed", range(20))
def test_copy_question_asks_for_the_whole_span(seed: int) -> None:
    question = copy_question(random.Random(seed), words=7, filler_chars=100)
    assert question.prompt.startswith(f"[{question.answer}]\n")
    assert question.prompt.endswith("\n[")
    assert len(question.answer.split()) == 7


def test_documents_depend_on_nothing_but_the_seed() -> None:
    assert random_document(random.Random(4), 500) == random_document(random.Random(4), 500)
    assert random_document(random.Random(4), 500) != random_document(random.Random(5), 500)


def test_distances_vary_from_tens_to_hundreds_of_characters() -> None:
    rng = random.Random(0)
    lengths = [len(random_document(rng, rng.randrange(80, 1000)).text) for _ in range(200)]
    assert min(lengths) < 100
    assert max(lengths) > 600


def test_filler_uses_prose_and_ends_at_words() -> None:
    prose = ["it was the best of times and it was the worst of times as they say"]
    text = filler_text(random.Random(1), 60, prose)
    assert text
    assert set(text.split()) <= set(prose[0].split())


def test_keys_and_words_are_distinct() -> None:
    assert len(set(KEYS)) == len(KEYS)
    assert len(set(WORDS)) == len(WORDS)
