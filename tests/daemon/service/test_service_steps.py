"""Steps of the service in this process; tests/e2e/test_service.py runs the whole of it."""

import os
import signal
import socket
import time
from contextlib import closing
from dataclasses import replace
from itertools import pairwise
from types import SimpleNamespace

import msgspec
import pytest
from broker import HOST, free_port
from links import unstarted
from machines import write
from manifests_made import manifest, write_golden
from records_made import made

from benchd.daemon import records
from benchd.daemon.config import Conditions, Shipped, Suite
from benchd.daemon.delivery.disk_reserve import Reserve
from benchd.daemon.delivery.outbox import CLOCK_SET_S, Outbox
from benchd.daemon.delivery.session import Arrived
from benchd.daemon.delivery.sinks import JournalSink
from benchd.daemon.delivery.topics import Topics
from benchd.daemon.errors import NotAvailable, UsageError
from benchd.daemon.machine import folders, lock
from benchd.daemon.machine.lock import Busy, MachineLock
from benchd.daemon.measuring import plan, verifying
from benchd.daemon.measuring.session import Session
from benchd.daemon.measuring.supervisor import Supervisor
from benchd.daemon.records import Case, Sample
from benchd.daemon.sampling import child
from benchd.daemon.service import announcements, deployed, parts
from benchd.daemon.service.between import Between
from benchd.daemon.service.cases import Cases
from benchd.daemon.service.parts import Base, Places
from benchd.daemon.service.schedule import begin
from benchd.daemon.service.service import Service
from benchd.daemon.verdicts import manifest as manifests
from benchd.exporters import artifacts

SUITE = '[device]\nid = "d"\n[[suite]]\nname = "s"\nmodels = ["square"]\npreset = "quick"\n'
LIMITS = "[limits]\nwarm_up_cap_s = 0.1\nmeasure_cap_s = 0.1\ncheck_images = 1\n"


@pytest.fixture
def service(tmp_path, monkeypatch):
    """A service that has started without a GPU, and whose broker is away."""
    monkeypatch.setattr(plan, "has_gpu", lambda *root: False)
    path, (reader, writer) = tmp_path / "benchd.toml", socket.socketpair()
    path.write_text(f'{SUITE}{LIMITS}[mqtt]\nurl = "mqtt://{HOST}:{free_port()}"\n')
    with closing(reader), closing(writer), Outbox(tmp_path / "outbox.db") as outbox:
        places, reserve = Places(tmp_path, tmp_path), Reserve(tmp_path / "reserve")
        service, journal = Service(path, places), JournalSink(tmp_path / "records.jsonl", reserve)
        service._base, service._wake_end = Base(places, "boot", reserve, outbox, journal), writer
        service._startup(None)
        yield service
        service._now.publisher.link.stop()
        journal._journal.close()


def test_a_gpu_that_the_driver_shows_late_is_what_the_next_pass_is_planned_for(service, monkeypatch):
    service._begin_due()
    link, cases = service._now.publisher.link, service._now.agenda.cases["s"]
    assert service._now.machine.device == "cpu"
    monkeypatch.setattr(plan, "has_gpu", lambda *root: True)
    service._base.every._done_s.clear()
    service._begin_due()
    assert service._now.machine.device == "cuda"
    assert set(service._now.agenda.cases["s"]) > set(cases)
    assert service._now.publisher.link is not link, "info still names the CPU"


def test_a_gpu_that_may_not_be_opened_is_a_problem_of_its_health(service, monkeypatch):
    monkeypatch.setattr(plan, "has_gpu", lambda *root: True)
    monkeypatch.setattr(plan, "closed_gpu", lambda *root: "/dev/nvmap cannot be opened")
    service._begin_due()
    assert service._now.machine.device == "cuda"
    assert service._between.health().problem == "/dev/nvmap cannot be opened"


def test_an_outbox_that_a_connection_cannot_write_is_a_problem_of_its_health(service, tmp_path):
    def problem():
        agenda, outbox = service._now.agenda, service._base.outbox
        return announcements.health(activity, agenda, "d", link, outbox, tmp_path).problem

    activity = announcements.ServiceActivity()
    with unstarted(tmp_path / "outbox.db", Topics("d")) as link:
        link.seen.unwritable = "outbox x: database is locked"
        assert problem() is None, "not known while nothing is connected"
        link.seen.connected = True
        assert problem() == "degraded:outbox: nothing is delivered: outbox x: database is locked"
        activity.problem = "degraded:disk: Read-only file system"
        assert problem() == activity.problem


