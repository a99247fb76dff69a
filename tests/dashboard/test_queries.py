import csv
import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from records_made import made, timing

pytest.importorskip("sqlalchemy", reason="needs sqlalchemy, of the extra dashboard")

from benchd.daemon.records import PROFILED, Case, Variant, encode
from benchd.dashboard import export, queries
from benchd.dashboard.messages import Message, flat, rows
from benchd.dashboard.queries import STALE_S, Filter
from benchd.dashboard.views import charts

NOW_S = 1_000_000_000.0


def add(store, device, kind, body, at_s=NOW_S):
    body = body if isinstance(body, bytes) else json.dumps(body).encode()
    store.add(rows(Message(f"benchd/v1/{device}/{kind}", body, at_s)))


def measure(store, number, median_ms, at_s=NOW_S, device="d1", **fields):
    given = {"run_id": f"r{number}", "device_id": device, "timing": timing(median_ms)} | fields
    add(store, device, f"result/r{number}", encode(made(**given)), at_s)


def point(variant, median_ms, energy_mj, checked="passed"):
    case = Case(model="m", variant=Variant.parse(variant))
    record = made(case=case, run_id=variant, timing=timing(median_ms))
    return flat(record, 0.0)._replace(energy_mj=energy_mj, checked=checked)


@pytest.mark.parametrize(
    ("said", "age_s", "state"),
    [
        ("online", 0.0, "online"),
        ("online", STALE_S + 1, "stale"),
        ("offline", 0.0, "offline"),
        (None, 0.0, "unknown"),
        ("online", None, "unknown"),
    ],
)
def test_a_device_that_has_long_said_nothing_is_not_believed(said, age_s, state):
    assert queries.presence(said, age_s) == state


def test_the_fleet_shows_the_total_power_and_never_a_sum(store):
    samples = [[0, "power_w", 9.0, "ina3221", "VDD_IN"], [0, "power_w", 5.0, "ina3221", "VDD_SOC"]]
    add(store, "d1", "telemetry", {"samples": [*samples, [0, "gpu_throttle_reasons", 4.0, "nvml"]]})
    (device,) = queries.fleet(store, NOW_S + 1)
    assert (device.power_w, device.throttled, device.age_s) == (9.0, True, 1.0)
    (device,) = queries.fleet(store, NOW_S + 60)
    assert (device.power_w, device.throttled) == (None, False)


def test_results_without_a_value_come_last_whichever_way_they_are_sorted(store):
    measure(store, 1, 5.0)
    measure(store, 2, 3.0)
    measure(store, 3, 1.0, timing=None, status="failed")
    for descending, order in ((False, ["r2", "r1", "r3"]), (True, ["r1", "r2", "r3"])):
        page = queries.results(store, Filter(), "median_ms", descending, 0, 10)
        assert ([result.run_id for result in page.results], page.total) == (order, 3)


def test_a_search_takes_its_text_as_it_stands(store):
    measure(store, 1, 5.0, flags=["100%"])
    measure(store, 2, 5.0, flags=["100x"])
    page = queries.results(store, Filter(text="100%"), "arrived_s", False, 0, 10)
    assert [result.run_id for result in page.results] == ["r1"]


def test_the_newest_result_of_each_case_is_the_one_that_came_last(store):
    measure(store, 1, 5.0, NOW_S + 9)
    measure(store, 2, 6.0, NOW_S)
    measure(store, 3, 7.0, NOW_S, device="d2")
    measure(store, 4, 7.0, NOW_S + 99, status="failed")
    measure(store, 5, 1.0, NOW_S + 99, flags=["busy", PROFILED])
    assert sorted(r.run_id for r in queries.newest_of_each_case(store, "vim_tiny")) == ["r1", "r3"]


def test_a_history_is_in_order_of_arrival(store):
    for number, at_s in ((1, 30), (2, 10), (3, 20)):
        measure(store, number, 5.0, NOW_S + at_s)
    measure(store, 4, 1.0, NOW_S + 40, flags=[PROFILED])
    found = queries.history(store, "d1", made().case_id, 2)
    assert [result.run_id for result in found] == ["r3", "r1"]


def test_old_telemetry_joins_the_new_as_means_of_minutes(store):
    start_s = NOW_S // 60 * 60
    for at_s, value in ((0, 2.0), (30, 4.0), (4000, 9.0)):
        add(store, "d1", "telemetry", {"samples": [[0, "power_w", value, "x"]]}, start_s + at_s)
    store.tidy(start_s + 4000)
    assert queries.series(store, "d1", start_s) == {"power_w": [(start_s, 3.0), (start_s + 4000, 9.0)]}


def test_events_and_ends_of_cases_are_in_order(store):
    measure(store, 1, 5.0, NOW_S + 2)
    add(store, "d1", "event", {"event": "throttled", "detail": "hot"}, NOW_S + 1)
    assert queries.happenings(store, "d1", NOW_S) == [
        (NOW_S + 1, "throttled", "hot"),
        (NOW_S + 2, "case ok", made().case_id),
    ]


@given(st.lists(st.tuples(st.floats(0.1, 100), st.floats(0.1, 100)), max_size=20))
def test_nothing_beats_the_front_and_something_on_it_beats_the_rest(pairs):
    points = [point("eager", median_ms, energy_mj) for median_ms, energy_mj in pairs]
    front = {(p.median_ms, p.energy_mj) for p in queries.pareto(points)}
    for ms, mj in pairs:
        beaten = any(a <= ms and b <= mj and (a, b) != (ms, mj) for a, b in pairs)
        assert ((ms, mj) in front) == (not beaten)


def test_what_failed_its_check_can_never_win():
    good = point("eager", 9.0, 9.0)
    assert queries.pareto([point("fp16", 1.0, 1.0, "failed"), point("amp", 1.0, None), good]) == [good]


def test_throttling_makes_bands_until_it_ends_or_the_data_does():
    series = {
        "gpu_throttle_reasons": [(0, 0.0), (1, 4.0), (2, 4.0), (3, 0.0), (5, 1.0), (6, 1.0)],
        "power_w": [(0, 1.0)],
    }
    assert charts.throttled(series) == [(1, 3), (5, 6)]


@given(st.integers(0, 5000))
def test_a_line_is_thinned_to_what_a_screen_shows_and_keeps_its_end(count):
    values = [(float(n), 0.0) for n in range(count)]
    thinned = charts.thinned(values)
    assert len(thinned) == min(count, math.ceil(count / max(1, math.ceil(count / charts.POINTS))))
    assert thinned[-1:] == values[-1:]


def test_a_step_is_marked_where_the_fingerprint_changed():
    one = point("eager", 1.0, 1.0)
    other = one._replace(fingerprint="other")
    assert charts.changes([one, one, other, other]) == [other]


def test_a_spreadsheet_takes_no_cell_for_a_formula(store):
    measure(store, 1, 5.0, case=Case(model="=1+1"))
    (cells,) = csv.DictReader("".join(export.lines(store, Filter())).splitlines())
    assert (cells["model"], cells["median_ms"]) == ("'=1+1", "5.0")
