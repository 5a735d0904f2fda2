"""Keyed draws: reproducible, distinct by key, uniform."""

from __future__ import annotations

import numpy as np
from scipy.stats import kstest

from sluice.spec.draws import Purpose, uniform


def test_a_draw_depends_on_every_part_of_its_key_and_on_nothing_else() -> None:
    keys = [(s, p, u) for s in (0, 1, -1, 2**63) for p in (0, 1, 2**33) for u in Purpose]
    first = [uniform(*key) for key in keys]
    assert first == [uniform(*key) for key in reversed(keys)][::-1]
    assert len(set(first)) == len(keys)


def test_draws_are_uniform_over_seeds_and_over_positions() -> None:
    by_seed = np.array([uniform(seed, 7, Purpose.DRAFT) for seed in range(4000)])
    by_position = np.array([uniform(3, position, Purpose.ACCEPT) for position in range(4000)])
    for sample in (by_seed, by_position):
        assert 0.0 <= sample.min()
        assert sample.max() < 1.0
        assert kstest(sample, "uniform").pvalue > 1e-3
    assert abs(np.corrcoef(by_seed, by_position)[0, 1]) < 0.06
