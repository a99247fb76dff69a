"""No page reads every result: what each query of a page would do, as SQLite plans it."""

import time
from contextlib import closing

import msgspec
import pytest
from messages_made import add, result
from records_made import ENVIRONMENT, made

from benchd.dashboard import queries
from benchd.dashboard.limits import SHOWN
from benchd.dashboard.messages import TableRow, flat
from benchd.dashboard.store import KEEP_S, Store
from tests.soak.page_queries import asked, noted

KNOWN = flat(made(device_id="d"), 0.0)


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    with closing(Store(f"sqlite:///{tmp_path_factory.mktemp('indices')}/d.db")) as database:
        for run_id, setup in (("r0", "old"), (KNOWN.run_id, "new")):
            environment = msgspec.structs.replace(ENVIRONMENT, fingerprint=setup)
            add(database, result(made(device_id="d", run_id=run_id, environment=environment), time.time()))
        yield database


def plans(store, name):
    """Return the steps of the plan of each statement of a page by its text."""
    return {sql: [step for _, _, _, step in plan] for sql, plan in explained(store, name).items()}


def explained(store, name):
    """Return the plan of each statement of a page by its text; the second value of a step names the part it is in."""
    with noted(store._engine) as statements:
        asked(store, KNOWN)[name]()
    with store.reading() as connection:
        query_plans = {
            sql: connection.exec_driver_sql(f"EXPLAIN QUERY PLAN {sql}", values).all()
            for sql, values, _ in statements
            if sql.startswith(("SELECT", "WITH"))
        }
    assert query_plans
    return query_plans


def planned(store, statements, text):
    """Return how the database would run each of the statements with a text, knowing what its tables hold."""
    is_postgres = store._engine.dialect.name == "postgresql"
    with store.reading() as connection:
        connection.exec_driver_sql("ANALYZE")
        explain = "EXPLAIN" if is_postgres else "EXPLAIN QUERY PLAN"
        wanted = (statement for statement in statements if text in statement.sql)
        return [
            str(connection.exec_driver_sql(f"{explain} {statement.sql}", statement.values).all())
            for statement in wanted
        ]


def test_what_a_device_reported_last_is_searched_by_device_and_time(store):
    steps = [step for plan in plans(store, "live").values() for step in plan if step.startswith("SEARCH telemetry")]
    assert steps
    assert all("device_id=? AND t_s>?" in step for step in steps), steps


def test_old_telemetry_is_walked_to_along_an_index(store):
    """Once a minute, of millions, while nobody else may write."""
    with noted(store._engine) as statements:
        store.tidy(time.time())
    thinned, expired = [statement for statement in statements if statement.sql.startswith("DELETE FROM telemetry")]
    with store.reading() as connection:
        steps = [
            [row[3] for row in connection.exec_driver_sql(f"EXPLAIN QUERY PLAN {statement.sql}", statement.values)]
            for statement in (thinned, expired)
        ]
    assert "INDEX telemetry_time (t_s>? AND t_s<?)" in steps[0][0]
    assert any("(device_id=? AND t_s>? AND t_s<?)" in step for step in steps[0]), steps
    assert "INDEX telemetry_time (t_s<?)" in steps[1][0]


def test_the_last_events_of_a_device_and_the_expired_ones_are_walked_to_along_an_index(url):
    """The page of a device asks every second, the expiry once a minute."""
    with closing(Store(url)) as store:
        known = {"name": "a", "body": b'{"event":"a"}'}
        store.add(
            TableRow("event", known | {"key": f"{n}", "device_id": f"d{n % 20}", "arrived_s": 60.0 * n})
            for n in range(5000)
        )
        with noted(store._engine) as statements:
            assert len(queries.marks(store, "d1", 0.0)) == SHOWN
            store.tidy(KEEP_S + 600.0)
        last, expired = planned(store, statements, "FROM event")
        assert "event_device" in last
        assert not any(step in last for step in ("B-TREE", "Sort")), last
        assert "event_time" in expired


def test_the_last_results_of_a_device_are_walked_to_along_an_index(url):
    """The page of a device asks every second: only the results that it shows are read."""
    with closing(Store(url)) as store:
        known = KNOWN._asdict()
        store.add(
            TableRow(
                "result", known | {"key": f"{n}", "device_id": f"d{n % 20}", "case_id": f"c{n % 7}", "measured_s": n}
            )
            for n in range(5000)
        )
        with noted(store._engine) as statements:
            assert len(queries.marks(store, "d1", 4000.0)) == SHOWN
        (plan,) = planned(store, statements, "FROM result")
        assert "result_device_time" in plan


@pytest.mark.parametrize("name", ["device", "of a device"])
def test_the_results_of_a_device_are_in_the_order_of_an_index(store, name):
    for plan in plans(store, name).values():
        assert not any("B-TREE" in step for step in plan), plan


def test_the_runs_of_a_case_in_one_setup_are_walked_to_along_the_index_of_setups(store):
    of_a_case = {sql: plan for sql, plan in plans(store, "changes").items() if "tool_version = " in sql}
    assert len(of_a_case) > 2
    for statement, plan in of_a_case.items():
        assert any("result_setup" in step for step in plan), (statement, plan)


@pytest.mark.parametrize("name", ["searched", "by median"])
def test_the_newest_results_are_read_once_and_not_looked_up_again(store, name):
    """By their ids SQLite would find them one by one; PostgreSQL reads every result for that."""
    for statement in plans(store, name):
        assert statement.count("FROM result") == 1, statement


@pytest.mark.parametrize("name", asked(None, KNOWN))
def test_no_query_of_a_page_reads_or_sorts_all_results(store, name):
    whole = ("SCAN result", "SCAN body", "SCAN telemetry", "SCAN event")
    for statement, plan in explained(store, name).items():
        scans = [step for _, _, _, step in plan if step.startswith(whole)]
        sorted_parts = {part for _, part, _, step in plan if "B-TREE" in step}
        # a walk along an index in the order asked for ends at the limit
        assert all("USING" in step and "INDEX" in step for step in scans), (statement, plan)
        assert not scans or "LIMIT" in statement, (statement, plan)
        assert not any(part in sorted_parts and step in scans for _, part, _, step in plan), (statement, plan)
