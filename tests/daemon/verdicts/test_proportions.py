"""Intervals of shares: against published figures and scipy, and held to their coverage by counting all outcomes."""

import math

import numpy as np
import pytest
from scipy import stats

from benchd.daemon.verdicts.proportions import items_needed, paired_difference, wilson

RATES = (0.001, 0.003, 0.01, 0.02, 0.05, 0.1, 0.3)


@pytest.mark.parametrize(("successes", "trials"), [(0, 1), (0, 360), (81, 263), (359, 360), (50_000, 50_000)])
def test_wilson_is_scipys(successes, trials):
    want = stats.binomtest(successes, trials).proportion_ci(0.95, method="wilson")
    interval = wilson(successes, trials)
    assert (interval.low, interval.high) == (pytest.approx(want.low, abs=1e-12), pytest.approx(want.high, abs=1e-12))


def test_the_paired_difference_is_as_published():
    """M. W. Fagerland et al., Statistics in Medicine 33, 2014: airway hyper-responsiveness, 1 and 7 of 21 turned."""
    interval = paired_difference(1, 7, 21)
    assert (round(interval.low, 3), round(interval.high, 3)) == (-0.517, -0.026)


@pytest.mark.parametrize(("gained", "lost", "items"), [(0, 0, 360), (0, 3, 50), (4, 2, 30), (30, 0, 30), (0, 30, 30)])
def test_both_ends_have_the_score_that_was_asked_for(gained, lost, items):
    """Against the restricted likelihood, maximised by search in place of Tango's formula."""
    interval = paired_difference(gained, lost, items)
    for end in (interval.low, interval.high):
        if abs(end) > 1 - 1e-6:
            continue
        rates = np.linspace(max(0.0, -end), (1 - end) / 2, 400_001)[1:-1]  # of what only the second one has
        likelihood = stats.multinomial.logpmf(
            [gained, lost, items - gained - lost], items, np.stack([rates + end, rates, 1 - 2 * rates - end], axis=1)
        )
        rate = rates[np.argmax(likelihood)]
        score = (gained - lost - items * end) / math.sqrt(items * (2 * rate + end - end * end))
        assert abs(score) == pytest.approx(1.96, abs=2e-3)


@pytest.mark.parametrize("items", [30, 100])
def test_the_paired_interval_covers_as_often_as_it_says(items):
    """Every outcome of a trinomial draw, weighed by its probability: no sampling."""
    outcomes = [(first, second) for first in range(items + 1) for second in range(items + 1 - first)]
    intervals = [paired_difference(*outcome, items) for outcome in outcomes]
    first, second = np.array(outcomes).T
    low, high = np.array([[interval.low, interval.high] for interval in intervals]).T
    covered = []
    for p in RATES:
        for q in RATES:
            weights = stats.multinomial.pmf(
                np.stack([first, second, items - first - second], axis=1), items, [p, q, 1 - p - q]
            )
            covered.append(float(weights[(low <= p - q) & (p - q <= high)].sum()))
    assert min(covered) > 0.93
    assert 0.95 < np.mean(covered) < 0.98


@pytest.mark.parametrize(("lost", "gained", "items"), [(0, 0, 100), (3, 1, 360), (2, 5, 200), (1, 4, 5)])
def test_as_many_items_as_are_needed_and_not_one_fewer(lost, gained, items):
    needed = items_needed(lost, gained, items, 0.01)
    rates = lost / items, gained / items
    assert paired_difference(rates[0] * needed, rates[1] * needed, needed).high < 0.01
    fewer = needed - 1
    assert paired_difference(rates[0] * fewer, rates[1] * fewer, fewer).high >= 0.01


def test_no_number_of_items_shows_a_drop_to_be_below_itself():
    assert items_needed(5, 1, 100, 0.04) is None
    assert items_needed(50, 1, 100, 0.04) is None
