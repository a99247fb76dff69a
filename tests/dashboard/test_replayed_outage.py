"""Thirty days of results that arrive within a moment: drawn, dated and ranked by when they were measured."""

import asyncio
import random
from datetime import datetime, timedelta, timezone

import pytest
from drawn import blank
from messages_made import add
from messages_made import result as measured
from nicegui import ui
from prometheus_client.exposition import generate_latest
from records_made import made, timing

from benchd.dashboard import queries
from benchd.dashboard.answers import Answers
from benchd.dashboard.changes import Changes
from benchd.dashboard.metrics import Fleet
from benchd.dashboard.queries import Filter
from benchd.dashboard.views import charts, comparison, history, record, results

FIRST = datetime(2026, 5, 1, tzinfo=timezone.utc)
ARRIVED_S = (FIRST + timedelta(days=31)).timestamp()
SLOWER_FROM = 18
CASE_ID = made().case_id


def stamp(day):
    return (FIRST + timedelta(days=day)).strftime("%Y-%m-%dT%H:%M:%S.000Z")


def result(day, t_wall):
    median_ms = (5.0 if day < SLOWER_FROM else 6.0) + 0.001 * (day % 3)
    record = made(run_id=f"r{day:02}", device_id="d1", t_wall=t_wall, timing=timing(median_ms))
    return measured(record, ARRIVED_S + 0.005 * day)


def deliver(store, days, stamped=stamp):
    add(store, *(result(day, stamped(day)) for day in days))


def shuffled(count):
    return random.Random(0).sample(range(count), count)


def test_the_axis_is_thirty_days_and_the_step_is_where_it_was_measured(store):
    deliver(store, shuffled(30))
    runs = queries.history(store, "d1", CASE_ID, 200)
    assert [run.run_id for run in runs] == [f"r{day:02}" for day in range(30)]
    (step,) = history.steps(runs)
    assert step.at_s == datetime.fromisoformat(stamp(SLOWER_FROM).replace("Z", "+00:00")).timestamp()
    options = charts.history(runs, [step])
    times_ms = [point[0] for point in options["series"][0]["data"]]
    assert times_ms == [(FIRST + timedelta(days=day)).timestamp() * 1e3 for day in range(30)]
    assert options["series"][0]["markLine"]["data"][0]["xAxis"] == times_ms[SLOWER_FROM]
    assert history.undated(runs) == ""


def test_what_was_measured_last_is_the_last_however_it_arrived(store):
    deliver(store, reversed(range(30)))
    ((last, *_),) = Answers(store, Changes(store)).newest()[0]
    assert last.run_id == "r29"
    assert [run.run_id for run in queries.results(store, Filter(), "measured_s", True, 0, 1).results] == ["r29"]
    text = generate_latest(Fleet(store, ARRIVED_S + 1)).decode()
    gauges = {line.partition("{")[0]: line.rpartition(" ")[2] for line in text.splitlines()}
    assert float(gauges["benchd_case_median_seconds"]) == pytest.approx(0.006002)
    assert float(gauges["benchd_case_measured_timestamp_seconds"]) == (FIRST + timedelta(days=29)).timestamp()


def test_the_page_of_a_device_marks_only_the_cases_of_its_last_hours(store):
    deliver(store, range(30))
    assert [mark.detail for mark in queries.marks(store, "d1", ARRIVED_S - 3 * 86400)] == [CASE_ID] * 2


def test_a_clock_that_was_never_set_is_not_believed_and_that_is_said(store):
    deliver(store, range(3), stamped=lambda day: f"1970-01-01T00:0{day}:00.000Z")
    runs = queries.history(store, "d1", CASE_ID, 200)
    assert [run.measured_s for run in runs] == [ARRIVED_S + 0.005 * day for day in range(3)]
    assert history.undated(runs) == " 3 runs by arrival: the device's clock was not set."


def test_every_page_dates_it_by_its_arrival(store):
    deliver(store, [0], stamped=lambda day: "1970-01-01T00:00:00.000Z")
    (run,) = queries.history(store, "d1", CASE_ID, 1)
    date = "2026-06-01 00:00:00"

    async def look():
        with blank() as client:
            record._head(run, queries.record(store, run.key))
            comparison._side_by_side(run, run)
            tables = [element.rows for element in client.elements.values() if isinstance(element, ui.table)]
            labels = [element.text for element in client.elements.values() if isinstance(element, ui.label)]
            return labels, tables, results._row(run, {})["measured_s"]

    labels, ((*_, compared),), measured = asyncio.run(look())
    assert f"{date} UTC, benchd 0.1.0; dated by arrival: the device's clock was not set" in labels
    assert compared == {"name": "when", "a": f"{date} UTC", "b": f"{date} UTC"}
    assert measured.removesuffix(" UTC") == date
