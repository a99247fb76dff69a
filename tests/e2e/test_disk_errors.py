"""A disk that fails under the running service: errors of writing (EIO), and one that the kernel makes read-only."""

import subprocess

import pytest
from disks import failing_ext4, tmpfs
from test_service import LONG_S, eat, journal_of, site, under_way  # noqa: F401 - a fixture
from waiting import WAIT_S, wait_for

from benchd.daemon.service.facts import STATE, FactsFile


@pytest.fixture
def thin_disk(site):  # noqa: F811
    """An ext4 under the state folder on a thin image: once the folder `thin` is full, each of its writes is an EIO."""
    folder = site.folder / "state"
    folder.mkdir()
    with tmpfs(site.folder / "thin", "size=64m") as thin:
        commands = [
            ["truncate", "--size=256M", thin / "image"],
            ["mkfs.ext4", "-q", "-O", "^has_journal", thin / "image"],
            ["mount", "-o", "loop,errors=continue", thin / "image", folder],
        ]
        if any(subprocess.run(command, check=False).returncode for command in commands):
            pytest.skip("needs the right to mount an ext4")
        yield thin
        subprocess.run(["umount", "--lazy", folder], check=True)


def test_a_disk_with_io_errors_ends_no_service_and_costs_no_case(site, thin_disk):  # noqa: F811
    with site.configure(sizes="[16]").service(is_apart=True) as process:
        eat(thin_disk)
        cases = site.command("run", suite="small")["cases"]
        assert waiting_for_the_disk(site)["cases_left"] == len(cases)
        (thin_disk / "filler").unlink()
        site.begun()
        eat(thin_disk)
        # blocks that the image already has take a record, new ones do not
        wait_for(lambda: journal_of(site) or "not kept: square" in (site.folder / "log").read_text(), process)
        (thin_disk / "filler").unlink()
        result = site.until("result/")
        assert result["status"] == "ok"
        wait_for(lambda: result["run_id"] in [record.run_id for record in journal_of(site)], process)
        assert "pass_failed" not in (site.folder / "log").read_text()


def waiting_for_the_disk(site):  # noqa: F811
    """Return the health once the disk keeps the next case from beginning."""
    return site.health_once(lambda health: (health["waiting_for"] or "").startswith("degraded:disk: "))


@pytest.fixture
def failing_disk(site):  # noqa: F811
    """The state folder on a disk that becomes read-only when the yielded function is called."""
    with failing_ext4(site.folder / "image", site.folder / "state") as fail:
        yield fail


def test_a_disk_that_becomes_read_only_during_a_case_does_not_stop_the_service(site, failing_disk):  # noqa: F811
    suite_id, _ = under_way(site, 16)
    with site.configure(cap_s=LONG_S, sizes="[16]").service() as process:
        wait_for(lambda: FactsFile(site.folder / "state/benchd" / STATE).now.running, process)
        failing_disk("an error of the test")
        site.command("cancel", suite_id=suite_id)  # refused if the disk has ended the case
        wait_for(lambda: "Read-only file system" in (site.folder / "log").read_text(), process)
        site.command("run", suite="small")  # if the cancel was first, no case is left that could wait
        assert "Read-only file system" in waiting_for_the_disk(site)["waiting_for"]
        process.terminate()
        assert process.wait(WAIT_S) == 0
