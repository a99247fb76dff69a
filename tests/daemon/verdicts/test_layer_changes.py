"""Which layers a change is in: planted faults in profiles whose layers and processes vary."""

import math
import random
from collections import Counter

import pytest

from benchd.daemon.records import LayerTime
from benchd.daemon.verdicts import layers
from benchd.daemon.verdicts.layers import BETWEEN, Round

COUNT, ROUNDS = 20, 7


def profiled(times_ms, draw, noise=0.03):
    """Return the layers of one process and its plain time, with two levels of a process that all layers share."""
    level = draw.choice([1.0, 1.05]) * (1 + draw.random() / 50)
    times = [
        LayerTime(name=f"layer {n}", ms=ms * level * math.exp(draw.gauss(0, noise)), kind="Conv")
        for n, ms in times_ms.items()
    ]
    return sum(times_ms.values()) * level * math.exp(draw.gauss(0, 0.01)), times


def judged(seed, factors, extra_ms=0.0):
    """Return the verdict on layers of random sizes whose times change by these factors, by the rank of their size."""
    draw = random.Random(seed)
    sizes = sorted((draw.uniform(0.1, 1.0) for _ in range(COUNT)), reverse=True)
    order = draw.sample(range(COUNT), COUNT)
    before = {order[rank]: ms for rank, ms in enumerate(sizes)}
    after = {order[rank]: ms * factors.get(rank, factors.get("all", 1.0)) for rank, ms in enumerate(sizes)}
    rounds = []
    for _ in range(ROUNDS):
        (a, of_a), (b, of_b) = profiled(before, draw), profiled(after, draw)
        rounds.append(Round(a, b + extra_ms, of_a, of_b))
    by_change = sorted(before, key=lambda number: -abs(after[number] - before[number]))
    return layers.judge(rounds), [f"layer {number}" for number in by_change]


@pytest.mark.parametrize(
    "factors", [{2: 3.0}, {2: 3.0, 5: 2.5}, {1: 3.0, 4: 0.4}], ids=["one", "two", "one slower and one faster"]
)
def test_the_guilty_layer_is_first_in_nine_of_ten_and_an_innocent_one_named_in_one_of_twenty(factors):
    counted = Counter()
    for seed in range(100):
        verdict, by_change = judged(seed, factors)
        names = [change.name for change in verdict.changes] if verdict else []
        counted["first"] += names[:1] == by_change[:1]
        counted["innocent"] += bool({*names} - {*by_change[: len(factors)]})
    assert counted["first"] >= 90
    assert counted["innocent"] <= 5


def test_what_all_layers_share_is_said_to_be_alike_and_nothing_is_named_where_nothing_changed():
    alike = [judged(seed, {"all": 1.3})[0] for seed in range(100)]
    assert sum(bool(verdict and verdict.alike) for verdict in alike) >= 90
    none = [judged(seed, {})[0] for seed in range(100)]
    assert sum(bool(verdict and verdict.changes) for verdict in none) <= 5


def test_the_time_between_the_layers_is_one_of_them():
    verdict, _ = judged(1, {}, extra_ms=3.0)
    assert [change.name for change in verdict.changes] == [BETWEEN]


def rounds_of(first, second):
    """Return rounds of layers (name, ms, kind, covers) that vary by a thousandth."""
    rounds = []
    for number in range(4):
        sides = [
            [
                LayerTime(name=name, ms=ms * (1 + number / 1000), kind=kind, covers=covers)
                for name, ms, kind, covers in side
            ]
            for side in (first, second)
        ]
        rounds.append(Round(*(sum(layer.ms for layer in side) for side in sides), *sides))
    return rounds


def test_a_fused_layer_is_compared_with_its_parts_and_the_sentence_says_what_became_of_it():
    first = [("fused", 1.0, "Conv", ["conv2", "relu2"]), ("other", 1.0, "Conv", ["conv1"])]
    second = [
        ("conv_token_5", 1.4, "Conv", ["conv2"]),
        ("ReorderOutput", 0.6, "Reorder", ["conv2"]),
        ("relu2", 0.1, "Relu", ["relu2"]),
        ("other_nchwc", 1.0, "Conv", ["conv1"]),
    ]
    verdict = layers.judge(rounds_of(first, second))
    assert verdict.sentence == "1.1 ms slower: +1.1 ms conv2 (Conv became Conv + Reorder + Relu); the rest within noise"
    assert verdict.changes[0].share == pytest.approx(1.0)


def test_what_covers_nothing_common_is_matched_in_its_order_and_the_rest_is_new_or_gone():
    first = [(f"kernel {n}", 1.0, kind, []) for n, kind in enumerate(("Conv", "Norm", "Conv"))]
    second = [
        (f"kernel {n}", ms, kind, [])
        for n, (ms, kind) in enumerate([(1.0, "Conv"), (5.0, "Copy"), (1.0, "Norm"), (1.0, "Conv")])
    ]
    verdict = layers.judge(rounds_of(first, second))
    assert [(change.name, change.note) for change in verdict.changes] == [("kernel 1", "new: Copy")]


def test_a_layer_that_runs_more_often_says_so():
    first = [("loop", 1.0, "Conv", []), ("x", 1.0, "Conv", [])]
    rounds = rounds_of(first, [("loop", 2.0, "Conv", []), ("x", 1.0, "Conv", [])])
    rounds = [
        Round(
            each.first_ms,
            each.second_ms,
            each.first,
            [LayerTime(name="loop", ms=each.second[0].ms, kind="Conv", calls=2), each.second[1]],
        )
        for each in rounds
    ]
    assert layers.judge(rounds).changes[0].note == "runs 2 times, not 1"


def test_without_enough_processes_or_profiles_there_is_no_verdict():
    rounds = rounds_of([("x", 1.0, "Conv", [])], [("x", 2.0, "Conv", [])])
    assert layers.judge(rounds[:2]) is None
    assert layers.judge([Round(1.0, 2.0, [], []) for _ in range(5)]) is None
    assert layers.judge(rounds).changes
