"""Verdicts on two arms: the effects against scipy, each answer at its bounds, looks, and Holm over a plan."""

import math

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from scipy import stats

from benchd.daemon.verdicts.effects import (
    LOOK_ALPHA,
    LOOKS,
    Effect,
    deciding_repeats,
    judge,
    judge_plan,
    look,
    paired_effect,
    runs_effect,
    welch_effect,
)

A = [10.0, 10.1, 9.95, 10.02, 10.07, 9.98, 10.03]
B = [10.2, 10.35, 10.1, 10.3, 10.2, 10.25, 10.15]
B_OVER_A = [b / a for a, b in zip(A, B, strict=True)]
arms = st.lists(st.floats(1.0, 100.0), min_size=3, max_size=20)


def of_one_day(first, second):
    """Return the effect from runs that are all of one day."""
    return runs_effect({"monday": first}, {"monday": second})


def of_days(first, second):
    """Return the effect from days, each a list of runs; those of A and of B are others."""
    sides = ({f"{name}{place}": day for place, day in enumerate(side)} for name, side in (("a", first), ("b", second)))
    return runs_effect(*sides)


def test_paired_effect_matches_scipy():
    effect = paired_effect(B_OVER_A)
    logs = [math.log(ratio) for ratio in B_OVER_A]
    low, high = stats.t.interval(0.95, len(A) - 1, sum(logs) / len(A), stats.sem(logs))
    interval = effect.interval(0.95)
    assert (interval.low, interval.high) == pytest.approx((math.expm1(low), math.expm1(high)), rel=1e-4)


@given(st.lists(st.tuples(st.floats(1.0, 100.0), st.floats(1.0, 100.0)), min_size=3, max_size=20))
def test_welch_effect_matches_scipy(pairs):
    first, second = zip(*pairs, strict=True)
    logs = [[math.log(value) for value in arm] for arm in (second, first)]
    assume(min(max(arm) - min(arm) for arm in logs) > 1e-3)
    effect = welch_effect(first, second)
    wanted = stats.ttest_ind(*logs, equal_var=False)
    assert effect.log_ratio / effect.error == pytest.approx(wanted.statistic, rel=1e-6, abs=1e-9)
    assert effect.degrees == pytest.approx(wanted.df, rel=1e-6)


@given(arms, arms)
def test_runs_of_one_process_are_compared_by_students_t(first, second):
    logs = [[math.log(value) for value in arm] for arm in (second, first)]
    assume(min(max(arm) - min(arm) for arm in logs) > 1e-3)
    effect = of_one_day([[value] for value in first], [[value] for value in second])
    wanted = stats.ttest_ind(*logs)
    assert effect.log_ratio / effect.error == pytest.approx(wanted.statistic, rel=1e-6, abs=1e-9)
    assert effect.degrees == wanted.df


def test_one_run_against_several_is_a_prediction_from_their_centres():
    runs = [[math.exp(centre - 0.01), math.exp(centre + 0.01)] for centre in (0.0, 0.02, 0.04)]
    effect = of_one_day(runs, [runs[1]])
    assert (effect.unit, effect.degrees) == ("runs", 2.0)
    assert effect.error == pytest.approx(0.02 * math.sqrt(1 + 1 / 3))
    assert effect.spread == pytest.approx(0.02 * math.sqrt(2))


@pytest.mark.parametrize("effect", [of_one_day([A], [A]), of_days([[A, A, A]], [[A, A, A]])], ids=["runs", "days"])
def test_what_one_day_does_not_show_is_assumed_and_said(effect):
    verdict = judge(effect)
    assert (verdict.answer, effect.is_assumed) == ("inconclusive", True)
    assert verdict.interval.high == pytest.approx(0.093, abs=0.003)
    assert verdict.reason == (
        "runs from a single day: the variation between days is unknown, so 3.2 % is assumed; "
        "measure each side on several days, or use benchd compare --live"
    )


def test_beyond_what_is_assumed_one_run_differs_from_another_and_the_reason_says_of_what():
    verdict = judge(of_one_day([A], [[1.12 * value for value in B]]))
    assert (verdict.answer, verdict.reason) == (
        "slower",
        "runs from a single day: the variation between days is unknown, so 3.2 % is assumed",
    )
    assert judge(of_one_day([A], [B])).answer == "inconclusive"
    assert judge(of_one_day([A, A, A], [A])).answer == "same"


def test_runs_of_one_day_count_once_against_those_of_another():
    """However many there are: what that day did to them is in all."""
    days = [[[math.exp(day + run)] for run in (-0.001, 0.0, 0.001)] for day in (0.0, 0.02, 0.04)]
    effect = of_days(days, [days[1]])
    assert (effect.unit, effect.degrees, effect.is_assumed) == ("days", 2.0, False)
    assert effect.error == pytest.approx(0.02 * math.sqrt(1 + 1 / 3))


