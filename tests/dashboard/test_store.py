import random
import shlex
import shutil
import sqlite3
import string
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import closing

import msgspec
import pytest
from messages_made import add
from messages_made import message as said
from messages_made import result as measured
from records_made import ENVIRONMENT, made
from sqlalchemy import event, select

from benchd.daemon.errors import UsageError
from benchd.daemon.records import decode, encode
from benchd.dashboard import queries
from benchd.dashboard.messages import ID_LIMIT, TEXT_LIMIT
from benchd.dashboard.schema import VERSION
from benchd.dashboard.store import QUARANTINE_ROWS, Store

NOW_S = 1_000_000_000.0


def message(kind, body, device="d1", at_s=NOW_S, **fields):
    return said(device, kind, body, at_s, **fields)


def result(number, device="d1", at_s=NOW_S):
    return measured(made(run_id=f"r{number}", device_id=device), at_s)


def power(values, at_s, device="d1"):
    samples = [[round(n * 1e9), "power_w", value, "fake"] for n, value in enumerate(values)]
    return message("telemetry", {"samples": samples}, device, at_s)


def content(store, *names):
    """Return the rows of tables without what numbers them, in an order of their own."""
    with store.reading() as connection:
        tables = {name: store.tables[name] for name in names or sorted(store.tables.keys() - {"version"})}
        return {
            name: sorted(map(repr, connection.execute(select(*[c for c in table.c if c.name != "id"]))))
            for name, table in tables.items()
        }


def test_the_first_of_a_key_stays_with_its_own_bytes(store):
    first, second = result(1), result(1, at_s=NOW_S + 1)
    add(store, first)
    add(store, second._replace(body=second.body + b" "))
    with store.reading() as connection:
        assert bytes(connection.execute(select(store.tables["body"].c.body)).scalar_one()) == first.body
        assert connection.execute(select(store.tables["result"].c.arrived_s)).scalar_one() == NOW_S


RUN_ID = "f" * 32


def test_the_longest_id_and_texts_are_stored_and_longer_ones_are_kept_apart(store):
    """PostgreSQL calls an entry that is too long for an index an outage, and would be asked for it again for ever."""

    def arrived(device, text):
        environment = msgspec.structs.replace(ENVIRONMENT, fingerprint=text)
        record = made(device_id=device, run_id=RUN_ID, tool_version=text, environment=environment)
        head = b'{"log":"0123456789abcdef","seq":1,'
        numbered = message(f"result/{RUN_ID}", head + encode(record)[1:], device)
        return [numbered, message("result/rubbish", head, device), message("telemetry", {"samples": []}, device)]

    drawn = random.Random(0)
    longest = "".join(drawn.choices(string.ascii_lowercase, k=TEXT_LIMIT))  # which compresses to no less
    longest_id = longest[:ID_LIMIT]
    cjk = "".join(chr(drawn.randint(0x4E00, 0x9FFF)) for _ in range(TEXT_LIMIT))
    add(store, *arrived(longest_id, longest))
    for device, text in ((longest_id + "x", "t"), ("d" * 65_000, "t"), ("d1", cjk)):
        add(store, *arrived(device, text))
    by_table = content(store, "result", "quarantine")
    assert {name: len(rows) for name, rows in by_table.items()} == {"result": 1, "quarantine": 1 + 3 + 3 + 2}
    for table in ("device", "span"):
        with store.reading() as connection:
            ids = connection.execute(select(store.tables[table].c.device_id)).scalars()
            assert sorted(ids) == sorted(["d1", longest_id])


MESSAGES = [
    *[result(n, device) for n in range(4) for device in ("d1", "d2")],
    *[power([n, n + 1.0], NOW_S + 10 * n, device) for n in range(3) for device in ("d1", "d2")],
    message("event", {"event": "throttled"}),
    message("nothing", {}),
]


@pytest.fixture(scope="module")
def delivered_once():
    """What a store holds after each message came once."""
    with closing(Store("sqlite://")) as once:
        add(once, *MESSAGES)
        return content(once)


def test_any_order_and_any_duplication_give_the_same_rows(store, delivered_once):
    """Whatever is delivered, in whatever order and how often, the store holds what one delivery leaves."""
    order = random.Random(0)
    delivered = MESSAGES + order.choices(MESSAGES, k=20)
    order.shuffle(delivered)
    for first in range(5):
        add(store, *delivered[first::5])
    assert content(store) == delivered_once


