"""Corpus cleaning on small made-up inputs; the real packages are not needed."""

from __future__ import annotations

import zlib
from pathlib import Path

from tools.corpus import austen_text, bible_paragraphs, blob_lines, clean_paragraphs, split_held_out


def _charsxp(text: str) -> bytes:
    raw = text.encode()
    return bytes([0, 4, 0, 9]) + len(raw).to_bytes(4, "big") + raw


def test_blob_lines_finds_strings_between_other_bytes() -> None:
    blob = b"X\n\x00\x00" + _charsxp("one line") + b"\x01\x02" + _charsxp("") + _charsxp("another")
    assert blob_lines(blob) == ["one line", "", "another"]


def test_austen_text_keeps_only_long_objects(tmp_path: Path) -> None:
    novel = b"".join(_charsxp(f"line {i}") for i in range(1500))
    parts = [zlib.compress(b) for b in (novel, _charsxp("not a novel"))]
    path = tmp_path / "Rdata.rdb"
    path.write_bytes(b"".join(len(p).to_bytes(4, "big") + p for p in parts))
    text = austen_text(path)
    assert text.startswith("line 0\nline 1\n")
    assert "not a novel" not in text


def test_clean_paragraphs_joins_lines_and_straightens_quotes() -> None:
    text = (
        "It was said\nby everyone, \u201ctruly\u201d so; and it\u2019s\n a long line.\n\nshort\n\n"
    )
    assert clean_paragraphs(text) == ['It was said by everyone, "truly" so; and it\'s a long line.']


def test_bible_paragraphs_drop_verse_numbers_and_headings() -> None:
    text = "Genesis 1\n\n" + "\n".join(
        f"  {i} In the beginning was line {'abcdef'[i - 1]}." for i in range(1, 7)
    )
    paragraphs = bible_paragraphs(text)
    assert len(paragraphs) == 2
    assert paragraphs[0].count("In the beginning") == 4
    assert not any(character.isdigit() for p in paragraphs for character in p)


def test_held_out_part_is_small_and_disjoint() -> None:
    paragraphs = [f"paragraph {i}" for i in range(2000)]
    corpus = split_held_out(paragraphs)
    assert len(corpus.held_out) == 40
    assert not set(corpus.train) & set(corpus.held_out)
    assert len(corpus.train) + len(corpus.held_out) == 2000
