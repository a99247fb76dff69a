"""How often a verdict is wrong or right, through the complete rules: looks, runs and Holm, on simulated processes.

Each process has an offset of its own (0.3 %) and block medians that resemble their neighbours; its median is what the
code under test sees. The rates are those of docs/evidence.md; a bound of 5 % is held with two deviations more.
`make test` draws a tenth or fifth of the comparisons of the cases that a wrong rule fails first, `make test-slow` all.
"""

import sys
from itertools import chain

import numpy as np
import pytest
from records_made import PASSED, made, timing
from scipy.signal import lfilter
from simulations import counts, most, slow

from benchd.daemon.records import ProcessResult
from benchd.daemon.verdicts.compare import compare
from benchd.daemon.verdicts.effects import (
    LOOKS,
    deciding_repeats,
    judge,
    judge_plan,
    look,
    runs_effect,
    welch_effect,
)

OFFSET = 0.003
BLOCKS, BLOCK_NOISE, CORRELATION = 20, 0.004, 0.5  # 0.15 % between repetitions in one process
RESEMBLANCE = 0.4
MANY, FEWER = counts(500, 10_000), counts(200, 2_000)
SPREADS = (0.0, 0.003, 0.01, 0.03)
"""One deviation of what differs between runs: nothing, 0.3, 1 and 3 %."""

MARGINS = pytest.mark.parametrize("margin", [0.01, slow(0.02)])
"""Smallest effects that count and are the margin of SAME, which errs most where that is what differs."""


def process_medians(rng, shape, offset=OFFSET):
    """Return the medians in ms of so many processes around 5 ms."""
    innovations = rng.standard_normal((*shape, BLOCKS)) * np.sqrt(1 - CORRELATION**2)
    start = CORRELATION * rng.standard_normal((*shape, 1))
    blocks, _ = lfilter([1.0], [1.0, -CORRELATION], innovations, zi=start)
    return 5.0 * np.exp(offset * rng.standard_normal(shape) + BLOCK_NOISE * np.mean(blocks, axis=-1))


def ratios(first, second):
    """Return the ratio of each pair."""
    return [late / early for early, late in zip(first, second, strict=True)]


def live(first, second, **options):
    """Return the verdict that a live comparison ends with."""
    looks = (look(ratios(first[:pairs], second[:pairs]), **options) for pairs in LOOKS)
    return next(verdict for verdict in looks if verdict)


def live_answers(runs, effect, seed=0, offset=OFFSET, **options):
    medians = process_medians(np.random.default_rng(seed), (runs, 2, LOOKS[-1]), offset)
    medians[:, 1] *= 1 + effect
    return [live(first, second, **options).answer for first, second in medians.tolist()]


def share(answers, *wanted):
    return sum(answer in wanted for answer in answers) / len(answers)


@pytest.mark.parametrize("options", [slow({}), {"min_effect": 0.0}], ids=["defaults", "any effect counts"])
@MANY
def test_identical_code_is_rarely_called_different_in_a_live_comparison(count, options):
    answers = live_answers(count, 0.0, **options)
    assert share(answers, "faster", "slower") <= 0.05


def levels(rng, runs):
    """Return the medians in ms of processes in their order of time, each resembling the one before it."""
    innovations = rng.standard_normal((runs, 2 * LOOKS[-1])) * np.sqrt(1 - RESEMBLANCE**2)
    drift, _ = lfilter([1.0], [1.0, -RESEMBLANCE], innovations, zi=RESEMBLANCE * rng.standard_normal((runs, 1)))
    return 5.0 * np.exp(0.1 * drift)


def answers_by_order(runs, first_goes_first):
    """Return the answers on identical code whose first side goes first in the pairs that `first_goes_first` says."""
    pairs = levels(np.random.default_rng(6), runs).reshape(runs, -1, 2)
    ordered = np.where(first_goes_first[..., None], pairs, pairs[..., ::-1])
    return [live(first, second).answer for first, second in np.moveaxis(ordered, 2, 1).tolist()]


@MANY
def test_identical_code_is_rarely_called_different_where_processes_resemble_those_before_them(count):
    lots = np.random.default_rng(7).random((count, LOOKS[-1])) < 0.5
    assert share(answers_by_order(count, lots), "faster", "slower") <= most(0.05, count)