def test_two_days_further_apart_than_assumed_are_believed():
    effect = of_days([[[1.0] * 3], [[1.3] * 3]], [[[1.15] * 3]])
    assert effect.is_assumed
    assert effect.error == pytest.approx(math.log(1.3) / math.sqrt(2) * math.sqrt(1.5), rel=1e-6)


def test_times_that_no_machine_measures_still_differ_by_a_number():
    slower, faster = welch_effect([1e-160] * 3, [1e160] * 3), welch_effect([1e160] * 3, [1e-160] * 3)
    for share in (slower.share, faster.share, slower.interval(0.95).high, faster.interval(0.95).low):
        assert -1.0 < share < math.inf
    assert [verdict.answer for verdict in judge_plan([slower, faster])] == ["slower", "faster"]


@pytest.mark.parametrize(
    ("effect", "repeats"),
    [
        (Effect(0.0, 0.02 / 15**0.5, 14.0, 0.02, "pairs"), 50),
        (Effect(0.02, 0.02 / 15**0.5, 14.0, 0.02, "pairs"), 16),
        (Effect(0.0, 0.2 / 15**0.5, 14.0, 0.2, "pairs"), None),
        (Effect(0.0, 0.01, 4.0, 0.015, "runs"), 37),
    ],
)
def test_what_would_decide_grows_with_the_spread(effect, repeats):
    assert deciding_repeats(effect) == repeats


@pytest.mark.parametrize(
    ("share", "error", "min_effect", "answer", "words"),
    [
        (0.0049, 0.0001, 0.005, "same", ""),
        (0.0051, 0.0001, 0.005, "slower", ""),
        (-0.0051, 0.0001, 0.005, "faster", ""),
        (0.02, 0.02, 0.005, "inconclusive", "neither a difference nor sameness"),
        (0.0095, 0.0005, 0.02, "same", ""),
        (0.019, 0.001, 0.02, "inconclusive", "below the smallest that counts here, 2 %"),
        (0.0003, 0.0074, 0.02, "same", ""),  # [-1.55, 1.61] %
        (0.0003, 0.0074, 0.005, "inconclusive", "nor sameness within 1 % is shown; about"),
        (0.0, 0.004, 0.005, "same", ""),
        (0.0, 0.006, 0.005, "inconclusive", "nor sameness within 1 % is shown; about"),
    ],
)
def test_each_answer_at_its_bound(share, error, min_effect, answer, words):
    verdict = judge(Effect(math.log1p(share), error, 14.0, error * 15**0.5, "pairs"), min_effect=min_effect)
    assert verdict.answer == answer
    assert words in verdict.reason


@pytest.mark.parametrize(
    ("first", "second"),
    [([5.0], [5.0]), ([5.0, 0.0, 5.0], [5.0] * 3), ([5.0, math.nan, 5.0], [5.0] * 3), ([], [])],
    ids=["one", "zero", "nan", "none"],
)
def test_no_effect_of_too_few_or_impossible_times(first, second):
    with pytest.raises(ValueError, match="needs at least"):
        welch_effect(first, second)
    with pytest.raises(ValueError, match="needs at least"):
        paired_effect(first)


def test_a_look_is_taken_after_7_11_and_15_pairs_and_the_last_one_ends():
    clear, noisy = [1.2, 1.21] * 8, [0.9, 1.1] * 8
    assert [pairs for pairs in range(1, 16) if look(clear[:pairs])] == [7, 11, 15]
    assert [pairs for pairs in LOOKS if look(noisy[:pairs])] == [15]
    assert look(B_OVER_A).confidence == 1 - LOOK_ALPHA
    assert look(B_OVER_A, comparisons=2).confidence == 1 - LOOK_ALPHA / 2


@given(st.lists(st.floats(-5.0, 5.0), min_size=1, max_size=12))
def test_a_plan_rejects_what_holm_rejects(scores):
    """Against the textbook: p-values in ascending order, each held against alpha over how many are left."""
    effects = [Effect(score / 100, 0.01, 8.0, 0.03, "pairs") for score in scores]
    p_values = sorted((2 * stats.t.sf(abs(score), 8.0), place) for place, score in enumerate(scores))
    rejected = set()
    for rank, (p, place) in enumerate(p_values):
        bound = 0.05 / (len(scores) - rank)
        assume(abs(p - bound) > 1e-6)
        if p > bound:
            break
        rejected.add(place)
    verdicts = judge_plan(effects, min_effect=0.0)
    assert {place for place, verdict in enumerate(verdicts) if verdict.answer in ("faster", "slower")} == rejected
