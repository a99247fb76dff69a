"""The service goes on after a rollback: what another version has left on the disk stops nothing and loses nothing."""

import sqlite3
from contextlib import closing

import pytest
from test_service import Site
from waiting import WAIT_S

from benchd.daemon.delivery.outbox import _MIGRATIONS, OUTBOX, Message, Outbox

# as a later version might keep them: no value has the shape that this one stores
NEWER = {
    "commands": b'{"ids": {"a": 1.0}}',
    "running": b'{"of": "a newer version"}',
    "instance": b'{"name": "a"}',
    "latest": b'{"square,eager,b1,size=16": "2026-01-01T00:00:00Z"}',
    "session": b'{"number": 7}',
    "collectors_silent_s": b'[{"name": "store", "silent_s": 1}]',
    "schedule": b"[1]",
    "standings": b'{"square,eager,b1,size=16": {"slower": "twice"}}',
}


NEWER_KEYS = """
[service]
newer_keys = "warn"
priority = "high"
[of_a_newer_version]
x = 1
"""


@pytest.fixture
def site(tmp_path, mosquitto, child_environment):
    site = Site(tmp_path, mosquitto, child_environment)
    yield site
    site.close()


def stopped(site, process):
    process.terminate()
    site.until("status", state="offline")
    assert process.wait(WAIT_S) == 0


def told(site, event):
    return sorted(found["detail"].partition(" was ")[0] for found in site.seen("event") if found["event"] == event)


@pytest.mark.parametrize("kept", [{"schedule": NEWER["schedule"]}, NEWER], ids=["one", "all"])
def test_values_of_another_version_are_replaced_by_defaults_and_said_once(site, kept):
    with Outbox(site.folder / "state/benchd" / OUTBOX) as outbox:
        outbox.keep(kept)
    for said in (sorted(kept), []):
        site.heard.clear()
        with site.configure(sizes="[16]").service() as process:
            assert site.command("list")["accepted"]
            stopped(site, process)
        assert told(site, "state_lost") == said


def upgraded(path, topic, kept):
    """Leave a backlog of 1,000 in an outbox that a later version has migrated, with its kept values."""
    with Outbox(path) as outbox:
        outbox.add_all([Message(f"d:{number}", f"{topic}{number}", 1, b"{}") for number in range(1000)], kept)
    with closing(sqlite3.connect(path)) as database:
        database.execute("ALTER TABLE outbox ADD COLUMN priority INTEGER NOT NULL DEFAULT 0")
        database.execute(f"PRAGMA user_version={len(_MIGRATIONS) + 1}")


def test_a_service_that_finds_everything_as_a_later_version_left_it_starts_and_delivers_the_backlog(site):
    upgraded(site.folder / "state/benchd" / OUTBOX, f"benchd/v1/{site.device}/result/r", NEWER)
    with site.configure(sizes="[16]", more=NEWER_KEYS).service() as process:
        suite_id = site.command("run", suite="small")["suite_id"]
        while not site.until("result/").get("suite_id"):
            pass
        assert site.seen("result/")[-1]["suite_id"] == suite_id
        stopped(site, process)
    results = [message.topic for message in site.heard if "/result/r" in message.topic]
    assert len(set(results)) == 1000
    assert {"outbox_taken_back", "keys_ignored", "state_lost"} <= {event["event"] for event in site.seen("event")}