@MANY
def test_one_percent_is_found_with_seven_pairs_at_the_defaults(count):
    medians = process_medians(np.random.default_rng(1), (count, 2, 7))
    verdicts = [look(ratios(first, second)) for first, second in (medians * [[[1.0], [1.01]]]).tolist()]
    assert share([verdict and verdict.answer for verdict in verdicts], "slower") >= 0.95


@pytest.mark.parametrize("sign", [1, slow(-1)])
@pytest.mark.parametrize("offset", [0.003, slow(0.008), slow(0.012), 0.02])
@MARGINS
@FEWER
def test_a_change_that_counts_is_rarely_called_the_same_in_a_live_comparison(count, margin, offset, sign):
    """What differs between runs is common to both sides of a pair; what differs between processes is not."""
    answers = live_answers(count, sign * margin, seed=8, offset=offset, min_effect=margin)
    assert share(answers, "same") <= most(0.05, count)


def sides(rng, shape, between_runs, effect=0.0):
    """Return both sides of so many comparisons: `shape` is their number, the runs of A and of B, and the processes.

    Each run is of a day of its own.
    """
    count, runs_a, runs_b, processes = shape
    medians = process_medians(rng, (count, runs_a + runs_b, processes))
    medians *= np.exp(between_runs * rng.standard_normal((count, runs_a + runs_b, 1)))
    medians[:, runs_a:] *= 1 + effect
    days = [{f"{place}": [run] for place, run in enumerate(runs)} for runs in medians.tolist()]
    return [tuple(dict(part) for part in (list(day.items())[:runs_a], list(day.items())[runs_a:])) for day in days]


def compared(rng, days, runs, between_days, effect=0.0, between_runs=0.003):
    """Return the answer of `benchd compare` on records of so many days per side, each of so many runs."""
    logs = between_days * rng.standard_normal((sum(days), 1, 1)) + between_runs * rng.standard_normal((1, runs, 1))
    times = process_medians(rng, (sum(days), runs, 5)) * np.exp(logs)
    times[days[0] :] *= 1 + effect
    records = [
        [
            made(
                run_id=f"{day} {run}",
                suite_id=f"{day} {run}",
                t_wall=f"2026-01-{day + 1:02}T0{run}:00:00Z",
                check=PASSED,
                processes=[ProcessResult(status="ok", timing=timing(time_ms)) for time_ms in times[day, run].tolist()],
            )
            for run in range(runs)
        ]
        for day in range(sum(days))
    ]
    (comparison,) = compare(list(chain(*records[: days[0]])), list(chain(*records[days[0] :])), 0.005)
    return comparison.verdict.answer


@pytest.mark.parametrize("between_days", [0.01, slow(0.03)])
@pytest.mark.parametrize(
    ("days", "runs"), [slow((1, 1), 1), ((1, 1), 3), ((2, 1), 3), slow((3, 1), 1), slow((5, 5), 3)]
)
@counts(60, 2_000)
def test_identical_code_is_rarely_called_different_across_days(count, days, runs, between_days):
    """By the spread of its runs within a day, three runs a day 1 % apart would be called different in 37 to 71 %."""
    rng = np.random.default_rng(20)
    answers = [compared(rng, days, runs, between_days) for _ in range(count)]
    assert share(answers, "faster", "slower") <= most(0.05, count)


@pytest.mark.parametrize(("days", "runs", "found"), [((1, 1), 3, 0.9), ((5, 1), 1, 0.97), slow((5, 5), 3, 1.0)])
def test_ten_percent_is_found_across_days_one_percent_apart(days, runs, found):
    rng = np.random.default_rng(21)
    answers = [compared(rng, days, runs, 0.01, 0.12) for _ in range(100)]
    assert share(answers, "slower") >= found


def answers_in_files(shape, between_runs, effect=0.0, seed=5, **options):
    rng = np.random.default_rng(seed)
    return [judge(runs_effect(*pair), **options).answer for pair in sides(rng, shape, between_runs, effect)]


