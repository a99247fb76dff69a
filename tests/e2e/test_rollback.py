"""The service goes on after a rollback: what another version has left on the disk stops nothing and loses nothing."""

import pytest
from test_service import Site
from waiting import WAIT_S

from benchd.daemon.delivery.outbox import OUTBOX, Outbox

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
