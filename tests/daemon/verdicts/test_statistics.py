"""Medians, intervals, percentiles, outliers, steadiness, blocks and the stop rule, against numpy and scipy."""

import math
import random

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from benchd.daemon.verdicts.statistics import (
    STOP_RULES,
    Blocks,
    BlockSummary,
    Interval,
    StopRule,
    backed_percentile,
    block_estimate,
    combine,
    mean_interval,
    median_interval,
    minimum_samples,
    percentile,
    percentile_upper_bound,
    steady,
    student_t_quantile,
    tukey_outliers,
)

durations = st.floats(1e3, 1e9)
samples = st.lists(durations, min_size=2, max_size=60)
one_run_blocks = StopRule(min_blocks=20, min_block_runs=1, min_block_s=0.0, cap_s=10.0, half_width=0.01)


def noise(count, coefficient, seed=0):
    """Return AR(1) durations in ns around 5 ms with 1 % jitter."""
    rng = random.Random(seed)
    value, values = rng.gauss(0, 1), []
    for _ in range(count):
        value = coefficient * value + math.sqrt(1 - coefficient**2) * rng.gauss(0, 1)
        values.append(5e6 * (1 + 0.01 * value))
    return values


def fed(rule, values_ns):
    """Return the blocks after a loop that asks at each block's end, and the reason it stopped for."""
    blocks, elapsed_ns = Blocks(rule), 0.0
    for value in values_ns:
        elapsed_ns += value
        if blocks.add(value) and (reason := blocks.stop_reason(elapsed_ns / 1e9)):
            return blocks, reason
    return blocks, None


@pytest.mark.parametrize("p", [0.95, 0.975, 0.989, 0.995, 0.9995])
def test_t_quantile_matches_scipy(p):
    for degrees in range(1, 201):
        tolerance = 1e-10 if degrees <= 2 else 1e-5  # exact, but scipy itself is 2e-11 off before 1.16
        assert student_t_quantile(p, degrees) == pytest.approx(stats.t.ppf(p, degrees), rel=tolerance)
        assert student_t_quantile(1 - p, degrees) == pytest.approx(-student_t_quantile(p, degrees), rel=1e-9)


@given(samples, st.randoms(use_true_random=False))
def test_percentiles_ignore_the_order(values, rng):
    shuffled = rng.sample(values, len(values))
    for q in (1, 50, 90, 99.9):
        assert percentile(sorted(shuffled), q) == pytest.approx(np.percentile(values, q), rel=1e-9)


def test_the_interval_of_a_time_never_reaches_0():
    """One block of ten is ten times as long: the mean 19 of [10] * 9 + [100] has the half-width 20.4."""
    centre, interval = block_estimate([10.0] * 9 + [100.0])
    logs = [math.log(10.0)] * 9 + [math.log(100.0)]
    low, high = stats.t.interval(0.95, 9, np.mean(logs), stats.sem(logs))
    assert centre == pytest.approx(math.exp(np.mean(logs)))
    assert (interval.low, interval.high) == (pytest.approx(math.exp(low)), pytest.approx(math.exp(high)))
    summary = fed(StopRule(5, 1, 0.0, 1.0, None), [1e6, 1e6, 1e6, 1e6, 5e6])[0].summary()
    assert 0.0 < summary.interval_ns.low < summary.median_ns < summary.interval_ns.high
    assert block_estimate([0.0, 10.0]) == (5.0, None)
    assert block_estimate([9.0, 10.0, 11.0]) == (10.0, mean_interval([9.0, 10.0, 11.0]))


@pytest.mark.parametrize(("q", "count"), [(90, 64), (99, 662), (99.9, 6636)])
def test_minimum_samples_is_the_smallest_that_backs(q, count):
    assert minimum_samples(q) == count
    assert stats.binom.cdf(1, count, 1 - q / 100) <= 0.01 < stats.binom.cdf(1, count - 1, 1 - q / 100)


def test_a_percentile_needs_its_samples():
    values = sorted(noise(662, 0.0))
    assert backed_percentile(values, 99) == percentile(values, 99)
    assert backed_percentile(values[1:], 99) is None


@pytest.mark.parametrize(("q", "count"), [(50, 200), (90, 64), (90, 500), (99, 662), (99, 5000)])
def test_the_upper_bound_is_the_smallest_that_holds(q, count):
    """With the values 0..count-1 the bound says how many values lie above it."""
    above = count - 1 - int(percentile_upper_bound(range(count), q))
    assert stats.binom.cdf(above, count, 1 - q / 100) <= 0.01 < stats.binom.cdf(above + 1, count, 1 - q / 100)


def test_outliers_are_counted_by_distance():
    values = [*range(1, 10), 17.0, 40.0, -30.0]
    low, high = np.percentile(values, [25, 75])
    excess = np.maximum(low - np.array(values), np.array(values) - high) / (high - low)
    assert tukey_outliers(values) == (((excess > 1.5) & (excess <= 3)).sum(), (excess > 3).sum()) == (1, 2)
    assert tukey_outliers([]) == (0, 0)


