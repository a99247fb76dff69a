"""Trade-off: what is one point, what may be compared, and what nothing beats."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from messages_made import add, result
from records_made import ENERGY, ENVIRONMENT, PASSED, QANN, WRONG, made, timing

from benchd.daemon.records import Case, Load, Neighbour, Requests, Variant
from benchd.daemon.verdicts.recommend import disqualified
from benchd.dashboard.answers import Answers, Kind, Newest
from benchd.dashboard.changes import Changes
from benchd.dashboard.messages import flat
from benchd.dashboard.text import time
from benchd.dashboard.trade_off import Figure, Point, front, groups

ORIN, NANO = Kind("tegra234", "MAXN", "cuda"), Kind("tegra234", "15W", "cuda")
DEADLINE = Case(model="m", scenario="server", load=Load(rate_hz=30.0, deadline_ms=10.0))
LATE = Requests(
    rate_hz=30.0,
    asked=100,
    answered=91,
    late=9,
    dropped=0,
    met=False,
    arrivals_p=0.5,
    noticed_ms=None,
    busy_share=0.5,
)


def newest(device, variant, median_ms, kind=ORIN, mj=None, **fields):
    case = fields.pop("case", Case(model="m", variant=Variant.parse(variant)))
    energy = msgspec.structs.replace(ENERGY, gross_per_inference_j=mj / 1e3) if mj else None
    defaults = {"environment": ENVIRONMENT, "energy": energy, "timing": timing(median_ms), "check": PASSED}
    record = made(case=case, device_id=device, **defaults | fields)
    return Newest(flat(record, 0.0), kind, case, disqualified(record))


def point(median_ms, energy_mj, *, why=""):
    energy = None if energy_mj is None else Figure(energy_mj, energy_mj, energy_mj)
    return Point("eager b1", Variant(), 1, Figure(median_ms, median_ms, median_ms), energy, why)


def test_boards_of_one_kind_are_one_point_with_their_range_and_one_board_has_its_interval():
    results = [newest(f"d{number}", "fp16", 4.0 + number, mj=100.0 + number) for number in range(3)]
    ((group, (fleet,)),) = groups(results).items()
    assert (group.kind, group.scope, fleet.label, fleet.boards) == (ORIN, "module", "eager-fp16 b1", 3)
    assert (fleet.latency_ms, fleet.energy_mj) == (Figure(5.0, 4.0, 6.0), Figure(101.0, 100.0, 102.0))
    (((pair,),),) = [groups(results[:2]).values()]
    assert (pair.latency_ms, pair.energy_mj) == (Figure(4.5, 4.0, 5.0), Figure(100.5, 100.0, 101.0))
    (((point,),),) = [groups(results[:1]).values()]
    assert point.latency_ms == Figure(4.0, pytest.approx(3.96), pytest.approx(4.04))
    assert point.energy_mj == Figure(100.0, pytest.approx(95.0), pytest.approx(105.0))


def test_other_kinds_scopes_work_and_wrong_answers_are_apart_and_what_failed_has_no_point():
    results = [
        newest("d1", "eager", 9.0, mj=90.0),
        newest("d2", "eager", 5.0, kind=NANO, mj=9.0),
        newest("d3", "eager", 8.0),
        newest("d1", "fp16", 3.0, mj=30.0, check=WRONG),
        newest("d1", "eager", 9.0, mj=90.0, case=Case(model="m", direction="training")),
        newest("d1", "custom", 9.0, status="failed"),
    ]
    by_group = groups(results)
    rows = [
        (group.kind, group.scope, group.work, [point.why for point in points]) for group, points in by_group.items()
    ]
    assert rows == [
        (NANO, "module", "", [""]),
        (ORIN, "module", "", ["", "fails its numerical check"]),
        (ORIN, "", "", [""]),
        (ORIN, "module", "training", [""]),
    ]
    assert [point.label for point in front(by_group[next(group for group in by_group if group.kind == ORIN)])] == [
        "eager b1"
    ]


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"flags": ["provider_fallback"]}, "did not run as requested (provider_fallback)"),
        ({"flags": ["weak_typing"]}, "did not run as requested (weak_typing)"),
        ({"flags": ["output_changed"]}, "gave different answers while it was timed"),
        ({"flags": ["repeated_input_faster"]}, "answers repeated inputs faster"),
        ({"check": None}, "was not checked"),
        ({"check": msgspec.structs.replace(WRONG, void=True)}, "its check is void"),
        (
            {"case": DEADLINE, "requests": LATE},
            "misses 10 ms at p99 at 30 requests per second (9 late and 0 dropped of 100)",
        ),
    ],
)
def test_what_recommend_excludes_whatever_the_limits_is_crossed_out_with_the_reason(store, fields, why):
    case = msgspec.structs.replace(fields.get("case", Case(model="m")), variant=Variant(precision="fp16"))
    slow = msgspec.structs.replace(case, variant=Variant())
    for run, median_ms, own in (("r1", 3.0, fields | {"case": case}), ("r2", 9.0, {"case": slow})):
        energy = msgspec.structs.replace(ENERGY, gross_per_inference_j=median_ms)
        known = {"timing": timing(median_ms), "energy": energy, "check": PASSED, "run_id": run, "device_id": "d"}
        add(store, result(made(**known | own), 1e9))
    (points,) = groups(Answers(store, Changes(store)).newest()[0]).values()
    assert {point.label: point.why for point in points} == {"eager b1": "", "eager-fp16 b1": why}
    assert [point.label for point in front(points)] == ["eager b1"]


def test_variants_of_two_models_cannot_win_against_each_other(store):
    answers = {"outputs": ["scores 10"], "inputs_sha256": "i"}
    for run, variant, along in (("r1", Variant(), 1.0), ("r2", Variant(precision="fp16"), 1.7)):
        known = made(
            case=Case(model="m", variant=variant),
            run_id=run,
            device_id="d",
            timing=timing(3.0),
            energy=ENERGY,
            model=QANN,
            check=msgspec.structs.replace(PASSED, projections=[along], **answers),
        )
        add(store, result(known, 1e9))
    (points,) = groups(Answers(store, Changes(store)).newest()[0]).values()
    assert ["its exact answers to the same inputs differ" in point.why for point in points] == [True, True]
    assert front(points) == []


def test_boards_on_which_a_variant_cannot_win_are_one_point_with_every_reason():
    flagged = [newest(f"d{number}", "fp16", 3.0, flags=["weak_typing"]) for number in range(2)]
    ((point,),) = groups([*flagged, newest("d2", "fp16", 3.0, check=WRONG)]).values()
    assert (point.boards, point.why) == (3, "did not run as requested (weak_typing); fails its numerical check")


def test_each_rate_of_a_server_each_number_of_streams_and_a_neighbour_are_apart():
    cases = [Case(model="m", scenario="server", load=Load(rate_hz=rate_hz)) for rate_hz in (30.0, 100.0)]
    cases += [Case(model="m", streams=4), Case(model="m", beside=Neighbour("vim_tiny,eager,b1", 30.0)), Case(model="m")]
    by_group = groups([newest("d1", "eager", 5.0, case=case) for case in cases])
    assert {group.work for group in by_group} == {
        "",
        "server rate=30",
        "server rate=100",
        "streams=4",
        "beside=vim_tiny,eager,b1:30Hz",
    }
    assert all(len(points) == 1 for points in by_group.values())


def test_what_else_tells_two_cases_of_a_board_apart_is_a_point_of_its_own():
    others = [{}, {"seed": 1}, {"threads": 2}, {"provider": "cpu"}, {"dla": 0}, {"dla": 1}, {"options": {"level": 8}}]
    results = [
        newest("d1", "eager", 5.0 + place, case=Case(model="m", **options)) for place, options in enumerate(others)
    ]
    (points,) = groups(results).values()
    assert [(point.label, point.latency_ms.value) for point in points] == [
        ("eager b1", 5.0),
        ("eager b1 seed=1", 6.0),
        ("eager b1 threads=2", 7.0),
        ("eager b1 provider=cpu", 8.0),
        ("eager b1 dla=0", 9.0),
        ("eager b1 dla=1", 10.0),
        ("eager b1 level=8", 11.0),
    ]


@given(st.lists(st.tuples(st.floats(0.1, 100), st.floats(0.1, 100)), max_size=20))
def test_nothing_beats_the_front_and_something_on_it_beats_the_rest(pairs):
    on_front = {(entry.latency_ms.value, entry.energy_mj.value) for entry in front([point(*pair) for pair in pairs])}
    for ms, mj in pairs:
        beaten = any(a <= ms and b <= mj and (a, b) != (ms, mj) for a, b in pairs)
        assert ((ms, mj) in on_front) == (not beaten)


def test_what_cannot_win_is_not_on_the_front():
    good = point(9.0, 9.0)
    assert front([point(1.0, 1.0, why="fails its numerical check"), point(1.0, None), good]) == [good]


def test_an_interval_that_would_reach_below_0_as_a_half_width_is_shown_with_both_ends():
    wide = newest("d", "fp16", 5.0, timing=timing(5.0, low_ms=1.0, high_ms=20.0))
    assert time(wide.result) == "5 [1, 20] ms"
