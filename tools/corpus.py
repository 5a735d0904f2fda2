"""Public-domain training text: six Jane Austen novels and the King James Bible, from Debian packages."""

from __future__ import annotations

import argparse
import re
import subprocess
import zlib
from dataclasses import dataclass
from pathlib import Path

DEFAULT_CACHE = Path(".cache/corpus")
PACKAGES = ("r-cran-janeaustenr", "bible-kjv-text", "bible-kjv")
HELD_OUT_FRACTION = 0.02
AUSTEN_RDB = "usr/lib/R/site-library/janeaustenr/data/Rdata.rdb"
MIN_PARAGRAPH_CHARS = 40
CHARSXP_ENCODINGS = frozenset({0x02, 0x04, 0x08})  # bytes, latin-1/UTF-8 and ASCII flag bits
MAX_LINE_BYTES = 400
_PLAIN_PUNCTUATION = {0x2018: "'", 0x2019: "'", 0x201C: '"', 0x201D: '"', 0x2014: "--"}


@dataclass(frozen=True)
class Corpus:
    """Cleaned paragraphs, split so that the held-out part never overlaps the training part."""

    train: tuple[str, ...]
    held_out: tuple[str, ...]


def fetch(cache: Path) -> None:
    """Download the Debian packages into `cache` and unpack them below `cache/root` (no installation)."""
    cache.mkdir(parents=True, exist_ok=True)
    for package in PACKAGES:
        found = sorted(cache.glob(f"{package}_*.deb"))
        if not found:
            subprocess.run(["apt-get", "download", package], cwd=cache, check=True)
            found = sorted(cache.glob(f"{package}_*.deb"))
        subprocess.run(["dpkg", "-x", str(found[0]), str(cache / "root")], check=True)


def blob_lines(blob: bytes) -> list[str]:
    """The character strings of one inflated R serialisation, found by their CHARSXP headers."""
    lines: list[str] = []
    at = 0
    while at + 8 <= len(blob):
        is_header = blob[at] == 0 and blob[at + 1] in (0, 4) and blob[at + 3] == 9
        if is_header and (blob[at + 2] & 0x0F) in CHARSXP_ENCODINGS | {0}:
            length = int.from_bytes(blob[at + 4 : at + 8], "big")
            if length < MAX_LINE_BYTES and at + 8 + length <= len(blob):
                lines.append(blob[at + 8 : at + 8 + length].decode("utf-8", "replace"))
                at += 8 + length
                continue
        at += 1
    return lines


def austen_text(rdb: Path) -> str:
    """All novels as plain text; R stores each as a length-prefixed zlib stream of one string a line."""
    data = rdb.read_bytes()
    parts: list[str] = []
    at = 0
    while at + 4 < len(data):
        inflater = zlib.decompressobj()
        blob = inflater.decompress(data[at + 4 :])
        at = len(data) - len(inflater.unused_data)
        lines = blob_lines(blob)
        if len(lines) > 1000:  # the rest are R bookkeeping objects, not novels
            parts.append("\n".join(lines))
    return "\n\n".join(parts)


def bible_text(root: Path) -> str:
    """The King James text, one verse a line, verse numbers stripped."""
    result = subprocess.run(
        [str(root / "usr/bin/bible"), "-l200", "-p", str(root / "usr/lib")],
        input="gen1:1-rev22:21\nq\n",
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    return re.sub(r"(?m)^bible\(KJV\).*?> ?", "", result.stdout)


def clean_paragraphs(text: str) -> list[str]:
    """Paragraphs with inner newlines and runs of blanks turned into single spaces."""
    plain = text.translate(_PLAIN_PUNCTUATION)
    paragraphs = (re.sub(r"\s+", " ", part).strip() for part in re.split(r"\n\s*\n", plain))
    return [part for part in paragraphs if len(part) >= MIN_PARAGRAPH_CHARS]


def bible_paragraphs(text: str) -> list[str]:
    """Chapters, each in pieces of a few verses so that paragraph lengths resemble prose."""
    paragraphs: list[str] = []
    for chapter in re.split(r"\n\s*\n", text):
        verses = [m.group(1).strip() for m in re.finditer(r"(?m)^ *\d+ (.+)$", chapter)]
        for start in range(0, len(verses), 4):
            paragraphs.append(" ".join(verses[start : start + 4]))
    return [re.sub(r"\s+", " ", part) for part in paragraphs if len(part) >= MIN_PARAGRAPH_CHARS]


def split_held_out(paragraphs: list[str], fraction: float = HELD_OUT_FRACTION) -> Corpus:
    """Hold out every n-th block of ten paragraphs, so both sources are represented."""
    period = round(1 / fraction)
    train: list[str] = []
    held: list[str] = []
    for index, paragraph in enumerate(paragraphs):
        (held if (index // 10) % period == period - 1 else train).append(paragraph)
    return Corpus(tuple(train), tuple(held))


def load_corpus(cache: Path = DEFAULT_CACHE) -> Corpus:
    """Read the cleaned corpus, fetching the packages first if they are not in `cache`."""
    root = cache / "root"
    if not (root / AUSTEN_RDB).exists() or not (root / "usr/bin/bible").exists():
        fetch(cache)
    austen = clean_paragraphs(austen_text(root / AUSTEN_RDB))
    return split_held_out(austen + bible_paragraphs(bible_text(root)))


def main() -> None:
    """Fetch the corpus and print its size."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cache", type=Path, default=DEFAULT_CACHE)
    corpus = load_corpus(parser.parse_args().cache)
    for name, part in (("train", corpus.train), ("held out", corpus.held_out)):
        print(f"{name}: {len(part)} paragraphs, {sum(map(len, part))} characters")


if __name__ == "__main__":
    main()
