"""Characters that steer a terminal or turn text around, in what devices publish: no page and no metric repeats them."""

from contextlib import closing

import msgspec
import pytest
from messages_made import add, message, result
from records_made import ENVIRONMENT, PASSED, made

from benchd.daemon.records import Case, Record, encode
from benchd.dashboard import limits, queries
from benchd.dashboard.answers import Answers
from benchd.dashboard.changes import Changes
from benchd.dashboard.messages import rows
from benchd.dashboard.store import Store

STEERING = "\x1b\x07\x9b\u202e"
REPLACED = "\N{REPLACEMENT CHARACTER}"


@pytest.fixture
def store(tmp_path):
    record = made(run_id="r1", device_id="d1", suite_id=f"s{STEERING}", status="failed", reason=f"a{STEERING}b")
    bodies = {
        "result/r1": record,
        "info": {"name": f"board{STEERING}", "site": STEERING, "tags": [STEERING]},
        "health": {"activity": f"idle{STEERING}", "problem": STEERING},
        "status": {"state": "online"},
        "event": {"event": "started", "detail": STEERING},
        "telemetry": {"samples": [[1, f"temp_c{STEERING}", 1.0, "fake"]]},
        f"latest/c{STEERING}": {"case_id": "c", "verdict": "slower"},
    }
    bodies = {kind: body if isinstance(body, Record) else msgspec.json.encode(body) for kind, body in bodies.items()}
    with closing(Store(f"sqlite:///{tmp_path}/dashboard.db")) as store:
        add(store, *(message("d1", kind, body, 1_790_000_000.0) for kind, body in bodies.items()))
        yield store
        assert queries.body(store, record.key) == encode(record)  # what is downloaded is what was measured


def test_characters_that_steer_a_terminal_or_turn_text_around_are_replaced_where_messages_are_read(store):
    with store.reading() as connection:
        stored = {
            name: [row._mapping for row in connection.execute(table.select())]
            for name, table in store.tables.items()
            if name != "body"
        }
    assert stored["quarantine"] == []
    assert stored["telemetry"]
    assert stored["event"]
    assert {row["kind"] for row in stored["document"]} > {"info", f"latest/c{4 * REPLACED}"}
    text = repr([stored, queries.record(store, "d1:r1")])
    assert_plain(text)


def test_characters_that_turn_text_around_are_replaced_in_what_the_boards_choose(store):
    place = msgspec.structs.replace(ENVIRONMENT, power_mode=f"15W{STEERING}", cpu_model=f"cpu{STEERING}")
    record = made(run_id="r2", device_id="d1", case=Case(model=f"net{STEERING}"), environment=place, check=PASSED)
    add(store, result(record, 1_790_000_000.0))
    answers = Answers(store, Changes(store))
    chosen, newest = answers.update(), answers.newest()
    assert (len(chosen[0]["d1"]), len(newest[0])) == (2, 2)
    assert_plain(repr([chosen, newest]))


def test_a_result_with_such_characters_in_its_run_id_is_kept_apart():
    run_id = f"r{STEERING}"
    stored_rows = rows(result(made(run_id=run_id, device_id="d1"), 1.0))
    assert [row.table for row in stored_rows] == ["quarantine"]


def assert_plain(shown):
    assert REPLACED in shown
    for char in (*STEERING, *(f"\\{escape}" for escape in ("x1b", "x07", "x9b", "u202e", "u001b", "u0007"))):
        assert char not in shown


@pytest.mark.parametrize(("given", "page"), [(10**20, limits.LAST_PAGE), (-(10**20), 1), (0, 1), (7, 7)])
def test_a_page_beyond_all_pages_is_a_page_that_the_database_can_be_asked_for(store, given, page):
    assert limits.page(given) == page
    listing = queries.results(store, queries.Filter(), "measured", True, (limits.page(given) - 1) * 100, 100)
    assert len(listing.results) == (page == 1)
