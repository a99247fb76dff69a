"""Files that are moved or removed under the running service: its state folder, the outbox and the journal."""

import shutil

import pytest
from broker import free_port
from test_service import journal_of, site, without_broker  # noqa: F401 - a fixture among them
from waiting import WAIT_S, wait_for

from benchd.daemon import journal, records
from benchd.daemon.delivery.outbox import OUTBOX, Outbox


def test_a_state_folder_that_is_removed_ends_no_service_and_is_said(site):  # noqa: F811
    folder = site.folder / "state/benchd"
    with site.configure(sizes="[16]").service() as process:
        shutil.rmtree(folder)
        assert site.health_once(lambda health: health["problem"])["problem"].startswith("degraded:disk: ")
        assert site.command("run", suite="small")["accepted"]
        waiting = site.health_once(lambda health: health["waiting_for"])
        assert (waiting["waiting_for"], waiting["problem"]) == ("degraded:disk: No such file or directory",) * 2
        folder.mkdir()
        assert site.until("result/")["status"] == "ok"
        assert site.health_once(lambda health: health["activity"] == "idle")["problem"] is None
        process.terminate()
        assert process.wait(WAIT_S) == 0
    assert len(journal_of(site)) == 1


@pytest.mark.parametrize("put_there", [None, "an outbox", "rubbish"])
def test_an_outbox_that_is_moved_away_is_put_back_with_all_messages(site, tmp_path, put_there):  # noqa: F811
    text = (site.configure().folder / "benchd.toml").read_text()
    (site.folder / "benchd.toml").write_text(text.replace(site.broker.url, f"mqtt://127.0.0.1:{free_port()}"))
    outbox = site.folder / "state/benchd" / OUTBOX
    with site.service(connects=False) as process:
        wait_for(lambda: "started: benchd" in (site.folder / "log").read_text(), process)
        wait_for(lambda: kept(outbox), process)
        keys = kept(outbox)
        for path in outbox.parent.glob(f"{OUTBOX}*"):
            path.replace(tmp_path / path.name)
        if put_there == "an outbox":
            Outbox(outbox).close()
        elif put_there:
            outbox.write_text(put_there)
        wait_for(lambda: "was put back with all messages" in (site.folder / "log").read_text(), process)
        assert keys <= kept(outbox)
        assert len(list(outbox.parent.glob(f"{OUTBOX}.damaged-1"))) == bool(put_there)
        process.terminate()
        assert process.wait(WAIT_S) == 0


def kept(outbox):
    with Outbox(outbox) as found:
        return {row.key for row in found.pending(100)}


def test_a_journal_that_logrotate_moves_away_is_begun_again(site, tmp_path):  # noqa: F811
    path = site.folder / "state/benchd/records.jsonl"
    with site.configure(sizes="[16]").service():
        for number in range(2):
            site.command("run", suite="small")
            site.until("result/")
            path.replace(tmp_path / f"{number}.jsonl")
    for number in range(2):
        assert [records.decode(line).status for line in journal.read(tmp_path / f"{number}.jsonl")] == ["ok"]
