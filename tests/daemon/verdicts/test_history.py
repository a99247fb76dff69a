"""Shifts in a series of medians: found where they are, and hardly ever where there is none."""

import numpy as np
import pytest

from benchd.daemon.verdicts.history import shifts


def series(*levels, noise=0.005, seed=0):
    """Return runs around each (level, how many)."""
    rng = np.random.default_rng(seed)
    return [float(level * np.exp(noise * rng.standard_normal())) for level, count in levels for _ in range(count)]


def test_each_new_level_is_found_at_its_first_run():
    assert shifts(series((5.0, 20), (5.2, 15), (4.9, 25))) == [20, 35]


def test_a_clear_step_without_noise_is_found():
    assert shifts([5.0] * 4 + [6.0] * 4) == [4]


@pytest.mark.parametrize(
    "medians_ms",
    [[], [5.0], [5.0] * 3 + [6.0] * 3, [5.0] * 50, [5.0] * 20 + [5.01] * 20],
    ids=["none", "one", "too few", "level", "below the least effect"],
)
def test_no_step_where_there_is_none(medians_ms):
    assert shifts(medians_ms) == []


@pytest.mark.parametrize("runs", [8, 20, 100])
def test_noise_alone_is_rarely_called_a_step(runs):
    found = [bool(shifts(series((5.0, runs), noise=0.02, seed=seed))) for seed in range(4_000)]
    assert np.mean(found) <= 0.05 + 2 * 0.0034  # with 8 runs it is one t test at 5 %


def test_one_outlier_is_no_new_level():
    medians = series((5.0, 40))
    medians[20] = 9.0
    assert shifts(medians) == []


def test_a_time_of_zero_is_passed_over():
    medians = series((5.0, 20), (5.2, 15))
    assert shifts([0.0, *medians[:10], 0.0, *medians[10:]]) == [22]
