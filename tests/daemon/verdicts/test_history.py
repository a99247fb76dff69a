"""Shifts in a series of medians: found where they are, and hardly ever where there is none."""

import sys

import numpy as np
import pytest
from scipy.signal import lfilter
from simulations import most, slow

from benchd.daemon.verdicts.history import shifts


def series(*levels, noise=0.005, seed=0):
    """Return runs around each (level, how many)."""
    rng = np.random.default_rng(seed)
    return [float(level * np.exp(noise * rng.standard_normal())) for level, count in levels for _ in range(count)]


def test_each_new_level_is_found_at_its_first_run():
    assert shifts(series((5.0, 20), (5.2, 15), (4.9, 25))) == [20, 35]


@pytest.mark.parametrize(
    "medians_ms",
    [[], [5.0], [5.0] * 3 + [6.0] * 3, [5.0] * 50, [5.0] * 20 + [5.01] * 20],
    ids=["none", "one", "too few", "level", "below the least effect"],
)
def test_no_step_where_there_is_none(medians_ms):
    assert shifts(medians_ms) == []


def unchanged(rng, count, runs, correlation, noise=0.01):
    """Return so many series of runs of one level, each run resembling the one before it."""
    innovations = noise * rng.standard_normal((count, runs)) * np.sqrt(1 - correlation**2)
    start = correlation * noise * rng.standard_normal((count, 1))
    return 5.0 * np.exp(lfilter([1.0], [1.0, -correlation], innovations, zi=start)[0])


@pytest.mark.parametrize("correlation", [0.0, slow(0.3), slow(0.6), 0.9])
@pytest.mark.parametrize(
    ("runs", "count"), [(20, 500), (60, 300), slow(8, 2_000), slow(20, 2_000), slow(60, 1_000), slow(200, 300)]
)
def test_noise_alone_is_rarely_called_a_step_however_correlated(runs, count, correlation):
    """5 %, and two deviations more."""
    series = unchanged(np.random.default_rng(runs), count, runs, correlation).tolist()
    assert np.mean([bool(shifts(row)) for row in series]) <= most(0.05, count)


@pytest.mark.parametrize(("runs", "found"), [(20, 0.85), (60, 0.98), slow(200, 0.98)])
def test_a_step_of_five_percent_in_noise_of_one_is_found(runs, found):
    series = unchanged(np.random.default_rng(0), 300, runs, 0.0)
    series[:, runs // 2 :] *= 1.05
    places = [shifts(row) for row in series.tolist()]
    assert np.mean([len(of_one) == 1 and abs(of_one[0] - runs // 2) <= 1 for of_one in places]) >= found


@pytest.mark.slow
@pytest.mark.parametrize("runs", [20, 60, 200])
def test_rates_of_the_documentation(runs):
    """Print a row of docs/evidence.md, with -s."""
    count, rng = 4_000, np.random.default_rng(1)
    for correlation in (0.0, 0.3, 0.6, 0.9):
        series = unchanged(rng, count, runs, correlation)
        false = np.mean([bool(shifts(row)) for row in series.tolist()])
        sys.stdout.write(f"\n{runs} runs, correlation {correlation}: {100 * false:.1f} % false; found of 1, 2, 3, 5 %:")
        assert false <= 0.05
        for step in (0.01, 0.02, 0.03, 0.05):
            stepped = np.concatenate([series[:500, : runs // 2], series[:500, runs // 2 :] * (1 + step)], axis=1)
            sys.stdout.write(f" {100 * np.mean([bool(shifts(row)) for row in stepped.tolist()]):.0f}")


def test_a_drift_is_no_staircase():
    series = unchanged(np.random.default_rng(3), 1, 3_000, 0.9)[0]
    assert shifts(series.tolist()) == []


def test_a_time_of_zero_is_passed_over():
    medians = series((5.0, 20), (5.2, 15))
    assert shifts([0.0, *medians[:10], 0.0, *medians[10:]]) == [22]
