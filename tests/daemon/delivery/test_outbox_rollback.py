"""Upgrade and rollback of an outbox with a backlog of 1,000 results, between each two of three layouts."""

import shutil
import signal
import sqlite3
import subprocess
import sys
from contextlib import closing

import pytest

from benchd.daemon.delivery import outbox as module
from benchd.daemon.delivery.outbox import _MIGRATIONS, CLOCK_SET_S, JOURNALLED, STREAM, Outbox, of_layout
from benchd.daemon.delivery.rollback import take_back

BACKLOG = 1000
NEXT = ("ALTER TABLE outbox ADD COLUMN priority INTEGER NOT NULL DEFAULT 0", "DROP INDEX outbox_sent")
HERE = len(_MIGRATIONS)
UNNUMBERED = 2  # the last layout that gave results no number


@pytest.fixture
def path(tmp_path):
    return tmp_path / "outbox.db"


@pytest.fixture
def newer(monkeypatch):
    """Return a function that opens an outbox as the next version does."""

    def opened(path):
        with monkeypatch.context() as patched:
            patched.setattr(module, "_MIGRATIONS", (*_MIGRATIONS, NEXT))
            return Outbox(path)

    return opened


def make(path, layout):
    """Write an outbox of an earlier layout by its statements, with a backlog."""
    with closing(sqlite3.connect(path)) as old:
        for statement in (text for migration in _MIGRATIONS[:layout] for text in migration):
            old.execute(statement)
        rows = [(str(number), f"t/result/{number}", 1, b"x" * 800) for number in range(BACKLOG)]
        old.executemany("INSERT INTO outbox(key, topic, qos, body) VALUES (?, ?, ?, ?)", rows)
        old.execute(f"PRAGMA user_version={layout}")
        old.commit()


def read(path):
    """Return the layout of the file and the state of each key in it, as SQLite reads them."""
    with closing(sqlite3.connect(path)) as found:
        (layout,) = found.execute("PRAGMA user_version").fetchone()
        return layout, dict(found.execute("SELECT key, state FROM outbox ORDER BY seq"))


def test_from_the_earlier_layout_and_back_to_it_by_the_command_of_the_installer(path):
    make(path, HERE - 1)
    with Outbox(path) as outbox:
        assert [row.key for row in outbox.pending(2000)] == [str(number) for number in range(BACKLOG)]
        outbox.mark_sent(1, 2, at_s=CLOCK_SET_S, unstored=True)
        outbox.mark_stored({"0": None})
        outbox.add("since", "t", 1, b"x")
    command = [sys.executable, "-m", "benchd.daemon.delivery.rollback", str(path), str(HERE - 1)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert f"{BACKLOG} messages taken over" in done.stdout
    layout, states = read(path)
    assert layout == HERE - 1
    expected = {"1": "sent", **dict.fromkeys(map(str, range(2, BACKLOG)), "pending"), "since": "pending"}
    assert states == expected
    with Outbox(path) as outbox:
        assert (outbox.counts().pending, outbox.counts().sent) == (BACKLOG - 1, 1)
    assert subprocess.run([*command[:-1], str(HERE)], capture_output=True, text=True, check=True).stdout == ""


def test_back_from_the_next_layout_with_the_facts_of_before(path, newer):
    make(path, HERE)
    with Outbox(path) as outbox:
        outbox.keep({"schedule": b'{"of": "this version"}'})
    with newer(path) as outbox:
        outbox.keep({"schedule": b"another shape"})
        outbox.add("since", "t", 1, b"x")
    said = take_back(path)
    assert f"{BACKLOG + 1} messages taken over, the schedule is of before its upgrade" in said
    with Outbox(path) as outbox:
        assert outbox.counts().pending == BACKLOG + 1
        assert outbox.kept("schedule") == b'{"of": "this version"}'
    with newer(path) as outbox:  # forth again
        assert outbox.counts().pending == BACKLOG + 1
    assert take_back(path.with_name("absent")) is None


DYING = """
import os, sys
from pathlib import Path
from benchd.daemon.delivery.rollback import take_back
left = int(sys.argv[2])
def step(event, _):
    global left
    if event in ("os.rename", "os.remove", "os.link", "sqlite3.connect"):
        left -= 1
        if left < 0:
            os.kill(os.getpid(), 9)
sys.addaudithook(step)
take_back(Path(sys.argv[1]))
"""


def test_a_kill_at_any_step_on_the_way_back_loses_nothing(path, newer):
    make(path, HERE)
    with newer(path) as outbox:
        outbox.add("since", "t", 1, b"x")
    for step in range(20):
        folder = path.parent / str(step)
        folder.mkdir()
        for file in (path, of_layout(path, HERE)):
            shutil.copy(file, folder)
        mine = folder / path.name
        died = subprocess.run([sys.executable, "-c", DYING, str(mine), str(step)], check=False).returncode
        take_back(mine)
        with Outbox(mine) as outbox:
            assert outbox.counts().pending == BACKLOG + 1
        if died == 0:
            break
        assert died == -signal.SIGKILL
    assert 5 < step < 19


def test_each_result_keeps_its_number_and_none_is_given_twice(path, newer):
    make(path, HERE)
    with newer(path) as outbox:
        stream = outbox.kept(STREAM)
        outbox.add("since", "t/result/since", 1, b"x")
        outbox.mark_sent(1, BACKLOG + 1, at_s=CLOCK_SET_S)
        outbox.mark_stored({"0": None, "since": None})
    take_back(path)
    with Outbox(path) as outbox:
        outbox.add("last", "t/result/last", 1, b"x")
        assert [row.number for row in outbox.pending(2000)] == [*range(2, BACKLOG + 1), BACKLOG + 2]
        assert outbox.kept(STREAM) == stream
    take_back(path, UNNUMBERED)
    with Outbox(path) as outbox:  # numbered again, as the results of another outbox
        assert [row.number for row in outbox.pending(2000)] == [*range(1, BACKLOG + 1)]
        assert outbox.kept(STREAM) != stream


def test_back_without_a_copy_from_before(path, newer):
    make(path, HERE)
    with newer(path) as outbox:
        outbox.keep({"schedule": b"[]"})
    of_layout(path, HERE).unlink()
    assert "because there is no copy" in take_back(path)
    with Outbox(path) as outbox:
        assert (outbox.counts().pending, outbox.kept("schedule")) == (BACKLOG, b"[]")


def test_messages_in_a_form_of_which_nothing_is_known_are_left_in_the_newer_file(path, newer):
    make(path, HERE)
    with newer(path) as outbox:
        outbox._db.execute("ALTER TABLE outbox RENAME COLUMN body TO content")
    assert "its messages cannot be read" in take_back(path)
    with Outbox(path) as outbox:
        assert outbox.counts().pending == BACKLOG
        assert outbox.kept(JOURNALLED) == b"", "the service would not fill it from the journal"
    assert path.with_name("outbox.db.newer").exists()


def test_an_upgrade_on_a_disk_without_room_for_a_copy_goes_on_and_says_so(small_disk):
    path = small_disk / "outbox.db"
    make(path, HERE - 1)
    (small_disk / "filler").write_bytes(bytes(2_600_000))
    with Outbox(path) as outbox:
        assert outbox.counts().pending == BACKLOG
        assert outbox.take_lost() == ["no copy of the outbox was made before its upgrade: database or disk is full"]
    assert sorted(file.name for file in small_disk.iterdir()) == ["filler", "outbox.db"]
