"""What the outbox has taken stays, through reopening, a kill and a file that is not what it should be."""

import os
import shutil
import signal
import sqlite3
import subprocess
import sys
import tempfile
from contextlib import closing
from pathlib import Path

import pytest
from disks import failing_ext4
from hypothesis import given, settings
from hypothesis import strategies as st

from benchd.daemon.delivery import outbox as outbox_module
from benchd.daemon.delivery.outbox import CLOCK_SET_S, PART_ROWS, Message, Outbox, open_or_salvage
from benchd.daemon.errors import UsageError

KEYS = st.sampled_from("abcdef")
STEPS = st.lists(st.tuples(st.sampled_from(["add", "sent", "refused", "retry", "reopen"]), KEYS), max_size=25)


def keys(outbox):
    return [row.key for row in outbox.pending(1000)]


def test_the_first_of_two_with_one_key_stays(tmp_path):
    with Outbox(tmp_path / "made" / "outbox.db") as outbox:
        outbox.add("d:1", "t/1", 1, b"\x00original\xff")
        outbox.add("d:2", "t/2", 1, b"{}")
        outbox.add("d:1", "t/other", 0, b"other")
        first, second = outbox.pending(10)
        assert first[1:5] == ("d:1", "t/1", 1, b"\x00original\xff")
        assert first.seq < second.seq


def test_pending_comes_in_order_and_in_pages(tmp_path):
    with Outbox(tmp_path / "outbox.db") as outbox:
        for number in range(7):
            outbox.add(str(number), "t", 1, b"")
        page = outbox.pending(3)
        assert [row.key for row in page] == ["0", "1", "2"]
        assert [row.key for row in outbox.pending(3, after=page[-1].seq)] == ["3", "4", "5"]
        outbox.mark_sent(page[0].seq, page[2].seq)
        outbox.mark_refused(page[1].seq, "Not authorized")
        assert keys(outbox) == ["3", "4", "5", "6"]
        assert outbox.counts() == (4, 2, 1)
        assert outbox.refused() == [("1", "Not authorized")]


@settings(max_examples=40, deadline=None)
@given(STEPS)
def test_any_sequence_of_steps_keeps_what_is_pending(steps):
    states: dict[str, str] = {}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "outbox.db"
        outbox = Outbox(path)
        for step, key in steps:
            seqs = {row.key: row.seq for row in outbox.pending(1000)}
            if step == "add":
                outbox.add(key, "t", 1, key.encode())
                states.setdefault(key, "pending")
            elif step == "sent" and key in seqs:
                outbox.mark_sent(seqs[key])
                states[key] = "sent"
            elif step == "refused" and key in seqs:
                outbox.mark_refused(seqs[key], f"no {key}")
                states[key] = "refused"
            elif step == "retry":
                outbox.retry_refused()
                states = {name: "pending" if state == "refused" else state for name, state in states.items()}
            elif step == "reopen":
                outbox.close()
                outbox = Outbox(path)
            # dicts keep the order of the first add, which is the order of delivery
            assert keys(outbox) == [name for name, state in states.items() if state == "pending"]
            assert all(row.body == row.key.encode() for row in outbox.pending(1000))
            wanted = [(name, f"no {name}") for name, state in states.items() if state == "refused"]
            assert outbox.refused() == wanted
            assert outbox.counts().sent == list(states.values()).count("sent")
        outbox.close()


def test_what_was_announced_is_there_after_a_kill(tmp_path):
    path = tmp_path / "outbox.db"
    code = (
        "import sys; from pathlib import Path; from benchd.daemon.delivery.outbox import Outbox\n"
        "outbox = Outbox(Path(sys.argv[1]))\n"
        "for number in range(10**6): outbox.add(str(number), 't', 1, b'x' * 800); print(number, flush=True)"
    )
    with subprocess.Popen([sys.executable, "-c", code, str(path)], stdout=subprocess.PIPE) as child:
        announced = [child.stdout.readline().decode().strip() for _ in range(100)]
        child.kill()
        announced += [line.decode().strip() for line in child.stdout if line.endswith(b"\n")]
    with Outbox(path) as outbox:
        rows = outbox.pending(10**6)
        assert [row.key for row in rows[: len(announced)]] == announced
        assert {row.body for row in rows} == {b"x" * 800}


