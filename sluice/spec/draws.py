"""Uniform numbers that depend on what they are for, never on when or beside whom they are drawn.

A draw is a keyed hash of (seed, position, purpose): a counter-based generator, so a request gives
the same tokens alone, batched, aggregated or disaggregated. Speculation stays lossless although a
rejected position is drawn again with the same key: the tokens before a position depend on draws at
earlier positions only, so a draw that was used for a discarded proposal says nothing about the
prefix that the position finally continues.
"""

from __future__ import annotations

import hashlib
import struct
from enum import IntEnum

_KEY = struct.Struct("<QQI")
_SCALE = 2.0**-53
_MASK_64 = (1 << 64) - 1


class Purpose(IntEnum):
    """What a draw decides about the token at its position."""

    TARGET = 0  # sampled from the target's distribution: first, plain and bonus tokens
    DRAFT = 1  # proposed from the draft's distribution
    ACCEPT = 2  # whether a proposal is taken
    RESIDUAL = 3  # what replaces a rejected proposal


def uniform(seed: int, position: int, purpose: Purpose) -> float:
    """A float64 in [0, 1) with 53 random bits."""
    key = _KEY.pack(seed & _MASK_64, position, purpose)
    digest = hashlib.blake2b(key, digest_size=8).digest()
    return (int.from_bytes(digest, "little") >> 11) * _SCALE
