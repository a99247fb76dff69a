"""No page reads every result: what each query of a page would do, as SQLite plans it."""

import time
from contextlib import closing

import pytest
from records_made import made

pytest.importorskip("nicegui", reason="needs nicegui, of the extra dashboard")

from sqlalchemy import event

from benchd.daemon.delivery.session import Arrived
from benchd.daemon.records import encode
from benchd.dashboard import export, metrics, queries
from benchd.dashboard.answers import Answers
from benchd.dashboard.changes import UPDATES, Changes
from benchd.dashboard.conditions import boards
from benchd.dashboard.messages import rows
from benchd.dashboard.queries import Filter
from benchd.dashboard.store import Store

ASKED = {
    "results": lambda store: queries.results(store, Filter(), "measured_s", True, 0, 25),
    "of a device": lambda store: queries.results(store, Filter(device_id="d"), "measured_s", True, 0, 25),
    "of a model": lambda store: queries.results(store, Filter(model="vim_tiny"), "measured_s", True, 0, 25),
    "of a variant": lambda store: queries.results(store, Filter(variant="eager"), "measured_s", True, 0, 25),
    "failed": lambda store: queries.results(store, Filter(status="failed"), "measured_s", True, 0, 25),
    "not checked": lambda store: queries.results(store, Filter(check="not checked"), "measured_s", True, 0, 25),
    "by median": lambda store: queries.results(store, Filter(), "median_ms", False, 0, 25),
    "searched": lambda store: queries.results(store, Filter(text="tiny"), "measured_s", True, 0, 25),
    "choices": lambda store: [queries.choices(store, name) for name in ("device_id", "model", "variant", "status")],
    "history": lambda store: queries.history(store, "d", "vim_tiny,eager,b1", 200),
    "trade-off": lambda store: Answers(store, Changes(store)).newest(),
    "changes": lambda store: [Changes(store).update(since) for since in (*UPDATES, "2026-01-01")],
    "record": lambda store: queries.newest_profile(store, queries.result(store, "d:r1")),
    "names": queries.names,
    "device": lambda store: queries.happenings(store, "d", time.time() - 300),
    "home": lambda store: boards(store, Answers(store, Changes(store)).update()[0], time.time()),
    "sparklines": lambda store: queries.sparks(store, ["d"], time.time() - 300),
    "csv": lambda store: list(export.lines(store, Filter())),
    "metrics": lambda store: list(metrics.Fleet(store, time.time()).collect()),
}


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    with closing(Store(f"sqlite:///{tmp_path_factory.mktemp('indices')}/d.db")) as found:
        record = made(device_id="d")
        found.add(rows(Arrived(f"benchd/v1/d/result/{record.run_id}", encode(record), time.time())))
        yield found


@pytest.mark.parametrize("ask", ASKED.values(), ids=ASKED)
def test_no_query_of_a_page_reads_or_sorts_all_results(store, ask):
    asked = []

    def note(connection, cursor, statement, values, *_):
        asked.append((statement, values))

    event.listen(store._engine, "before_cursor_execute", note)
    try:
        ask(store)
    finally:
        event.remove(store._engine, "before_cursor_execute", note)
    with store.reading() as connection:
        plans = {
            statement: [row[3] for row in connection.exec_driver_sql(f"EXPLAIN QUERY PLAN {statement}", values)]
            for statement, values in asked
            if statement.startswith(("SELECT", "WITH"))
        }
    assert plans
    for statement, plan in plans.items():
        scans = [step for step in plan if step.startswith(("SCAN result", "SCAN body", "SCAN telemetry"))]
        # a walk along an index in the order asked for ends at the limit
        assert all("USING" in step and "INDEX" in step and "LIMIT" in statement for step in scans), (statement, plan)