@given(st.floats(-0.02, 0.02), st.integers(10, 30))
def test_drift_is_the_share_over_the_last_ten_blocks(share, count):
    blocks = [(1e6 * (1 + share * i / 9), 0.1 * i) for i in range(-(count - 10), 10)]
    settled, drift = steady(blocks)
    middle = 1 + share / 2
    assert drift == pytest.approx(share / middle, abs=1e-9)
    assert settled == (abs(drift) < 0.005)


def test_noise_is_no_drift_and_a_drift_within_noise_is_one():
    noisy = [1.00, 0.99, 1.02, 1.01, 0.98, 1.01, 1.02, 1.00, 1.00, 1.015]
    settled, share = steady([(1e6 * value, 0.1 * i) for i, value in enumerate(noisy)])
    assert settled
    assert abs(share) > 0.005
    falling = [(1e6 * (value - 0.01 * i), 0.1 * i) for i, value in enumerate(noisy)]
    assert not steady(falling)[0]
    # a larger drift that as much noise hides is not taken for none
    hidden = [(1e6 * (1 + 4 * (value - 1) + 0.002 * i), 0.1 * i) for i, value in enumerate(noisy)]
    assert not steady(hidden)[0]


@pytest.mark.parametrize("preset", ["quick", "standard", "thorough"])
def test_presets_end_on_quiet_runs(preset):
    rule = STOP_RULES[preset]
    blocks, reason = fed(rule, noise(20_000, 0.0))
    summary = blocks.summary()
    assert reason == summary.stop_reason == ("cap" if rule.half_width is None else "half_width")
    assert summary.converged == (rule.half_width is not None)
    assert summary.count >= rule.min_blocks
    assert summary.runs_per_block * 5.5e6 >= rule.min_block_s * 1e9


def test_correlated_runs_are_merged_until_they_are_not():
    rule = msgspec.structs.replace(one_run_blocks, half_width=0.0015, cap_s=45.0)
    summary = fed(rule, noise(9500, 0.9))[0].summary()
    assert summary.doublings >= 3
    assert summary.runs_per_block >= 1 << summary.doublings
    assert summary.converged
    assert abs(summary.lag1) < 0.3


def test_equal_runs_converge_at_once():
    summary = fed(one_run_blocks, [5e6] * 100)[0].summary()
    assert (summary.count, summary.half_width, summary.lag1, summary.doublings) == (20, 0.0, None, 0)
    assert summary.interval_ns == Interval(5e6, 5e6)


@given(st.lists(durations, min_size=1, max_size=200), st.integers(1, 7))
def test_blocks_keep_every_value_and_report_json(values, block_runs):
    rule = StopRule(5, block_runs, 0.0, 0.0, None)
    blocks = Blocks(rule)
    ended = [blocks.add(value) for value in values]
    assert ended == [(i + 1) % block_runs == 0 for i in range(len(values))]
    assert blocks.stop_reason(1.0) == "cap"
    summary = blocks.summary()
    assert list(blocks.values_ns) == values
    assert summary.runs == len(values) >= summary.count * summary.runs_per_block
    assert msgspec.json.decode(msgspec.json.encode(summary), type=BlockSummary) == summary


@given(st.integers(41, 400))
def test_merged_medians_are_those_of_the_raw_values(count):
    """A straight line is as correlated as can be; the last block takes the rest."""
    blocks = Blocks(StopRule(20, 1, 0.0, 0.0, None))
    for value in range(1, count + 1):
        blocks.add(value)
    blocks.stop_reason(1.0)
    summary = blocks.summary()
    width = 2**summary.doublings
    starts = range(0, summary.count * width, width)
    ends = [*starts[1:], count]
    assert summary.count >= 20
    assert summary.block_medians_ns == [np.median(range(a + 1, b + 1)) for a, b in zip(starts, ends, strict=True)]


def test_processes_combine_on_logarithms_to_where_another_one_lies():
    medians = [10.0, 10.3, 9.9]
    centre, interval = combine(medians)
    spread = stats.sem(np.log(medians)) * 2.0  # of another one: sqrt(1 + 1/3) deviations, not sqrt(1/3)
    low, high = stats.t.interval(0.95, 2, np.mean(np.log(medians)), spread)
    assert centre == pytest.approx(stats.gmean(medians))
    assert (interval.low, interval.high) == (pytest.approx(math.exp(low)), pytest.approx(math.exp(high)))


@pytest.mark.parametrize("medians", [[0.016, 4.2], [1.0, 1.15], [1.0, 3.0, 1.0], [1.0, 50.0] * 8])
def test_processes_too_few_for_their_spread_have_no_interval(medians):
    assert combine(medians) == (pytest.approx(stats.gmean(medians)), None)


def test_the_interval_of_a_median_leaves_out_ranks_as_the_binomial_allows():
    """Its ranks for 6, 9 and 20 values are those of the tables of the sign test at 5 %."""
    assert median_interval([1.0] * 5) is None
    ranks = {count: median_interval([float(rank) for rank in range(count, 0, -1)]) for count in (6, 9, 20)}
    assert ranks == {6: Interval(1.0, 6.0), 9: Interval(2.0, 8.0), 20: Interval(6.0, 15.0)}
