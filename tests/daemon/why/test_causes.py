"""The search for causes, over differences whose effects are known and times that vary: how often it is right."""

import random
from collections import Counter
from statistics import fmean

import pytest

from benchd.daemon.verdicts.effects import LOOKS
from benchd.daemon.why.search import MOST_PAIRS, Causes, Search, Spread, placed

SPREAD = 0.02
NAMES = [f"difference {number}" for number in range(12)]


class Bench:
    """Compares mixtures: `log_ratio` is the true effect of what is applied, and each pair deviates by `spread`."""

    def __init__(self, log_ratio, seed, refused=lambda applied: False, spread=SPREAD):
        self.log_ratio, self.refused, self.deviation = log_ratio, refused, spread
        self.draw, self.spread, self.comparisons = random.Random(seed), Spread(), 0

    def measure(self, applied, low, high):
        self.comparisons += 1
        if self.refused(applied):
            return None
        logs = []
        while True:
            logs.append(self.draw.gauss(self.log_ratio(applied), self.deviation))
            if len(logs) < 2:
                continue
            estimate = self.spread.of(logs)
            if placed(estimate, low, high, len(logs)) is not None or len(logs) == MOST_PAIRS:
                self.spread.add(logs)
                return estimate

    def search(self, names=NAMES, needs=None, least=0.01):
        logs = [self.draw.gauss(self.log_ratio(frozenset(names)), self.deviation) for _ in range(LOOKS[0])]
        self.spread.add(logs)
        return Search(names, self.measure, least, needs or {}).run(fmean(logs))


def found(causes: Causes) -> set[tuple[str, ...]]:
    return {cause.names for cause in causes.causes}


def outcomes(guilty, log_ratio, spread, trials=100):
    """Return how often the search names exactly the causes `guilty`, and how often it names an innocent difference."""
    counted = Counter()
    for seed in range(trials):
        draw = random.Random(seed)
        names = draw.sample(NAMES, draw.randint(8, len(NAMES)))
        chosen = draw.sample(names, guilty)
        bench = Bench(lambda on, chosen=chosen: log_ratio([name in on for name in chosen]), seed, spread=spread)
        causes = bench.search(names)
        named = {name for cause in (*causes.causes, *causes.alternatives) for name in cause.names}
        counted["all"] += named == set(chosen)
        counted["innocent"] += bool(named - set(chosen))
    return counted


@pytest.mark.parametrize(
    ("guilty", "log_ratio", "spread"),
    [
        (1, lambda on: 0.1 * on[0], SPREAD),
        (1, lambda on: -0.1 * on[0], SPREAD),
        (2, lambda on: 0.1 * (on[0] and on[1]), SPREAD),
        (2, lambda on: 0.1 * on[0] + 0.15 * on[1], SPREAD),
        (2, lambda on: 0.2 * on[0] + 0.05 * on[1], SPREAD / 4),
        (2, lambda on: 0.2 * on[0] - 0.1 * on[1], SPREAD),
        (2, lambda on: 0.1 * (on[0] or on[1]), SPREAD),
    ],
    ids=["one", "one that is faster", "a pair", "two", "a small one", "two against each other", "either of two"],
)
def test_nineteen_of_twenty_searches_name_the_guilty_and_one_in_fifty_an_innocent(guilty, log_ratio, spread):
    counted = outcomes(guilty, log_ratio, spread)
    assert counted["all"] >= 95
    assert counted["innocent"] <= 2


def test_a_guilty_pair_is_one_cause_and_its_cost_is_of_both():
    (cause,) = Bench(lambda applied: 0.2 * ({NAMES[2], NAMES[9]} <= applied), 1).search().causes
    assert cause.names == (NAMES[2], NAMES[9])
    assert cause.cost.interval.low < 0.2214 < cause.cost.interval.high  # exp(0.2) - 1


def test_one_of_sixteen_takes_eight_comparisons_behind_that_of_the_ends():
    names = [f"difference {number}" for number in range(16)]
    bench = Bench(lambda applied: 0.2 * (names[11] in applied), 2)
    assert found(bench.search(names)) == {(names[11],)}
    assert bench.comparisons <= 8


def test_what_runs_only_together_is_one_cause():
    together = set(NAMES[4:7])
    bench = Bench(lambda applied: 0.2 * (NAMES[5] in applied), 3, lambda applied: 0 < len(together & applied) < 3)
    assert found(bench.search()) == {tuple(NAMES[4:7])}


def test_what_a_difference_needs_is_applied_with_it():
    needs = {NAMES[8]: {NAMES[1]}}
    bench = Bench(
        lambda applied: 0.2 * (NAMES[8] in applied), 4, lambda applied: NAMES[8] in applied and NAMES[1] not in applied
    )
    causes = bench.search(needs=needs)
    assert found(causes) == {(NAMES[8],)}
    assert not causes.unresolved


def test_noise_larger_than_the_effect_names_nobody():
    bench = Bench(lambda applied: 0.02 * (NAMES[3] in applied), 5)
    causes = Search(NAMES, bench.measure, 0.001).run(0.02)
    assert not causes.causes or found(causes) == {(NAMES[3],)}
    bench.spread.add([-0.4, 0.4] * 10)
    assert Search(NAMES, bench.measure, 0.001).run(0.02).unresolved == tuple(NAMES)