@pytest.mark.parametrize("runs", [(3, 1), slow((2, 2)), (3, 3), slow((10, 5))])
@pytest.mark.parametrize("between_runs", [slow(0.0), slow(0.003), 0.01, slow(0.03)])
@counts(120, 4_000)
def test_verdicts_on_files_rarely_err_however_far_runs_are_apart(count, runs, between_runs):
    """Both ways: identical code called different, and what is 1 or 2 % away called the same if that counts."""
    shape, draws = (count, *runs, 5), 5 * 4 * len(SPREADS)  # the rule errs in 5 %, and not below
    assert share(answers_in_files(shape, between_runs, min_effect=0.0), "faster", "slower") <= most(0.05, count, draws)
    for effect in (0.01, -0.01, 0.02, -0.02):
        answers = answers_in_files(shape, between_runs, effect, min_effect=abs(effect))
        assert share(answers, "same") <= most(0.05, count, draws)


@pytest.mark.parametrize("between_runs", [slow(0.0), slow(0.003), slow(0.01), 0.03])
@MANY
def test_one_run_per_side_of_identical_code_is_rarely_called_different(count, between_runs):
    assert share(answers_in_files((count, 1, 1, 5), between_runs), "faster", "slower") <= most(0.05, count)


@pytest.mark.parametrize("sizes", [slow((3, 3)), (3, 15), slow((5, 5)), slow((5, 7))])
@MANY
def test_three_processes_per_side_are_enough_for_welch(count, sizes):
    """Without the degrees of the smaller side, 3 against 15 err in 7 %."""
    medians = process_medians(np.random.default_rng(10), (count, sum(sizes))).tolist()
    intervals = [welch_effect(row[: sizes[0]], row[sizes[0] :]).interval(0.95) for row in medians]
    assert np.mean([not interval.low <= 0.0 <= interval.high for interval in intervals]) <= most(0.05, count)


@pytest.mark.parametrize("between_runs", [slow(0.0), 0.01])
@pytest.mark.parametrize("min_effect", [slow(0.005), 0.0])
@counts(25, 500)
def test_identical_code_stays_green_over_a_plan_of_thirty(count, min_effect, between_runs):
    rng, red = np.random.default_rng(3), 0
    for _ in range(count):
        effects = [runs_effect(*pair) for pair in sides(rng, (30, 3, 1, 5), between_runs)]
        red += any(verdict.answer == "slower" for verdict in judge_plan(effects, min_effect))
    assert red / count <= most(0.05, count)


def decided_by_as_many(shape, between_runs, effect, seed=12):
    """Return the share of inconclusive comparisons that as many runs per side as their reason names would settle."""
    rng, answers = np.random.default_rng(seed), []
    for pair in sides(rng, shape, between_runs, effect):
        measured_effect = runs_effect(*pair)
        repeats = deciding_repeats(measured_effect) if judge(measured_effect).answer == "inconclusive" else None
        if repeats:
            (again,) = sides(rng, (1, repeats, repeats, shape[-1]), between_runs, effect)
            answers.append(judge(runs_effect(*again)).answer)
    return 1.0 - share(answers, "inconclusive")


@pytest.mark.parametrize("effect", [0.0, slow(0.005), slow(0.02)])
@pytest.mark.parametrize("between_runs", [slow(0.003), 0.01])
def test_as_many_runs_as_an_inconclusive_verdict_names_decide_mostly(between_runs, effect):
    assert decided_by_as_many((80, 3, 1, 5), between_runs, effect) >= 0.7


def found(answers):
    return f"{share(answers, 'slower'):6.1%}"


@pytest.mark.slow
def test_power():
    """Print how often +1, +2 and +5 % are found: the table of docs/evidence.md (with -s)."""
    changes, rows = (0.01, 0.02, 0.05), []
    for offset in SPREADS[1:]:
        rows.append(f"live, processes {offset:.1%} apart:")
        rows[-1] += "".join(found(live_answers(2_000, change, offset=offset)) for change in changes)
    for runs in ((3, 1), (5, 1), (10, 1), (3, 3), (5, 5), (10, 10)):
        for apart in SPREADS:
            rows.append(f"files, {runs[0]:2} runs and {runs[1]:2}, {apart:.1%} apart:")
            rows[-1] += "".join(found(answers_in_files((2_000, *runs, 5), apart, change)) for change in changes)
    sys.stdout.write("\n" + "\n".join(rows) + "\n")
    assert len(rows) == 27