def test_the_gpu_that_is_measured_is_the_one_that_records_and_info_name(service, tmp_path, monkeypatch):
    (tmp_path / "nvidia-smi").write_text('#!/bin/sh\necho "$1, 560.35.03, 170 W"\n')
    (tmp_path / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    machine = plan.Machine("cuda", has_cxx=True, gpu_uuid="GPU-1a2b")
    now = replace(service._now, machine=machine)
    info = announcements.info(now.settings.device, "d", "boot", machine, now.agenda)
    session = Cases(service._base, now, service._between, None, lambda: False).session
    for environment in (session.run("suite").environment, info.environment):
        assert environment.gpu == "--id=GPU-1a2b"


def test_a_run_that_was_held_off_too_long_is_measured_and_its_record_says_so(service, monkeypatch):
    cases = service._cases
    service._now.agenda.begin(Suite(models=["square"], options={"size": [16]}, variants=["eager"], preset="quick"))
    with MachineLock():
        assert cases.next() is None
        assert service._base.activity.waiting_for.startswith("this machine is already being measured")
        service._base.every._done_s.clear()
        monkeypatch.setattr(lock, "PATIENCE_S", 0.0)
        cases.measure(*cases.next())
    cases.session.rest()
    rows = [(row.topic, row.body) for row in service._base.outbox.pending(100)]
    (result,) = [records.decode(body) for topic, body in rows if "/result/" in topic]
    assert (result.status, "lock_ignored" in result.flags) == ("ok", True)
    assert any(b'"lock_ignored"' in body for topic, body in rows if topic.endswith("/event"))


def test_a_reload_takes_nothing_from_the_time_that_a_run_has_waited(service, monkeypatch):
    service._now.agenda.begin(Suite(models=["square"], options={"size": [16]}, variants=["eager"], preset="quick"))
    with MachineLock():
        assert service._cases.next() is None
        with pytest.raises(Busy), service._base.lock.held(""):
            pass
        waited_s = time.monotonic() + lock.PATIENCE_S
        service._reload()
        service._base.every._done_s.clear()
        monkeypatch.setattr(lock, "time", SimpleNamespace(monotonic=lambda: waited_s))
        assert service._cases.next() is not None
        with pytest.raises(Busy), service._base.lock.held(""):  # of another folder, which has not waited
            pass


def test_the_machine_is_read_once_for_all_runs_that_wait(service, tmp_path, monkeypatch):
    """Each run of nvpmodel may hang for a third of the time after which systemd ends the service."""
    log = tmp_path / "log"
    (tmp_path / "nvpmodel").write_text(f"#!/bin/sh\necho asked >>{log}; echo NV Power Mode: 15W\n")
    (tmp_path / "nvpmodel").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    agenda = service._now.agenda
    for name, mode in (("a", "30W"), ("b", "50W"), ("c", "MAXN")):
        suite = Suite(name=name, models=["square"], conditions=Conditions(power_mode=mode))
        agenda.state = begin(agenda.state, suite, agenda.cases["s"])
    assert service._cases.next() is None
    assert (service._base.activity.waiting_for, log.read_text()) == ("a: power mode 15W, not 30W", "asked\n")
    service._base.every._done_s.clear()
    assert service._cases.next() is None
    assert log.read_text() == "asked\n" * 2, "a later call reads again"


@pytest.mark.parametrize(
    ("device", "cpus", "timed", "count"),
    [("cpu", 2, True, 0), ("cpu", 2, False, 1), ("cpu", 3, True, 1), ("cuda", 2, True, 1)],
)
def test_no_telemetry_is_sent_while_a_case_on_all_cores_is_timed(service, monkeypatch, device, cpus, timed, count):
    sent, now = [], replace(service._now, machine=plan.Machine(device, has_cxx=True))
    now.agenda.begin(Suite(models=["square"], variants=["eager"], preset="quick"))
    entry, (planned,) = service._cases.next()
    service._base.activity.running = (entry, planned)
    monkeypatch.setattr(os, "cpu_count", lambda: cpus)
    monkeypatch.setattr(now.publisher.link, "telemetry", sent.append)
    now.publisher.timed = timed
    session = SimpleNamespace(latest_samples=lambda: [Sample(1, "power_w", 5.0, "fake")])
    Between(service._base, now, None).attend(session)
    assert len(sent) == count


def test_a_reload_keeps_what_the_old_connection_has_heard(service):
    old = service._now.publisher.link
    command = Arrived("benchd/v1/d/cmd/list", b"{}", arrived_s=0.0)
    old.seen.commands.append(command)
    old.seen.events.append(("not_sent", "x"))
    service._reload()
    new = service._now.publisher.link
    assert new is not old
    assert (list(new.seen.commands), list(new.seen.events)) == ([command], [("not_sent", "x")])


@pytest.mark.parametrize(
    ("table", "words"),
    [
        ('[[suite]]\nname = "b"\nmodels = ["square"]\ndata = "imagefolder:x"', "the suites s and b measure square,"),
        ('[sampling]\nsources = ["foo"]', "configuration "),
    ],
    ids=["one case with other images", "unknown source"],
)
def test_a_reload_of_what_cannot_be_measured_keeps_the_old_configuration(service, monkeypatch, table, words):
    told, before = [], service._now
    monkeypatch.setattr(service._between, "event", lambda *event: told.append(event))
    with service._path.open("a") as file:
        file.write(f"{table}\n")
    service._reload()
    ((event, why),) = told
    assert (event, service._now) == ("reload_failed", before)
    assert why.startswith(words)


@pytest.mark.parametrize(
    ("table", "words"),
    [
        ('[sampling]\nsources = ["foo"]', r"sampling.sources: unknown sampler 'foo'. Valid: procfs, ina3221, ina238,"),
        ('[sampling]\nsources = ["rapl", "rapl"]', r"sampling.sources: sampler 'rapl' is listed twice"),
        ('[mqtt]\ncollectors = ["a/b"]', r"mqtt.collectors 'a/b': use at most 64 letters, digits, '.', '-' and '_'"),
    ],
)
def test_a_name_that_only_a_later_case_or_result_would_miss_is_refused_at_the_start(tmp_path, table, words):
    (tmp_path / "benchd.toml").write_text(table)
    with pytest.raises(UsageError, match=rf"configuration .*benchd.toml: {words}"):
        Service(tmp_path / "benchd.toml", Places(tmp_path, tmp_path))


def test_a_signal_that_comes_before_the_session_listens_ends_the_case_too(service):
    session = service._cases.session
    assert session.reason_to_end() is None
    service._on_signal(signal.SIGTERM, None)
    assert session.reason_to_end() == "interrupted by a signal"
    assert session.interrupted, "a folder that was being verified would be called broken"


def test_a_shipped_folder_that_the_service_may_not_read_ends_no_service(service, tmp_path):
    service._settings = replace_shipped(service, tmp_path / ("n" * 300) / "net")
    service._configure_again("a folder")
    service._verify_due()
    (said,) = [one.said for one in service._deployments.standings.values()]
    assert (said.verdict, said.reason) == ("broken", "net/manifest.json: File name too long")


def test_what_was_shipped_at_the_shell_is_another_user_s_and_the_alarm_names_the_key(service, tmp_path, monkeypatch):
    write(tmp_path / "net", {"code/net.py": ""})
    write_golden(tmp_path / "net", "input0:x", "exact0:y")
    shipped = manifest(resources=manifests.resources(tmp_path / "net"))
    (tmp_path / "net/manifest.json").write_bytes(manifests.encode(shipped))
    monkeypatch.setenv("STATE_DIRECTORY", str(tmp_path / "of-the-shell"))
    manifests.remember(tmp_path / "net")
    monkeypatch.setenv("STATE_DIRECTORY", str(tmp_path / "of-the-service"))
    service._settings = replace_shipped(service, tmp_path / "net")
    service._configure_again("a folder")
    service._verify_due()
    (said,) = [one.said for one in service._deployments.standings.values()]
    assert said.reason == (
        f"net: loading it runs Python code (code/), which this user ({folders.user()}) did not ship; if you know who "
        "did, give --trust-code, or for the service set trust_code = true in [[shipped]]"
    )
    assert service._deployments.next() is None
    trusted = msgspec.structs.replace(service._settings.shipped[0], trust_code=True)
    service._settings = msgspec.structs.replace(service._settings, shipped=[trusted])
    service._configure_again("the key is set")
    assert service._deployments.next() == trusted, "it is verified again"


def test_a_line_that_a_power_cut_has_torn_hides_no_other_result(service, tmp_path):
    journal = service._base.journal._journal
    (tmp_path / "records.jsonl").write_bytes(b'{"half')
    journal.append(records.encode(made()))
    assert [record.run_id for record in service._deployments._results()] == [made().run_id]


def test_a_case_whose_file_is_gone_is_skipped_with_the_cause(service, tmp_path):
    weights = tmp_path / "w.pt"
    weights.touch()
    service._now.agenda.begin(Suite(models=["snn_onepass"], variants=["eager"], weights=str(weights), preset="quick"))
    weights.unlink()
    assert service._cases.next() is None
    assert f"skipped: --weights {weights}: no such file" in service._base.activity.waiting_for


def test_a_shipped_folder_that_is_gone_breaks_its_promise_once(service, tmp_path):
    settings = replace_shipped(service, tmp_path / "net")
    service._settings = settings
    service._configure_again("a folder")
    for _ in range(2):
        service._base.every._done_s.clear()
        service._verify_due()
    names = [msgspec.json.decode(row.body) for row in service._base.outbox.pending(100) if row.topic.endswith("/event")]
    broken = [one["detail"] for one in names if one["event"] == "promise_broken"]
    assert len(broken) == 1
    assert "no manifest.json" in broken[0]
    assert str(tmp_path) not in broken[0]
    assert service._deployments.standings["net"].said.verdict == "broken"
    assert service._deployments.next() is None
    again = service._base.outbox.kept_as(deployed.SHIPPED, deployed.decode, {})
    assert again == service._deployments.standings


def test_a_shipped_folder_that_is_no_longer_configured_is_cleared_on_the_broker_at_every_reload(service, tmp_path):
    def retained():
        return service._now.publisher.link._documents.get(Topics("d").shipped("net"))

    without, service._settings = service._settings, replace_shipped(service, tmp_path / "net")
    service._configure_again("a folder")
    service._verify_due()
    for _ in ("reload while the broker is away", "the next one"):
        service._settings = without
        service._configure_again("no folder")
        assert retained() == b""
    service._settings = replace_shipped(service, tmp_path / "net")
    service._configure_again("the folder again")
    assert retained() is None


def test_a_shipped_folder_that_is_replaced_is_verified_again(service, tmp_path):
    def is_due_once():
        is_due = service._deployments.next() is not None
        service._base.every._done_s.clear()
        service._verify_due()
        assert service._deployments.next() is None
        return is_due

    folder = tmp_path / "net"
    service._settings = replace_shipped(service, folder)
    service._configure_again("a folder")
    assert is_due_once()
    assert not is_due_once()
    folder.mkdir()
    for name in ("manifest.json", "model.onnx"):
        (folder / name).write_text("{}")
        assert is_due_once(), f"{name} arrives late, as from a mount or in a copy"
    service._settings = replace_shipped(service, tmp_path / "other" / "net")
    service._configure_again("another folder of the same name")
    assert is_due_once()


def test_a_full_disk_breaks_no_promise(service, tmp_path, monkeypatch):
    monkeypatch.setattr(service._base.reserve, "hold", lambda: "No space left on device")
    service._settings = replace_shipped(service, tmp_path / "net")
    service._configure_again("a folder")
    service._verify_due()
    assert service._deployments.standings == {}
    assert service._between.health().problem == "degraded:disk: No space left on device"
    monkeypatch.undo()
    service._base.every._done_s.clear()
    service._verify_due()
    assert service._deployments.standings["net"].said.verdict == "broken"
    assert service._between.health().problem is None


@pytest.mark.parametrize("number", deployed.LACKS)
@pytest.mark.parametrize("is_of_the_lock", [False, True])
def test_a_machine_that_lacks_what_measuring_takes_breaks_no_promise(
    service, tmp_path, monkeypatch, number, is_of_the_lock
):
    def read(folder, beat):
        error = OSError(number, os.strerror(number))
        if is_of_the_lock:
            raise NotAvailable("the lock cannot be opened") from error
        raise error

    monkeypatch.setattr(manifests, "read", read)
    service._settings = replace_shipped(service, tmp_path / "net")
    service._configure_again("a folder")
    service._verify_due()
    assert service._deployments.standings == {}
    assert service._deployments.next() is None, "it is not tried again at once"


@pytest.fixture
def large(service, tmp_path, monkeypatch):
    """A configured folder whose file is read in ten pieces."""
    monkeypatch.setattr(artifacts, "_PIECE", 10)
    folder = tmp_path / "net"
    write(folder, {"weights.safetensors": "w" * 100})
    write_golden(folder, "input0:x", "exact0:y")
    shipped = manifest(case=Case(model="square"), resources=manifests.resources(folder))
    (folder / "manifest.json").write_bytes(manifests.encode(shipped))
    service._settings = replace_shipped(service, folder)
    service._configure_again("a folder")
    return service._settings.shipped[0]


def test_a_promise_of_the_cpu_is_verified_on_the_cpu_beside_a_gpu(service, large, monkeypatch):
    def verify(folder, shipped, session, *given, **named):
        assert session.machine.device == session.run("s").environment.device == "cpu"
        raise NotAvailable("on the CPU")

    monkeypatch.setattr(plan, "has_gpu", lambda *root: True)
    service._find_gpu()
    session = service._cases.session
    assert session.run("s").environment.device == "cuda"
    monkeypatch.setattr(verifying, "verify", verify)
    service._deployments.verify(large, session)
    assert service._deployments.standings["net"].said.reason == "on the CPU"
    assert session.machine.device == session.run("s").environment.device == "cuda"


@pytest.mark.parametrize("process", ["sampler", "worker"])
def test_what_keeps_a_process_from_starting_breaks_no_promise(service, large, tmp_path, monkeypatch, process):
    if process == "sampler":
        monkeypatch.setattr(child, "START_S", 0.0)
    else:
        write(tmp_path / "runs", {"logs": "where the folder of the workers' logs would be"})
    service._deployments.verify(large, service._cases.session)
    assert service._deployments.standings == {}
    assert service._deployments.next() is None, "it is not tried again at once"


def test_the_watchdog_is_fed_while_a_large_folder_is_verified(service, large, monkeypatch):
    """Each step takes 10 of the 30 s after which systemd ends the service."""
    now_s = time.monotonic()
    fed_s = [now_s]

    def slow(owner, name, step=None):
        step = step or getattr(owner, name)

        def slowly(*given, **named):
            nonlocal now_s
            now_s += 10.0
            return step(*given, **named)

        monkeypatch.setattr(owner, name, slowly)

    def measure(supervisor, turns):
        raise NotAvailable("measured")

    monkeypatch.setattr(parts, "time", SimpleNamespace(monotonic=lambda: now_s))
    monkeypatch.setattr(service._base.notifier, "watchdog", lambda: fed_s.append(now_s))
    slow(os, "pread")
    slow(plan.Machine, "environment")
    slow(verifying, "planned")
    slow(Session, "sampler", lambda session, cases: None)
    slow(Supervisor, "in_turn", measure)
    service._deployments.verify(large, service._cases.session)
    assert service._deployments.standings["net"].said.reason == "measured"
    assert max(after - before for before, after in pairwise([*fed_s, now_s])) < 30.0


def test_a_large_folder_that_is_read_ends_with_the_service(service, large, monkeypatch):
    def read(fd, count, offset, pread=os.pread):
        assert offset == 0, "it is read to its end"
        service._on_signal(signal.SIGTERM, None)
        return pread(fd, count, offset)

    monkeypatch.setattr(os, "pread", read)
    service._deployments.verify(large, service._cases.session)
    assert (service._deployments.standings, service._cases.session.interrupted) == ({}, True)


def test_a_file_that_cannot_be_compressed_keeps_no_sent_message(service, tmp_path):
    (tmp_path / "runs/log.gz.part").mkdir(parents=True)
    (tmp_path / "runs/log").touch()
    outbox = service._base.outbox
    outbox.add("a", "t", 1, b"x")
    for row in outbox.pending(100):
        outbox.mark_sent(row.seq, at_s=CLOCK_SET_S + 1)
    service._between._limit_what_is_old()
    assert outbox.counts().sent == 0


def replace_shipped(service, folder):
    return msgspec.structs.replace(service._settings, shipped=[Shipped(path=str(folder))])
