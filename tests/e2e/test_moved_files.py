"""Files that are moved or removed under the running service: its state folder and its logs."""

import shutil

from test_service import journal_of, site  # noqa: F401 - a fixture among them
from waiting import WAIT_S


def test_a_removed_state_folder_is_reported_and_does_not_stop_the_service(site):  # noqa: F811
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