def states(store):
    with store.reading() as connection:
        document = store.tables["document"]
        return list(connection.execute(select(document.c.state, document.c.session)))


def test_the_late_will_of_an_earlier_session_is_passed_over(store):
    add(store, message("status", {"state": "online", "session": "s2"}))
    add(store, message("status", {"state": "offline", "session": "s1"}, at_s=NOW_S + 1))
    assert states(store) == [("online", "s2")]
    add(store, message("status", {"state": "offline", "session": "s2"}, at_s=NOW_S + 2))
    assert states(store) == [("offline", "s2")]


def test_the_will_of_a_device_that_was_known_from_the_broker_is_believed(store):
    add(store, message("status", {"state": "online", "session": "s1"}, retained=True))
    add(store, message("status", {"state": "offline", "session": "s1"}, at_s=NOW_S + 1))
    assert states(store) == [("offline", "s1")]


def test_what_stands_on_the_broker_is_believed_whatever_its_session(store):
    add(store, message("status", {"state": "online", "session": "s1"}))
    add(store, message("status", {"state": "offline", "session": "s2"}, at_s=NOW_S + 1, retained=True))
    assert states(store) == [("offline", "")]
    add(store, message("status", {"state": "online", "session": "s3"}, at_s=NOW_S + 2))
    assert states(store) == [("online", "s3")]


def test_a_device_was_seen_when_it_last_said_something_itself(store):
    add(store, message("health", {}, at_s=NOW_S, retained=True))
    assert content(store, "device") == {"device": ["('d1', None)"]}
    add(store, message("health", {}, at_s=NOW_S + 5))
    add(store, message("info", {}, at_s=NOW_S + 9, retained=True))
    assert content(store, "device") == {"device": [f"('d1', {NOW_S + 5})"]}


def test_a_collector_s_clock_that_was_ahead_freezes_nothing_once_it_is_right(store):
    now_s = time.time()
    for at_s in (now_s + 86400, now_s):
        for kind, body in (("status", {"state": "online", "session": "s2"}), ("health", {"activity": repr(at_s)})):
            add(store, message(kind, body, at_s=at_s))
        add(store, message("info", {}, at_s=now_s, retained=True))
        assert content(store, "device") == {"device": [f"('d1', {at_s})"]}
    (device,) = queries.fleet(store, now_s + 600)
    assert (device.state, device.age_s, device.health.activity) == ("silent", 600.0, repr(now_s))
    add(store, message("status", {"state": "offline", "session": "s1"}, at_s=now_s + 1))
    assert states(store).count(("online", "s2")) == 1


def test_a_sample_from_the_future_is_not_what_a_device_draws_now(store):
    now_s = time.time()
    add(store, power([9.0], now_s + 86400), power([5.0], now_s))
    assert [device.power_w for device in queries.fleet(store, now_s + 1)] == [5.0]


def test_one_message_a_minute_stays_of_old_telemetry_and_then_ends(store):
    minute_s = NOW_S // 60 * 60
    times_s = [minute_s + at_s for at_s in (0, 30, 59, 60, 70)]
    add(store, *(power([1.0], at_s, device) for at_s in times_s for device in ("d1", "d2")))

    def left():
        return sorted(row.t_s for row in store.read(select(store.tables["telemetry"])) if row.device_id == "d1")

    store.tidy(minute_s + 3600)
    assert left() == times_s
    store.tidy(minute_s + 3600 + 61)
    assert left() == [minute_s, *times_s[3:]]
    store.tidy(minute_s + 3600 + 121)
    assert left() == [minute_s, minute_s + 60]
    add(store, power([1.0], minute_s + 7200))
    store.tidy(minute_s + 90 * 86400 + 61)
    assert left() == [minute_s + 7200]


def test_a_clock_that_was_ahead_for_a_while_leaves_no_telemetry_as_it_is(store):
    store.tidy(NOW_S + 86400)
    minute_s = NOW_S // 60 * 60
    add(store, *(power([1.0], minute_s + at_s) for at_s in (0, 30)))
    store.tidy(minute_s + 3600 + 61)
    assert len(content(store, "telemetry")["telemetry"]) == 1


def test_records_stay_while_events_and_the_quarantine_end(store):
    add(store, result(1), message("event", {"event": "a"}))
    add(store, *[message("nothing", {"n": n}) for n in range(QUARANTINE_ROWS + 3)])
    store.tidy(NOW_S + 91 * 86400)
    by_table = content(store, "result", "event", "quarantine")
    assert (len(by_table["result"]), by_table["event"], len(by_table["quarantine"])) == (1, [], QUARANTINE_ROWS)


