import csv
import io

import messages_made
import msgspec
import pytest
from messages_made import message
from records_made import ENVIRONMENT, PASSED, made, timing
from sqlalchemy import select

from benchd.daemon.records import PROFILED, Case
from benchd.dashboard import queries
from benchd.dashboard.limits import DAY_S, READ, SHOWN, day_s
from benchd.dashboard.messages import TableRow, flat
from benchd.dashboard.queries import STALE_S, Filter, Mark
from benchd.dashboard.views import charts, history, shipped
from benchd.dashboard.views.results import csv_lines

NOW_S = 1_000_000_000.0


def add(store, device, kind, body, at_s=NOW_S):
    messages_made.add(store, message(device, kind, body, at_s))


def measure(store, number, median_ms, at_s=NOW_S, device="d1", **fields):
    given = {"run_id": f"r{number}", "device_id": device, "timing": timing(median_ms)} | fields
    add(store, device, f"result/r{number}", made(**given), at_s)


@pytest.mark.parametrize(
    ("said", "age_s", "state"),
    [
        ("online", 0.0, "online"),
        ("online", STALE_S + 1, "silent"),
        ("offline", 0.0, "silent"),
        (None, 0.0, "unknown"),
        ("online", None, "unknown"),
    ],
)
def test_a_device_that_has_long_said_nothing_is_not_believed(said, age_s, state):
    assert queries.presence(said, age_s) == state


def test_results_are_of_a_range_of_days(store):
    for day in range(4):
        measure(store, day, 1.0, day_s("2026-03-01") + (day + 0.5) * DAY_S, t_wall="1970-01-01T00:00:00Z")
    ranges = {("2026-03-02", "2026-03-03"): ["r2", "r1"], ("", "2026-03-01"): ["r0"], ("2026-03-04", "never"): ["r3"]}
    for (since, until), runs in ranges.items():
        page = queries.results(store, Filter(since=since, until=until), "measured_s", True, 0, 10)
        assert ([result.run_id for result in page.results], page.total) == (runs, len(runs))


def test_the_fleet_shows_the_total_power_and_never_a_sum(store):
    samples = [[0, "power_w", 9.0, "ina3221", "VDD_IN"], [0, "power_w", 5.0, "ina3221", "VDD_SOC"]]
    add(store, "d1", "telemetry", {"samples": [*samples, [0, "gpu_throttle_reasons", 4.0, "nvml"]]})
    (device,) = queries.fleet(store, NOW_S + 1)
    assert (device.power_w, device.throttled, device.age_s) == (9.0, True, 1.0)
    (device,) = queries.fleet(store, NOW_S + 60)
    assert (device.power_w, device.throttled) == (None, None)


def test_a_large_fleet_shows_the_newest_power_and_throttling_of_each_device(store):
    metrics = ["power_w", *(f"power_w@rail{n}" for n in range(8)), "gpu_throttle_reasons"]
    ids = [f"d{number:03}" for number in range(300)]
    store.add(TableRow("device", {"device_id": device_id, "seen_s": NOW_S}) for device_id in ids)
    for second in range(5):
        fields = {"t_s": NOW_S + second, "body": msgspec.json.encode(dict.fromkeys(metrics, 4.0 * second))}
        store.add(TableRow("telemetry", {"device_id": device_id} | fields) for device_id in ids)
    devices = queries.fleet(store, NOW_S + 4.5)
    assert [(device.power_w, device.throttled) for device in devices] == [(16.0, False)] * 300


def test_invented_and_retired_ids_do_not_hide_reporting_boards(store):
    store.add(TableRow("device", {"device_id": f"a{number}", "seen_s": NOW_S}) for number in range(READ + 1))
    store.add([TableRow("device", {"device_id": "only-retained", "seen_s": None})])
    add(store, "orin", "info", {"name": "the board"}, NOW_S + 1)
    assert len(queries.fleet(store, NOW_S)) == READ
    assert [device.device_id for device in queries.fleet(store, NOW_S)][-1] == "orin"
    assert queries.names(store)["orin"] == "the board (orin)"


