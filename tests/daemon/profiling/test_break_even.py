"""The firing rate of break-even from sweeps that are made up: the crossing, its interval, switches of kernels."""

import random

import pytest

from benchd.daemon.profiling import break_even
from benchd.daemon.profiling.profile import RateTimes, Sweep

RATES = [place / 16 for place in range(17)]


def sweep(cost, noise=0.0, seed=0, kernels=lambda rate: "c", ann_ns=10e6):
    """Return a sweep of five rounds in which a run takes `cost(rate)` times the ANN's."""
    drawn = random.Random(seed)

    def point(rate):
        loads = [drawn.lognormvariate(0, 0.5) for _ in range(5)]  # which both meet
        ns = [load * ann_ns * cost(rate) * drawn.lognormvariate(0, noise) for load in loads]
        return RateTimes(rate=rate, ns=ns, ann_ns=[load * ann_ns for load in loads], kernels=kernels(rate))

    return Sweep(ann="ann", time_steps=8, points=[point(rate) for rate in RATES], own=point(0.3))


def linear(rate):
    return 0.8 + rate


def test_the_crossing_is_where_both_take_the_same_time_whatever_load_both_meet():
    conclusion = break_even.conclude([sweep(linear, seed=seed) for seed in range(3)])
    assert conclusion.time.answer == "crosses"
    assert conclusion.time.rate == pytest.approx(0.2, abs=0.002)
    assert conclusion.time.low == pytest.approx(conclusion.time.high, abs=1e-6)
    assert [half.rate for half in conclusion.halves] == pytest.approx([0.2, 0.2], abs=0.005)
    assert conclusion.halves_differ < 0.01
    assert (conclusion.own.ratio, conclusion.predicted) == (pytest.approx(1.1), pytest.approx(1.1, abs=0.002))


def test_the_interval_covers_the_rate_in_most_of_many_noisy_sweeps():
    covered = 0
    for number in range(20):
        crossing = break_even.conclude([sweep(linear, 0.05, 100 * number + seed) for seed in range(7)]).time
        covered += crossing.low <= 0.2 <= crossing.high
    assert covered >= 16


def test_fewer_than_three_processes_have_no_interval():
    assert break_even.conclude([sweep(linear)] * 2).time.low is None


@pytest.mark.parametrize(
    ("cost", "answer"), [(lambda rate: 1.1 + rate, "always slower"), (lambda rate: 0.1 + 0.5 * rate, "always faster")]
)
def test_without_a_crossing_it_says_on_which_side_the_net_is(cost, answer):
    conclusion = break_even.conclude([sweep(cost, seed=seed) for seed in range(3)])
    assert (conclusion.time.answer, conclusion.time.rate, conclusion.time.without) == (answer, None, 1.0)
    assert conclusion.halves_differ is None


def test_no_line_is_drawn_across_a_switch_of_kernels():
    def cost(rate):
        return 0.5 + rate if rate < 0.3 else 1.2

    conclusion = break_even.conclude(
        [sweep(cost, kernels=lambda rate: "c" if rate < 0.3 else "vnni") for _ in range(3)]
    )
    assert conclusion.time.rate == pytest.approx((4 / 16 + 5 / 16) / 2)
    # within a kind it would have crossed at 0.27
    one_kind = break_even.conclude([sweep(cost) for _ in range(3)])
    assert one_kind.time.rate != pytest.approx(conclusion.time.rate, abs=1e-4)


def test_between_two_kernels_a_rate_has_the_ratio_of_the_nearer_point():
    curve = [(0.0, -1.0, "c"), (0.2, 0.0, "c"), (0.4, 1.0, "vnni")]
    assert [break_even._at(rate, curve) for rate in (0.1, 0.25, 0.35, 0.4)] == pytest.approx([-0.5, 0.0, 1.0, 1.0])


def test_draws_that_cross_nowhere_are_counted():
    sweeps = [sweep(linear, seed=1), sweep(linear, seed=2), *(sweep(lambda rate: 1.5 + rate, seed=s) for s in (3, 4))]
    conclusion = break_even.conclude(sweeps)
    assert 0.1 < conclusion.time.without < 0.9


def test_joules_have_a_rate_of_their_own():
    linear_sweep = sweep(linear)
    for point in linear_sweep.points:
        point.joules, point.ann_joules = 0.9 + point.rate, 1.0
    assert break_even.conclude([linear_sweep] * 3).energy.rate == pytest.approx(0.1, abs=0.002)
    linear_sweep.points[3].joules = None
    assert break_even.conclude([linear_sweep] * 3).energy.rate == pytest.approx(0.1, abs=0.002)
    assert break_even.conclude([sweep(linear)] * 3).energy is None