@pytest.mark.parametrize(("durable", "synchronous"), [(True, 2), (False, 1)])
def test_every_commit_waits_for_the_disk_where_it_must_be_durable(tmp_path, durable, synchronous):
    with Outbox(tmp_path / "outbox.db", durable=durable) as outbox:
        assert outbox._db.execute("PRAGMA synchronous").fetchone() == (synchronous,)
        assert outbox._db.execute("PRAGMA journal_mode").fetchone() == ("wal",)


def test_a_finished_run_leaves_one_file(tmp_path):
    with Outbox(tmp_path / "outbox.db") as outbox:
        outbox.add("a", "t", 1, b"{}")
        assert len(list(tmp_path.iterdir())) > 1
    assert [path.name for path in tmp_path.iterdir()] == ["outbox.db"]


def test_two_processes_may_share_it(tmp_path):
    with Outbox(tmp_path / "outbox.db") as one, Outbox(tmp_path / "outbox.db") as other:
        one.add("a", "t", 1, b"{}")
        other.add("b", "t", 1, b"{}")
        assert keys(one) == keys(other) == ["a", "b"]


def test_a_locked_file_says_so(tmp_path, monkeypatch):
    monkeypatch.setattr(outbox_module, "BUSY_S", 0.1)
    path = tmp_path / "outbox.db"
    with Outbox(path) as outbox, closing(sqlite3.connect(path, isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        with pytest.raises(UsageError, match=r"outbox\.db: database is locked; another process uses it"):
            outbox.add("a", "t", 1, b"{}")
        other.execute("ROLLBACK")
        outbox.add("a", "t", 1, b"{}")
        assert keys(outbox) == ["a"]


def test_what_is_kept_comes_in_the_commit_of_the_message(tmp_path):
    path = tmp_path / "outbox.db"
    with Outbox(path) as outbox:
        assert outbox.kept("schedule") is None
        outbox.add_all([Message("a", "t", 1, b"{}")], {"schedule": b"1", "running": b""})
        outbox.keep({"schedule": b"2"})
    with Outbox(path) as outbox:
        assert (outbox.kept("schedule"), outbox.kept("running")) == (b"2", b"")


def filled(path, count):
    """Return an outbox of `count` messages that a broker has acknowledged second by second."""
    outbox = Outbox(path)
    for number in range(count):
        outbox.add(str(number), "t", 1, b"x")
        outbox.mark_sent(outbox.pending(1)[0].seq, at_s=CLOCK_SET_S + number)
    return outbox


def test_what_was_sent_is_forgotten_by_age_and_by_number_and_nothing_else(tmp_path):
    with filled(tmp_path / "outbox.db", 10) as outbox:
        outbox.add("waiting", "t", 1, b"x")
        outbox.add("stored?", "t", 1, b"x")
        outbox.mark_sent(outbox.pending(2)[1].seq, at_s=CLOCK_SET_S, unstored=True)
        outbox.forget_sent(now_s=CLOCK_SET_S + 100.0, keep_s=97.5)
        assert outbox.counts() == (1, 8, 0)
        outbox.forget_sent(now_s=CLOCK_SET_S + 100.0, keep_s=1000.0, keep_rows=3)
        assert outbox.backlog() == ((1, 4, 0), 1)
        assert outbox.send_again(0) == 4
        assert keys(outbox) == ["7", "8", "9", "waiting", "stored?"]


def test_what_was_sent_under_a_clock_that_was_not_set_goes_by_its_number_only(tmp_path):
    with Outbox(tmp_path / "outbox.db") as outbox:
        outbox.add("a", "t", 1, b"x")
        outbox.mark_sent(outbox.pending(1)[0].seq, at_s=60.0)
        outbox.forget_sent(now_s=CLOCK_SET_S + 1e8)
        assert outbox.counts().sent == 1
        outbox.forget_sent(now_s=0.0, keep_rows=0)
        assert outbox.counts().sent == 0


def test_only_a_collector_s_word_lets_go_of_what_waits_for_it(tmp_path):
    with Outbox(tmp_path / "outbox.db") as outbox:
        for key in "abc":
            outbox.add(key, "t", 1, b"x")
        outbox.mark_sent(*(row.seq for row in outbox.pending(3)), at_s=0.0, unstored=True)
        assert outbox.mark_stored({"a": None, "unknown": None}) == 1
        assert outbox.backlog() == ((0, 2, 0), 2)
        assert outbox.send_unstored() == 3
        assert keys(outbox) == ["b", "c"]
        outbox.mark_sent(*(row.seq for row in outbox.pending(3)), at_s=0.0, unstored=True)
        assert outbox.expect_no_collector() == 2
        assert outbox.backlog() == ((0, 2, 0), 0)


def test_many_rows_are_changed_in_commits_that_keep_nobody_waiting(tmp_path):
    with Outbox(tmp_path / "outbox.db") as outbox:
        for number in range(2 * PART_ROWS + 1):
            outbox.add(str(number), "t", 1, b"x")
        outbox.mark_sent(*range(1, 2 * PART_ROWS + 2), at_s=0.0, unstored=True)
        assert outbox.send_unstored() == PART_ROWS
        assert outbox.send_unstored(PART_ROWS) == 2 * PART_ROWS
        assert outbox.backlog() == ((2 * PART_ROWS, 1, 0), 1)
        assert outbox.send_unstored(2 * PART_ROWS) == 2 * PART_ROWS + 1
        assert outbox.send_unstored(2 * PART_ROWS + 1) is None
        outbox.mark_sent(*range(1, 2 * PART_ROWS + 2), at_s=CLOCK_SET_S)
        commits = []
        outbox._db.set_trace_callback(commits.append)
        for limit, count, left in (
            ({"keep_rows": PART_ROWS}, 1 + 3, PART_ROWS),
            ({"keep_s": 0.0}, 2, 0),
        ):
            commits.clear()
            outbox.forget_sent(CLOCK_SET_S + 1.0, **limit)
            assert commits.count("COMMIT") == count
            assert outbox.counts() == (0, left, 0)


def test_no_message_is_looked_for_by_a_walk_through_all_bodies(tmp_path):
    """Near the quota that would keep the others waiting for longer than they do."""
    statements = []
    with filled(tmp_path / "outbox.db", 3) as outbox:
        outbox._db.set_trace_callback(statements.append)
        outbox.doubt_sent(0)
        outbox.mark_stored({"0": None})
        outbox.mark_unread({"1": None})
        outbox.is_stored(0, 9)
        outbox.send_unstored()
        outbox.send_unread()
        outbox.expect_no_collector()
        outbox.retry_refused(every=False)
        outbox.retry_refused()
        outbox.refused()
        outbox.backlog()
        outbox.device_ids()
        outbox.pending(1)
        outbox.send_again(0)
        outbox.forget_sent(CLOCK_SET_S, keep_rows=0)
        outbox._db.set_trace_callback(None)
        asked = {sql for sql in statements if sql.startswith(("SELECT", "UPDATE", "DELETE"))}
        steps = [(sql, row[3]) for sql in asked for row in outbox._db.execute(f"EXPLAIN QUERY PLAN {sql}")]
    direct = (" INDEX ", "(rowid=?)")
    walks = [(sql, step) for sql, step in steps if " outbox" in step and not any(how in step for how in direct)]
    assert not walks


def test_room_that_was_freed_does_not_count_as_used(tmp_path):
    with Outbox(tmp_path / "outbox.db") as outbox:
        outbox.add("a", "t", 1, b"x" * 1_000_000)
        assert outbox.used_bytes() > 1_000_000
        outbox.mark_sent(1)
        outbox.mark_stored({"a": None})
        assert outbox.used_bytes() < 100_000


def test_another_s_commit_under_way_makes_it_unwritable(tmp_path, monkeypatch):
    monkeypatch.setattr(outbox_module, "BUSY_S", 0.1)
    path = tmp_path / "outbox.db"
    with Outbox(path) as outbox, closing(sqlite3.connect(path, isolation_level=None)) as other:
        assert outbox.is_writable()
        other.execute("BEGIN IMMEDIATE")
        assert not outbox.is_writable()


def test_a_damaged_outbox_is_put_aside_and_what_is_readable_taken_over(tmp_path):
    path = tmp_path / "outbox.db"
    with Outbox(path) as outbox:
        outbox.keep({"schedule": b"1"})
        for number in range(200):
            outbox.add(str(number), "t", 1, b"x" * 800)
    with path.open("r+b") as file:
        file.seek(100_000)
        file.write(b"\xff" * 10_000)
    outbox, told = open_or_salvage(path)
    with outbox:
        taken = keys(outbox)
        assert 100 < len(taken) < 200
        assert set(taken) <= set(map(str, range(200)))
        assert f"{len(taken)} messages recovered, the old file is now outbox.db.damaged-1" in told
        assert outbox.kept("schedule") == b"1"
    assert (tmp_path / "outbox.db.damaged-1").exists()
    again, told = open_or_salvage(path)
    with again:
        assert told is None
        assert keys(again) == taken


def page_of(path, seq):
    """Return the number of the page that holds this row; bodies fill one each."""
    with closing(sqlite3.connect(path)) as database:
        (key,) = database.execute("SELECT key FROM outbox WHERE seq = ?", (seq,)).fetchone()
    (place,) = [at for at in range(0, path.stat().st_size, 4096) if f"<{key}>".encode() * 3 in pages(path, at)]
    return place


def pages(path, at):
    with path.open("rb") as file:
        file.seek(at)
        return file.read(4096)


def spoil(path, at):
    with path.open("r+b") as file:
        file.seek(at)
        file.write(b"\xff" * 4096)


def of_every_state(path):
    """Make an outbox that holds a row of each kind, then spoil the page of its last row, where a torn write is."""
    with Outbox(path) as outbox:
        outbox.keep({"schedule": b"1"})
        for key in ("sent", "unstored", "refused", "waiting", "torn"):
            outbox.add(key, f"t/{key}", 1, f"<{key}>".encode() * 300)
        outbox.mark_sent(1, at_s=CLOCK_SET_S)
        outbox.mark_sent(2, at_s=CLOCK_SET_S, unstored=True)
        outbox.mark_refused(3, "Not authorized")
    spoil(path, page_of(path, 5))


def assert_whole(outbox, schedule=b"1"):
    assert keys(outbox) == ["unstored", "refused", "waiting"]  # whether a refused one may go now, its broker says
    assert outbox.pending(9)[2][2:5] == ("t/waiting", 1, b"<waiting>" * 300)
    assert outbox.counts() == (3, 0, 0)
    assert outbox.kept("schedule") == schedule


def test_all_that_was_not_delivered_is_taken_over_where_the_last_page_is_torn(tmp_path):
    path = tmp_path / "outbox.db"
    of_every_state(path)
    (tmp_path / "outbox.db.salvaging").write_bytes(b"what an earlier start has left unfinished")
    outbox, told = open_or_salvage(path)
    with outbox:
        assert_whole(outbox)
        assert "3 messages recovered" in told
    assert sorted(file.name for file in tmp_path.iterdir()) == ["outbox.db", "outbox.db.damaged-1"]


MOST_STEPS = 20
# ends a start at its n-th step on the file system as a kill does, and says how many there were where it gets through
DYING = """
import os, sys
from pathlib import Path
from benchd.daemon.delivery.outbox import open_or_salvage
left = int(sys.argv[2])
def step(event, _):
    global left
    if event in ("os.rename", "os.remove", "sqlite3.connect"):
        left -= 1
        if left < 0:
            os.kill(os.getpid(), 9)
sys.addaudithook(step)
outbox, told = open_or_salvage(Path(sys.argv[1]))
"""


def test_a_kill_at_any_step_of_a_salvage_loses_nothing_and_the_next_start_says_what_was(tmp_path):
    made = tmp_path / "made" / "outbox.db"
    made.parent.mkdir()
    of_every_state(made)
    with Outbox(made) as outbox:
        outbox.keep({"schedule": b"2"})  # in the log alone, as long as the file is open
        copies = [shutil.copytree(made.parent, tmp_path / str(step)) for step in range(MOST_STEPS)]
    for step, folder in enumerate(copies):
        path = folder / "outbox.db"
        died = subprocess.run([sys.executable, "-c", DYING, str(path), str(step)], check=False).returncode
        outbox, told = open_or_salvage(path)
        with outbox:
            assert_whole(outbox, schedule=b"2")
        assert [file.name for file in path.parent.glob("*.salvag*")] == []
        if died == 0:
            break
        assert died == -signal.SIGKILL
        # but for the last step, when it is done and the new outbox was to be opened
        assert told is None or told.endswith("the old file is now outbox.db.damaged-1")
        assert (path.parent / "outbox.db.damaged-1").exists()
    assert 6 < step < MOST_STEPS - 1


def test_a_file_that_is_no_database_at_all_is_put_aside(tmp_path):
    path = tmp_path / "outbox.db"
    not_a_database(path)
    outbox, told = open_or_salvage(path)
    with outbox:
        assert keys(outbox) == []
    assert "file is not a database" in told


def not_a_database(path):
    path.write_bytes(b"no database, " * 100)


def torn(path):
    with Outbox(path) as outbox:
        for number in range(200):
            outbox.add(str(number), "t", 1, b"x" * 800)
    with path.open("r+b") as file:
        file.seek(4096)
        file.write(b"\xff" * 40_000)


def newer(path):
    Outbox(path).close()
    with closing(sqlite3.connect(path)) as database:
        database.execute("PRAGMA user_version=99")


def of_another_program(path):
    with closing(sqlite3.connect(path)) as database:
        database.execute("CREATE TABLE theirs(x)")
        database.execute("PRAGMA user_version=1")


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (not_a_database, r"outbox\.db: file is not a database; move it away"),
        (torn, r"outbox\.db: database disk image is malformed; move it away"),
        (newer, r"outbox\.db: of another benchd \(version 99, not 1\)"),
        (of_another_program, r"outbox\.db: a database of another program; choose another folder"),
        (Path.mkdir, r"outbox\.db: unable to open database file; check that it can be written"),
        (lambda path: path.symlink_to("/dev/full/outbox.db"), r"outbox\.db: unable to open database file"),
    ],
    ids=["text", "torn", "newer", "foreign", "folder", "no-folder"],
)
def test_a_file_that_is_no_outbox_is_named_with_the_remedy_and_left_alone(tmp_path, spoil, message):
    path = tmp_path / "outbox.db"
    spoil(path)
    before = path.read_bytes() if path.is_file() else None
    with pytest.raises(UsageError, match=message), Outbox(path) as outbox:
        outbox.pending(1000)
    assert (path.read_bytes() if path.is_file() else None) == before


def test_a_folder_that_cannot_be_made_is_named_with_the_cause(tmp_path):
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(UsageError, match=r"file/outbox\.db: (File exists|Not a directory)"):
        Outbox(tmp_path / "file" / "outbox.db")


def test_a_read_only_disk_costs_no_descriptor_for_each_opening(tmp_path):
    path = tmp_path / "disk" / "outbox.db"

    def held():
        return [link for link in Path("/proc/self/fd").iterdir() if os.path.realpath(link) == str(path)]

    with failing_ext4(tmp_path / "image", tmp_path / "disk") as fail, Outbox(path) as outbox:
        outbox.add("a", "t", 1, b"1")
        fail("an error of the test")
        counts = []
        for _ in range(4):
            with Outbox(path) as again:
                assert [row.key for row in again.pending(10)] == ["a"]
                with pytest.raises(UsageError, match="readonly"):
                    again.add("b", "t", 1, b"2")
            counts.append(len(held()))
        assert counts == counts[:1] * 4
    assert not held()
