"""The 95 % interval covers the true median in 93 to 97 % of measurements, through the complete stop rule.

Durations are drawn instead of measured: stationary AR(1) noise of 1 % around a true median, with and without 1 % of
runs that take 30 % longer. Every measurement is fed run by run to the code that the worker uses. 1,000 measurements
have a deviation of 0.7 %; `make test-slow` takes 4,000, of all cases.


The interval of several processes holds the median of another one in 95 %, and that of all in more if they are
independent. How often it does if each resembles the one before by 0.9 is in docs/evidence.md.
"""

import sys
from statistics import NormalDist

import numpy as np
import pytest
from scipy.signal import lfilter
from simulations import counts, slow

from benchd.daemon.verdicts.statistics import STOP_RULES, Blocks, combine

JITTER = 0.01
SPIKE_SHARE = 0.01
SPIKE = 1.3
CHUNK = 400


def draw(rng, coefficient, spike_share, previous):
    """Return the next CHUNK durations of each measurement over the true median, given its last noise value."""
    innovations = np.sqrt(1 - coefficient**2) * rng.standard_normal((len(previous), CHUNK), dtype=np.float32)
    noise, _ = lfilter([1.0], [1.0, -coefficient], innovations, zi=coefficient * previous[:, None])
    spiked = rng.random(noise.shape, dtype=np.float32) < spike_share
    return np.where(spiked, SPIKE, 1.0) * (1 + JITTER * noise), noise[:, -1]


def feed(blocks, durations_ns, elapsed_ns):
    """Run the measuring loop over drawn durations; return the elapsed time, and whether it stopped."""
    for duration_ns in durations_ns:
        elapsed_ns += duration_ns
        if blocks.add(duration_ns) and blocks.stop_reason(elapsed_ns / 1e9):
            return elapsed_ns, True
    return elapsed_ns, False


def measurements(preset, run_ms, coefficient, spike_share, count):
    """Return the summaries of `count` complete measurements."""
    rng = np.random.default_rng(0)
    active = [(Blocks(STOP_RULES[preset]), 0.0) for _ in range(count)]
    previous = rng.standard_normal(count)
    summaries = []
    while active:
        ratios, previous = draw(rng, coefficient, spike_share, previous)
        going = []
        for number, (blocks, before_ns) in enumerate(active):
            elapsed_ns, stopped = feed(blocks, (run_ms * 1e6 * ratios[number]).tolist(), before_ns)
            if stopped:
                summaries.append(blocks.summary())
            else:
                going.append((number, (blocks, elapsed_ns)))
        previous = previous[[number for number, _ in going]]
        active = [measurement for _, measurement in going]
    return summaries


def true_median_ns(run_ms, spike_share):
    # A spike lies above any median, so that the median of all runs lies a little above that of those without one.
    return run_ms * 1e6 * (1 + JITTER * NormalDist().inv_cdf(0.5 / (1 - spike_share)))


def coverage(summaries, truth_ns):
    """Return the percentage of measurements whose interval holds the truth."""
    covered = [summary.interval_ns.low <= truth_ns <= summary.interval_ns.high for summary in summaries]
    return 100 * sum(covered) / len(covered)


def cases(*settings):
    return [(*setting, coefficient) for setting in settings for coefficient in (0.0, 0.5, 0.9)]


SHORT = cases(
    ("quick", 5, 0.0), ("quick", 5, SPIKE_SHARE), ("quick", 50, 0.0), ("quick", 50, SPIKE_SHARE), ("standard", 5, 0.0)
)
LONG = cases(("standard", 50, 0.0), ("standard", 50, SPIKE_SHARE), ("thorough", 50, SPIKE_SHARE))
COUNTS = {
    ("quick", 5, 0.0, 0.9): 1_000,  # near a bound, 96.6 %, as is 93.9 %
    ("quick", 50, SPIKE_SHARE, 0.9): 3_000,
    ("quick", 50, 0.0, 0.0): 500,
    ("standard", 5, 0.0, 0.5): 300,
}


@pytest.mark.parametrize(
    ("preset", "run_ms", "spike_share", "coefficient", "count"),
    [(*case, count) for case, count in COUNTS.items()] + [slow(*case, 4_000) for case in SHORT + LONG],
)
def test_the_interval_covers_the_true_median(preset, run_ms, spike_share, coefficient, count):
    summaries = measurements(preset, run_ms, coefficient, spike_share, count)
    assert len(summaries) == count
    assert 93 <= coverage(summaries, true_median_ns(run_ms, spike_share)) <= 97


def resembling(rng, count, processes, coefficient, apart):
    """Return the medians in ms of processes, around 5; between two of a case so many steps of the machine pass."""
    innovations = JITTER * np.sqrt(1 - coefficient**2) * rng.standard_normal((count, processes * apart))
    start = coefficient * JITTER * rng.standard_normal((count, 1))
    return 5.0 * np.exp(lfilter([1.0], [1.0, -coefficient], innovations, zi=start)[0][:, ::apart])


def covered(times_ms, truths_ms):
    intervals = [combine(row)[1] for row in times_ms.tolist()]
    return np.mean(
        [interval.low <= truth <= interval.high for interval, truth in zip(intervals, truths_ms, strict=True)]
    )


@pytest.mark.parametrize("processes", [slow(2), 3, slow(5), 7])
@counts(1_000, 8_000)
def test_the_interval_of_processes_holds_another_one(count, processes):
    rng = np.random.default_rng(processes)
    times_ms = resembling(rng, count, processes, 0.0, 1)
    assert 0.93 <= covered(times_ms, 5.0 * np.exp(JITTER * rng.standard_normal(count))) <= 0.97
    assert covered(times_ms, [5.0] * count) >= 0.96


@pytest.mark.parametrize(("apart", "least"), [(1, 0.72), slow(2, 0.85), slow(4, 0.92)])
@pytest.mark.parametrize("processes", [slow(3), slow(5), 7])
@counts(1_000, 20_000)
def test_in_rounds_it_holds_the_median_of_all_more_often(count, processes, apart, least):
    """With 1, 2 and 4 variants in a round, so many processes of the machine apart."""
    share = covered(resembling(np.random.default_rng(0), count, processes, 0.9, apart), [5.0] * count)
    sys.stdout.write(f"\n| {apart} | {processes} | {100 * share:.1f} % |")
    assert share >= least
