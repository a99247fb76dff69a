"""How often a verdict is wrong, through the complete rules: looks, floors, runs and Holm, on simulated processes.

Each process has an offset of its own (0.3 %) and block medians that resemble their neighbours; its median is what the
code under test sees. The rates are those of docs/measuring.md.
"""

import numpy as np
import pytest
from scipy.signal import lfilter

from benchd.daemon.verdicts.effects import LOOKS, further_run, judge, judge_plan, look, paired_effect, welch_effect

OFFSET = 0.003
BLOCKS, BLOCK_NOISE, CORRELATION = 20, 0.004, 0.5  # 0.15 % between repetitions in one process
RESEMBLANCE = 0.4
RUNS = 10_000


def process_medians(rng, shape, offset=OFFSET):
    """Return the medians in ms of so many processes around 5 ms."""
    innovations = rng.standard_normal((*shape, BLOCKS)) * np.sqrt(1 - CORRELATION**2)
    start = CORRELATION * rng.standard_normal((*shape, 1))
    blocks, _ = lfilter([1.0], [1.0, -CORRELATION], innovations, zi=start)
    return 5.0 * np.exp(offset * rng.standard_normal(shape) + BLOCK_NOISE * np.mean(blocks, axis=-1))


def live(first, second, **options):
    """Return the verdict that a live comparison ends with."""
    looks = (look(first[:pairs], second[:pairs], **options) for pairs in LOOKS)
    return next(verdict for verdict in looks if verdict)


def live_answers(runs, effect, seed=0, offset=OFFSET, **options):
    medians = process_medians(np.random.default_rng(seed), (runs, 2, LOOKS[-1]), offset)
    medians[:, 1] *= 1 + effect
    return [live(first, second, **options).answer for first, second in medians.tolist()]


def share(answers, *wanted):
    return sum(answer in wanted for answer in answers) / len(answers)


@pytest.mark.parametrize("options", [{}, {"min_effect": 0.0}], ids=["defaults", "any effect counts"])
def test_identical_code_is_rarely_called_different_in_a_live_comparison(options):
    answers = live_answers(RUNS, 0.0, **options)
    assert share(answers, "faster", "slower") <= 0.05


def test_neither_is_it_where_no_look_ends_early():
    """With processes 2 % apart nearly all comparisons take all three looks: 4.9 % in the limit, here two deviations."""
    answers = live_answers(RUNS, 0.0, offset=0.02)
    assert share(answers, "inconclusive") > 0.9
    assert share(answers, "faster", "slower") <= 0.049 + 2 * 0.0022


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


def test_identical_code_is_rarely_called_different_where_processes_resemble_those_before_them():
    lots = np.random.default_rng(7).random((RUNS, LOOKS[-1])) < 0.5
    assert share(answers_by_order(RUNS, lots), "faster", "slower") <= 0.05 + 2 * 0.0022


def test_in_a_fixed_order_it_would_be():
    """Noise of two that follow each other and those of the next pair has the same sign in each A B B A."""
    abba = np.arange(LOOKS[-1]) % 2 == 0
    assert share(answers_by_order(RUNS, abba), "faster", "slower") > 0.07


def test_identical_code_is_mostly_called_the_same_in_a_live_comparison():
    assert share(live_answers(1_000, 0.0), "same") > 0.95


def test_what_is_two_percent_slower_is_never_called_the_same():
    answers = live_answers(1_000, 0.02)
    assert share(answers, "slower") > 0.99
    assert share(answers, "same", "faster") == 0.0


def test_one_percent_is_found_with_seven_pairs_at_the_defaults():
    medians = process_medians(np.random.default_rng(1), (RUNS, 2, 7))
    verdicts = [look(first, second) for first, second in (medians * [[[1.0], [1.01]]]).tolist()]
    assert share([verdict and verdict.answer for verdict in verdicts], "slower") >= 0.95


def test_half_a_percent_is_found_with_ten_pairs_where_any_effect_counts():
    medians = process_medians(np.random.default_rng(2), (RUNS, 2, 10)) * [[[1.0], [1.005]]]
    answers = [judge(paired_effect(a, b), min_effect=0.0).answer for a, b in medians.tolist()]
    assert share(answers, "slower") >= 0.80


@pytest.mark.parametrize("min_effect", [0.005, 0.0])
def test_identical_code_stays_green_over_a_plan_of_thirty(min_effect):
    rng, red = np.random.default_rng(3), 0
    for _ in range(RUNS):
        arms = process_medians(rng, (30, 2, 5)).tolist()
        verdicts = judge_plan([welch_effect(first, second) for first, second in arms], min_effect)
        red += any(verdict.answer == "slower" for verdict in verdicts)
    assert red / RUNS <= 0.05


def test_without_the_correction_a_plan_of_thirty_would_not_stay_green():
    """The noise is what makes Holm necessary."""
    arms = process_medians(np.random.default_rng(3), (100, 30, 2, 5)).tolist()
    red = [any(judge(welch_effect(a, b), min_effect=0.0).answer == "slower" for a, b in plan) for plan in arms]
    assert np.mean(red) > 0.3


def test_a_slow_case_among_thirty_is_found():
    rng, found = np.random.default_rng(4), 0
    for _ in range(100):
        arms = process_medians(rng, (30, 2, 9))
        arms[7, 1] *= 1.03
        verdicts = judge_plan([welch_effect(first, second) for first, second in arms.tolist()])
        found += verdicts[7].answer == "slower"
    assert found >= 95


def answers_against_three_runs(runs, effect, between_runs, *, seed=5, bounded=True):
    """Return the answers on one run of 5 processes against three, all runs apart by `between_runs` (1 deviation)."""
    rng = np.random.default_rng(seed)
    medians = process_medians(rng, (runs, 4, 5)) * np.exp(between_runs * rng.standard_normal((runs, 4, 1)))
    medians[:, 3] *= 1 + effect
    effects = [
        welch_effect([ms for run in before for ms in run], after, further_run(before) if bounded else 0.0)
        for *before, after in medians.tolist()
    ]
    return [judge(effect).answer for effect in effects]


@pytest.mark.parametrize("between_runs", [0.0, 0.003, 0.005, 0.02])
def test_identical_code_is_rarely_called_different_where_runs_differ(between_runs):
    """5 % in the limit, here two deviations more."""
    answers = answers_against_three_runs(RUNS, 0.0, between_runs)
    assert share(answers, "faster", "slower") <= 0.05 + 2 * 0.0022


def test_without_the_bound_from_the_runs_it_would_be():
    """What differs between runs makes it necessary: processes alone know nothing of it."""
    assert share(answers_against_three_runs(1_000, 0.0, 0.003, bounded=False), "faster", "slower") > 0.12
    assert share(answers_against_three_runs(1_000, 0.0, 0.005, bounded=False), "faster", "slower") > 0.3


def test_what_is_slower_is_found_against_three_runs_that_hardly_differ():
    assert share(answers_against_three_runs(2_000, 0.01, 0.0), "slower") > 0.78
    assert share(answers_against_three_runs(2_000, 0.02, 0.0), "slower") > 0.99
