"""Two levels among processes and within one are named, one level is not, and how often an interval fails unnamed."""

import numpy as np
import pytest
from records_made import blocks, made, timing
from simulations import slow
from test_statistics_coverage import feed

from benchd.daemon.records import Level, ProcessResult
from benchd.daemon.reporting.console import levels_note
from benchd.daemon.verdicts import timings
from benchd.daemon.verdicts.statistics import STOP_RULES, Blocks

SETS = 1_500


@pytest.mark.parametrize(
    ("times_ms", "wanted"),
    [
        ([86, 87, 176, 86, 86.5], [(86.4, 0.8), (176, 0.2)]),
        ([10, 13, 10.05, 13.02], [(10.02, 0.5), (13.01, 0.5)]),
        ([10, 10.01, 13], [(10.0, 2 / 3), (13, 1 / 3)]),
        ([10, 10.1, 10.3, 10.2, 10.25], []),
        ([10, 10.01, 10.1, 10.11, 10.0], []),  # clear, but a percent
        ([10, 13], []),
        ([10, 10, 10], []),
        ([10.0] * 100 + [13.0], []),  # a spike
    ],
)
def test_levels_are_found_where_times_jump(times_ms, wanted):
    levels = timings.two_levels(times_ms)
    assert [(pytest.approx(level.ms, rel=5e-3), pytest.approx(level.share)) for level in levels] == wanted


@pytest.mark.parametrize("processes", [3, slow(4), 5, slow(7), 10, slow(15), slow(100)])
@pytest.mark.parametrize("spread", [slow(0.01), 0.05])
def test_equal_processes_have_one_level(processes, spread):
    rng = np.random.default_rng(processes)
    times = np.exp(spread * rng.standard_normal((SETS, processes)))
    false = np.mean([bool(timings.two_levels(row)) for row in times.tolist()])
    assert false <= (0.06 if processes == 3 else 0.013)


def dwelling(rng, count, runs, gap, dwell_runs):
    """Return the durations of measurements that jump between two levels, each kept for `dwell_runs` on average."""
    jumps = rng.random((count, runs)) < 1.0 / dwell_runs
    jumps[:, 0] = rng.random(count) < 0.5
    slow = np.logical_xor.accumulate(jumps, axis=1)
    return (1.0 + gap * slow) * (1.0 + 0.01 * rng.standard_normal((count, runs)))


def summary(ratios, run_ms=20.0):
    blocks = Blocks(STOP_RULES["quick"])
    feed(blocks, (1e6 * run_ms * ratios).tolist(), 0.0)
    return blocks.summary()


def test_a_process_that_jumps_between_levels_is_named_if_it_met_both():
    rng = np.random.default_rng(0)
    for ratios in dwelling(rng, 100, 330, 0.3, 50):
        levels = timings.two_levels(summary(ratios).pieces_ns)
        met_both = 0.1 < np.mean(ratios[:200] > 1.15) < 0.9
        assert not met_both or len(levels) == 2


@pytest.mark.parametrize(("coefficient", "fewest", "most"), [(0.0, 0.0, 0.03), (0.5, 0.0, 0.05), (0.99, 0.98, 1.0)])
def test_blocks_that_depend_on_one_another_are_named(coefficient, fewest, most):
    rng = np.random.default_rng(3)
    noise = rng.standard_normal((200, 330))
    for run in range(1, 330):
        noise[:, run] = coefficient * noise[:, run - 1] + np.sqrt(1 - coefficient**2) * noise[:, run]
    named = np.mean([summary(ratios).is_correlated for ratios in 1.0 + 0.01 * noise])
    assert fewest <= named <= most


def test_the_words_are_of_the_processes_or_else_of_the_runs_of_one():
    jumping = [ProcessResult(status="ok", timing=timing(value)) for value in (86.0, 87.0, 176.0, 86.0, 86.5)]
    note = levels_note(made(processes=jumping))
    assert (
        "jumps between 86.37 ms (80 % of the processes) and 176 ms (20 % of the processes): the cause is not known"
        in note
    )
    assert levels_note(made(processes=[ProcessResult(status="ok", timing=timing(10.0))])) is None
    jumping = blocks([10.0] * 5, levels=[Level(10.0, 0.75), Level(13.0, 0.25)])
    note = levels_note(
        made(processes=[ProcessResult(status="ok", timing=timing(10.0), blocks=jumping)], flags=["busy_machine"])
    )
    assert "10 ms (75 % of the time of a process) and 13 ms (25 % of the time of a process): busy machine;" in note