def test_a_board_whose_retained_status_is_cleared_has_left_until_it_reports_again(store):
    for device in ("old", "orin"):
        add(store, device, "status", {"state": "online"})
        add(store, device, "info", {"name": device})
    for kind in ("status", "info", "health", "latest/a"):
        add(store, "old", kind, b"", NOW_S + 1)
    assert [board.device_id for board in queries.fleet(store, NOW_S)] == list(queries.names(store)) == ["orin"]
    assert queries.devices(store) == 1
    assert queries.fleet(store, NOW_S, device_id="old")[0].age_s == 0.0
    assert store.read(select(store.tables["quarantine"])) == []
    add(store, "old", "status", {"state": "online"}, NOW_S + 2)
    assert [board.device_id for board in queries.fleet(store, NOW_S)] == ["old", "orin"]


def test_results_without_a_value_come_last_whichever_way_they_are_sorted(store):
    measure(store, 1, 5.0)
    measure(store, 2, 3.0)
    measure(store, 3, 1.0, timing=None, status="failed")
    for descending, order in ((False, ["r2", "r1", "r3"]), (True, ["r1", "r2", "r3"])):
        page = queries.results(store, Filter(), "median_ms", descending, 0, 10)
        assert ([result.run_id for result in page.results], page.total) == (order, 3)


def test_a_search_takes_its_text_as_it_stands(store):
    measure(store, 1, 5.0, case=Case(model="100%"))
    measure(store, 2, 5.0, case=Case(model="100x"))
    page = queries.results(store, Filter(text="100%"), "arrived_s", False, 0, 10)
    assert [result.run_id for result in page.results] == ["r1"]


def test_a_history_is_in_order_of_arrival(store):
    for number, at_s in ((1, 30), (2, 10), (3, 20)):
        measure(store, number, 5.0, NOW_S + at_s)
    measure(store, 4, 1.0, NOW_S + 40, flags=[PROFILED])
    results = queries.history(store, "d1", made().case_id, 2)
    assert [result.run_id for result in results] == ["r3", "r1"]


def test_of_the_cases_that_live_the_last_results_are_reported_newest_first(store):
    """Not of one that has left its device's plan, nor of one that was not measured for long; a profile is no result."""
    for number, (model, at_s) in enumerate([("once", 1), ("gone", 3), ("old", -1), ("planned", 0), ("planned", 2)]):
        measure(store, number, 5.0, NOW_S + at_s, case=Case(model=model))
    measure(store, 9, 5.0, NOW_S + 9, case=Case(model="planned"), flags=[PROFILED])
    add(store, "d1", f"latest/{Case(model='planned').case_id}", {"median_ms": 5.0})
    add(store, "d1", f"latest/{Case(model='gone').case_id}", b"")
    results = queries.last_of_each_case(store, NOW_S - 0.5, 10)
    assert [(result.model, result.run_id) for result in results] == [("planned", "r4"), ("once", "r0")]
    assert queries.last_of_each_case(store, NOW_S - 0.5, 1) == results[:1]


def test_telemetry_is_a_line_per_metric_of_so_many_as_a_page_shows(store):
    for at_s, value in ((0, 2.0), (4000, 9.0)):
        samples = [[0, "power_w", value, "x", "VDD_IN"], *([0, f"m{n:02}", value, "x"] for n in range(SHOWN))]
        add(store, "d1", "telemetry", {"samples": samples}, NOW_S + at_s)
    series = queries.series(store, "d1", NOW_S)
    assert series["power_w@VDD_IN"] == [(NOW_S, 2.0), (NOW_S + 4000, 9.0)]
    assert len(series) == SHOWN


def test_events_and_ends_of_cases_are_in_order(store):
    measure(store, 1, 5.0, NOW_S + 2)
    measure(store, 2, 5.0, NOW_S + 3, check=msgspec.structs.replace(PASSED, passed=False))
    add(store, "d1", "event", {"event": "throttled", "detail": "hot"}, NOW_S + 1)
    assert queries.marks(store, "d1", NOW_S) == [
        (NOW_S + 1, "throttled", "hot"),
        (NOW_S + 2, "case ok", made().case_id),
        (NOW_S + 3, "failed check", made().case_id),
    ]


def test_throttling_makes_bands_until_it_ends_or_the_data_does():
    series = {
        "gpu_throttle_reasons": [(0, 1.0), (1, 4.0), (2, 5.0), (3, 1.0), (5, 32.0), (6, 32.0)],
        "power_w": [(0, 1.0)],
    }
    assert charts.throttled(series) == [(1, 3), (5, 6)]
    assert charts.throttled({"gpu_throttle_reasons": [(0, 4.0), (60, 4.0), (28000, 1.0)]}) == [(0, 60)]