def test_rubbish_never_displaces_a_result_in_quarantine(store):
    add(store, result(1)._replace(body=b'{"schema":"benchd.record/2"}'))
    add(store, *[message("nothing", {"n": n}) for n in range(QUARANTINE_ROWS + 3)])
    store.tidy(NOW_S)
    rows = content(store, "quarantine")["quarantine"]
    assert len(rows) == QUARANTINE_ROWS + 1
    assert sum("/result/r1" in row for row in rows) == 1


def test_the_quarantine_is_bounded_in_bytes_and_keeps_the_newest(store, monkeypatch):
    monkeypatch.setattr("benchd.dashboard.store.QUARANTINE_BYTES", 1000)
    for n in range(9):
        add(store, message(f"nothing/{n}", {"pad": "x" * 270}))
    store.tidy(NOW_S)
    text = "".join(content(store, "quarantine")["quarantine"])
    assert [n for n in range(9) if f"nothing/{n}" in text] == [6, 7, 8]


@pytest.mark.parametrize("table", ["result", "event"])
def test_of_two_collectors_none_commits_behind_what_a_page_has_read(empty_postgres, table):
    """Whoever reads on from the last id would never see it."""
    messages = {"result": result, "event": lambda number, device: message("event", {"event": "throttled"}, device)}
    with (
        closing(Store(empty_postgres)) as first,
        closing(Store(empty_postgres)) as second,
        ThreadPoolExecutor(1) as pool,
    ):
        sql_table = first.tables[table]

        def after(last):
            with second.reading() as connection:
                return list(connection.execute(select(sql_table.c.id).where(sql_table.c.id > last)).scalars())

        def overtake(connection, cursor, statement, *_):
            if statement.startswith(f"INSERT INTO {table}"):
                overtaking.append(pool.submit(add, second, messages[table](2, "d2")))
                wait(overtaking, 1.0)
                seen.extend(after(0))

        overtaking, seen = [], []
        event.listen(first._engine, "after_cursor_execute", overtake)
        add(first, messages[table](1, "d1"))
        overtaking[0].result()
        assert len(seen + after(max(seen, default=0))) == 2


def test_a_database_of_another_schema_is_left_alone_and_its_records_come_out_by_the_printed_command(url, tmp_path):
    record = made(device_id="d1")
    with closing(Store(url)) as store:
        add(store, measured(record, 1.0))
        with store._writing() as connection:
            connection.exec_driver_sql("UPDATE version SET number = 99")
    with pytest.raises(UsageError, match=rf"tables of a different version \(99, not {VERSION}\)") as refused:
        Store(url)
    command = str(refused.value).partition(" of this one with ")[2]
    program, place = ("sqlite3", url.removeprefix("sqlite:///")) if "sqlite" in url else ("psql", url)
    if shutil.which(program) is None:
        pytest.skip(f"needs {program}")
    words = shlex.split(command.partition(" > ")[0])
    printed = subprocess.check_output([place if word in ("FILE", "URL") else word for word in words])
    assert decode(printed) == record


def test_the_tables_of_another_program_are_left_alone(tmp_path):
    path = tmp_path / "other.db"
    with closing(sqlite3.connect(path)) as other:
        other.execute("CREATE TABLE photos(id)")
    with pytest.raises(UsageError, match="contains another program's tables"):
        Store(f"sqlite:///{path}")
    with closing(sqlite3.connect(path)) as other:
        assert other.execute("SELECT name FROM sqlite_master").fetchall() == [("photos",)]


@pytest.mark.parametrize("url", ["mysql://x/y", "dashboard.db", "", "sqlite+aiosqlite:///x"])
def test_a_url_that_cannot_be_used_says_what_is_expected(url):
    with pytest.raises(UsageError, match="expected sqlite:///PATH or postgresql://"):
        Store(url)


def test_no_message_shows_the_password(tmp_path):
    with pytest.raises(UsageError) as raised:
        Store("postgresql://me:secret@127.0.0.1:1/x")
    assert "127.0.0.1" in str(raised.value)
    assert "secret" not in str(raised.value)


def test_a_folder_that_does_not_exist_is_not_made_for_a_path_that_may_be_wrong(tmp_path):
    with pytest.raises(UsageError, match=r"no such folder .*/typo/dir; correct the path or create it"):
        Store(f"sqlite:///{tmp_path}/typo/dir/dashboard.db")
    assert not (tmp_path / "typo").exists()