def test_a_change_of_the_setup_is_marked_with_what_changed():
    first = made()
    old, slow = (
        made(environment=msgspec.structs.replace(ENVIRONMENT, fingerprint=name, variables=variables))
        for name, variables in (("g", {}), ("h", {"ONEDNN_MAX_CPU_ISA": "SSE41"}))
    )
    records = {"first": first, "old": old, "slow": slow, "gone": None}
    results = [flat(record or slow, 0.0)._replace(key=key) for key, record in records.items()]
    results[-1] = results[-1]._replace(fingerprint="i")
    newer = results[-1]._replace(tool_version="9")
    details = [mark.detail for mark in history.changes([*results, newer], records.get)]
    assert details == [
        "a different environment (ONEDNN_MAX_CPU_ISA: unset and SSE41)",
        "the device's fingerprint",
        "benchd 0.1.0 to 9",
    ]


def test_a_step_is_marked_at_its_first_run_with_its_size():
    levels = [10.0, 10.01, 9.99, 10.02, 10.0, 9.98, 11.2, 11.21, 11.19, 11.2, 11.22, 11.18]
    results = [
        flat(made(timing=timing(median_ms)), 0.0)._replace(measured_s=at_s) for at_s, median_ms in enumerate(levels)
    ]
    assert list(history.steps(results)) == [Mark(6, "+12.0 %", "from 10 ms to 11.2 ms")]
    assert list(history.steps(results[:6])) == []
    huge = [result._replace(median_ms=5e159) if result.median_ms > 11 else result for result in results]
    assert [step.name for step in history.steps(huge)] == ["+5e+160 %"]


def test_an_idle_gpu_s_reason_is_no_throttling(store):
    for at_s, mask, throttled in ((0, 1.0, False), (1, 32.0, True)):
        add(store, "d1", "telemetry", {"samples": [[0, "gpu_throttle_reasons", mask, "nvml"]]}, NOW_S + at_s)
        assert queries.fleet(store, NOW_S + at_s)[0].throttled is throttled


def test_the_latest_results_say_verdict_and_accuracy_until_their_case_is_taken_away(store):
    body = {"case_id": "a", "verdict": "slower", "median_ms": 2.0, "baseline_ms": 1.0}
    add(store, "d1", "latest/a", body)
    add(store, "d1", "latest/b", {"case_id": "b", "accuracy_value": 0.5})
    latest = [(result.case_id, result.verdict, result.accuracy_value) for result in queries.latest(store, "d1")]
    assert latest == [("a", "slower", None), ("b", None, 0.5)]
    add(store, "d1", "latest/a", b"")
    assert [result.verdict for result in queries.latest(store, "d1")] == [None, None]


@pytest.mark.parametrize("model", ["=1+1", "\n=1+1", "\uff1d1+1", "\uff201"])
def test_a_spreadsheet_takes_no_cell_for_a_formula(store, model):
    measure(store, 1, 5.0, case=Case(model=model))
    (cells,) = csv.DictReader(io.StringIO("".join(csv_lines(store, Filter())), newline=""))
    assert (cells["model"], cells["median_ms"]) == (f"'{model}", "5.0")


def test_what_is_deployed_is_known_of_each_board_until_it_is_taken_away(store):
    for device in ("d2", "d1"):
        add(store, device, "shipped/net", {"name": "net", "case_id": "m,eager,b1", "verdict": "kept", "change": 0.01})
    assert [(deployment.device_id, deployment.found.verdict) for deployment in queries.deployed(store)] == [
        ("d1", "kept"),
        ("d2", "kept"),
    ]
    add(store, "d1", "shipped/net", b"")
    assert [deployment.device_id for deployment in queries.deployed(store)] == ["d2"]


def test_a_promise_is_as_old_as_its_verification_however_often_the_broker_repeats_it(store):
    verified_s = 1_767_225_600.0
    for device, t_wall in (("right", "2026-01-01T00:00:00.000Z"), ("unset", "1970-01-01T00:00:00.000Z")):
        body = {"name": "net", "verdict": "kept", "t_wall": t_wall}
        for days in (0, 30):
            add(store, device, "shipped/net", body, verified_s + 86400 * days)
    right, unset = queries.deployed(store)
    assert (right.verified_s, unset.verified_s) == (verified_s, verified_s + 30 * 86400)
    assert shipped.is_stale(right, verified_s + 30 * 86400)
