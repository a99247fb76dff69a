"""Steps of the service in this process; tests/e2e/test_service.py runs the whole of it."""

import hashlib
import os
import signal
import socket
import time
from contextlib import closing
from itertools import pairwise
from types import SimpleNamespace

import msgspec
import pytest
from broker import HOST, free_port
from links import unstarted
from machines import write
from manifests_made import manifest
from records_made import made

from benchd.daemon import records
from benchd.daemon.config import Conditions, ShippedFolder, Suite
from benchd.daemon.delivery import disk
from benchd.daemon.delivery.connection import IncomingMessage
from benchd.daemon.delivery.topics import Topics
from benchd.daemon.errors import NotAvailable
from benchd.daemon.machine import folders
from benchd.daemon.measuring import plan
from benchd.daemon.measuring.session import Session
from benchd.daemon.measuring.supervisor import Supervisor
from benchd.daemon.records import Case, Sample
from benchd.daemon.sampling import child
from benchd.daemon.service import announcements, background, cases, configuration, deployed, homeassistant, service
from benchd.daemon.service import state as states
from benchd.daemon.service.facts import STATE, FactsFile
from benchd.daemon.service.schedule import begin
from benchd.daemon.service.state import State
from benchd.daemon.shipping import manifest as manifests
from benchd.daemon.shipping import verifying
from benchd.exporters import artifacts

SUITE = '[device]\nid = "d"\n[[suite]]\nname = "s"\nmodels = ["square"]\npreset = "quick"\n'
LIMITS = "[limits]\nwarm_up_cap_s = 0.1\nmeasure_cap_s = 0.1\ncheck_images = 1\n"


@pytest.fixture
def state(tmp_path, monkeypatch):
    """A service that has started without a GPU, and whose broker is away."""
    monkeypatch.setattr(plan, "has_gpu", lambda *root: False)
    path, (reader, writer) = tmp_path / "benchd.toml", socket.socketpair()
    path.write_text(f'{SUITE}{LIMITS}[mqtt]\nurl = "mqtt://{HOST}:{free_port()}"\n')
    with closing(reader), closing(writer), closing(State(path, tmp_path)) as state:
        state.wake = writer
        service.startup(state, configuration.read(path))
        yield state
        state.link.stop()


def results_of(state):
    return [records.decode(entry.body) for entry in state.records.entries()]


def events_of(state):
    return [msgspec.json.decode(entry.body) for entry in state.events.entries()]


def ship(state, *folders, **fields):
    """Configure these folders to be verified."""
    shipped = [ShippedFolder(path=str(folder), **fields) for folder in folders]
    settings = msgspec.structs.replace(state.settings, shipped=shipped)
    service.configure_again(state, settings, plan.inspect("auto"), "other folders")


def test_a_gpu_that_the_driver_shows_late_is_what_the_next_pass_is_planned_for(state, monkeypatch):
    service.begin_due(state)
    link, cases = state.link, state.agenda.cases["s"]
    assert state.machine.device == "cpu"
    monkeypatch.setattr(plan, "has_gpu", lambda *root: True)
    state.every._done_s.clear()
    service.begin_due(state)
    assert state.machine.device == "cuda"
    assert set(state.agenda.cases["s"]) > set(cases)
    assert state.link is not link, "info still names the CPU"


def test_a_gpu_that_may_not_be_opened_is_a_problem_of_its_health(state, monkeypatch):
    monkeypatch.setattr(plan, "has_gpu", lambda *root: True)
    monkeypatch.setattr(plan, "closed_gpu", lambda *root: "/dev/nvmap cannot be opened")
    service.begin_due(state)
    assert state.machine.device == "cuda"
    assert announcements.health(state).problem == "/dev/nvmap cannot be opened"


def test_what_the_broker_does_not_take_is_a_problem_of_its_health_and_its_status_line(state, tmp_path, monkeypatch):
    with unstarted(tmp_path / "other", Topics("d")) as (link, _), monkeypatch.context() as patched:
        patched.setattr(state, "link", link)
        assert announcements.health(state).problem is None
        state.link.state.connected, state.link.state.reason = True, None
        assert announcements.status_line(state) == "idle; mqtt up"
        state.link.state.denied = "benchd/v1/d/status: broker:1883 refused it: Not authorized"
        assert announcements.health(state).problem == state.link.state.denied
        assert announcements.status_line(state) == f"idle; mqtt up; {state.link.state.denied}"


def test_the_announcement_to_home_assistant_goes_when_it_is_switched_off(state):
    for is_on in (True, False):
        mqtt = msgspec.structs.replace(state.settings.mqtt, home_assistant=is_on)
        service.configure_again(state, msgspec.structs.replace(state.settings, mqtt=mqtt), state.machine, "switched")
        assert bool(state.link._documents[homeassistant.topic("d")]) == is_on


def test_the_gpu_that_is_measured_is_the_one_that_records_and_info_name(state, tmp_path, monkeypatch):
    (tmp_path / "nvidia-smi").write_text('#!/bin/sh\necho "$1, 560.35.03, 170 W"\n')
    (tmp_path / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    service.configure_again(state, state.settings, plan.Machine("cuda", has_cxx=True, gpu_uuid="GPU-1a2b"), "a GPU")
    for environment in (state.session.run("suite").environment, announcements.info(state).environment):
        assert environment.gpu == "--id=GPU-1a2b"


def test_the_machine_is_read_once_for_all_runs_that_wait(state, tmp_path, monkeypatch):
    """Each run of nvpmodel may hang for a third of the time after which systemd ends the service."""
    log = tmp_path / "log"
    (tmp_path / "nvpmodel").write_text(f"#!/bin/sh\necho asked >>{log}; echo NV Power Mode: 15W\n")
    (tmp_path / "nvpmodel").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    agenda = state.agenda
    for name, mode in (("a", "30W"), ("b", "50W"), ("c", "MAXN")):
        suite = Suite(name=name, models=["square"], conditions=Conditions(power_mode=mode))
        state.facts.schedule = begin(state.facts.schedule, suite, agenda.cases["s"])
    assert cases.next_step(state) is None
    assert (state.waiting_for, log.read_text()) == ("a: power mode 15W, not 30W", "asked\n")
    state.every._done_s.clear()
    assert cases.next_step(state) is None
    assert log.read_text() == "asked\n" * 2, "a later call reads again"


@pytest.mark.parametrize(
    ("device", "cpus", "timed", "count"),
    [("cpu", 2, True, 0), ("cpu", 2, False, 1), ("cpu", 3, True, 1), ("cuda", 2, True, 1)],
)
def test_no_telemetry_is_sent_while_a_case_on_all_cores_is_timed(state, monkeypatch, device, cpus, timed, count):
    sent = []
    state.agenda.begin(Suite(models=["square"], variants=["eager"], preset="quick"))
    entry, (planned,) = cases.next_step(state)
    state.running, state.machine, state.is_timed = (entry, planned), plan.Machine(device, has_cxx=True), timed
    state.session = SimpleNamespace(latest_samples=lambda: [Sample(1, "power_w", 5.0, "fake")])
    monkeypatch.setattr(os, "cpu_count", lambda: cpus)
    monkeypatch.setattr(state.link, "telemetry", sent.append)
    background.attend(state)
    assert len(sent) == count


def test_a_reload_keeps_what_the_old_connection_has_heard(state):
    old = state.link
    body = msgspec.json.encode({"id": "1", "client": "me"})
    old.state.commands.append(IncomingMessage("benchd/v1/d/cmd/list", body, arrived_s=0.0))
    old.state.events.append(("not_sent", "x"))
    service.reload(state)
    assert state.link is not old
    assert [command.verb for command in state.commands] == ["list"]
    assert ("not_sent", "x") in [(event["event"], event["detail"]) for event in events_of(state)]


def test_a_signal_that_comes_before_the_session_listens_ends_the_case_too(state):
    session = state.session
    assert session.reason_to_end() is None
    state.on_signal(signal.SIGTERM, None)
    assert session.reason_to_end() == "interrupted by a signal"
    assert session.interrupted, "a folder that was being verified would be called broken"


def test_a_shipped_folder_that_the_service_may_not_read_ends_no_service(state, tmp_path):
    ship(state, tmp_path / ("n" * 300) / "net")
    service.verify_due(state)
    (published,) = [known.published for known in state.facts.shipped.values()]
    assert (published.verdict, published.reason) == ("broken", "net/manifest.json: File name too long")


def test_what_was_shipped_at_the_shell_is_another_user_s_and_the_alarm_names_the_key(state, tmp_path, monkeypatch):
    write(tmp_path / "net", {"code/net.py": ""})
    manifests.write(tmp_path / "net", manifest())
    monkeypatch.setenv("STATE_DIRECTORY", str(tmp_path / "of-the-shell"))
    manifests.remember(tmp_path / "net")
    monkeypatch.setenv("STATE_DIRECTORY", str(tmp_path / "of-the-service"))
    ship(state, tmp_path / "net")
    service.verify_due(state)
    (published,) = [known.published for known in state.facts.shipped.values()]
    assert published.reason == (
        f"net: loading it runs Python code (code/), which this user ({folders.user()}) did not ship; if you know who "
        "did, give --trust-code, or for the service set trust_code = true in [[shipped]]"
    )
    assert deployed.next_due(state) is None
    ship(state, tmp_path / "net", trust_code=True)
    assert deployed.next_due(state) == state.settings.shipped[0], "it is verified again"


def test_a_case_whose_file_is_gone_is_skipped_with_the_cause(state, tmp_path):
    weights = tmp_path / "w.pt"
    weights.touch()
    state.agenda.begin(Suite(models=["snn_onepass"], variants=["eager"], weights=str(weights), preset="quick"))
    weights.unlink()
    assert cases.next_step(state) is None
    assert f"skipped: --weights {weights}: no such file" in state.waiting_for


def test_a_shipped_folder_that_is_gone_breaks_its_promise_once(state, tmp_path):
    ship(state, tmp_path / "net")
    for _ in range(2):
        state.every._done_s.clear()
        service.verify_due(state)
    broken = [event["detail"] for event in events_of(state) if event["event"] == "promise_broken"]
    assert len(broken) == 1
    assert "no manifest.json" in broken[0]
    assert str(tmp_path) not in broken[0]
    assert state.facts.shipped["net"].published.verdict == "broken"
    assert deployed.next_due(state) is None
    assert FactsFile(tmp_path / STATE).now.shipped == state.facts.shipped


def test_a_shipped_folder_that_is_no_longer_configured_is_cleared_on_the_broker_at_every_reload(state, tmp_path):
    def retained():
        return state.link._documents.get(Topics("d").shipped("net"))

    ship(state, tmp_path / "net")
    service.verify_due(state)
    for _ in ("reload while the broker is away", "the next one"):
        ship(state)
        assert retained() == b""
    ship(state, tmp_path / "net")
    assert retained() is None


def test_a_shipped_folder_that_is_replaced_is_verified_again(state, tmp_path):
    def is_due_once():
        is_due = deployed.next_due(state) is not None
        state.every._done_s.clear()
        service.verify_due(state)
        assert deployed.next_due(state) is None
        return is_due

    folder = tmp_path / "net"
    ship(state, folder)
    assert is_due_once()
    assert not is_due_once()
    folder.mkdir()
    for name in ("manifest.json", "model.onnx"):
        (folder / name).write_text("{}")
        assert is_due_once(), f"{name} arrives late, as from a mount or in a copy"
    ship(state, tmp_path / "other" / "net")
    assert is_due_once()


def test_a_full_disk_does_not_break_a_promise(state, tmp_path, monkeypatch):
    monkeypatch.setattr(disk, "lacks", lambda folder: "No space left on device")
    ship(state, tmp_path / "net")
    service.verify_due(state)
    assert state.facts.shipped == {}
    assert announcements.health(state).problem == "degraded:disk: No space left on device"
    monkeypatch.undo()
    state.every._done_s.clear()
    service.verify_due(state)
    assert state.facts.shipped["net"].published.verdict == "broken"
    assert announcements.health(state).problem is None


@pytest.mark.parametrize("number", deployed.LACKS)
@pytest.mark.parametrize("is_of_the_lock", [False, True])
def test_a_machine_that_lacks_what_measuring_takes_breaks_no_promise(
    state, tmp_path, monkeypatch, number, is_of_the_lock
):
    def read(folder, beat):
        error = OSError(number, os.strerror(number))
        if is_of_the_lock:
            raise NotAvailable("the lock cannot be opened") from error
        raise error

    monkeypatch.setattr(manifests, "read", read)
    ship(state, tmp_path / "net")
    service.verify_due(state)
    assert state.facts.shipped == {}
    assert deployed.next_due(state) is None, "it is not tried again at once"


@pytest.fixture
def large(state, tmp_path, monkeypatch):
    """A configured folder whose file is read in ten pieces."""
    monkeypatch.setattr(artifacts, "_PIECE", 10)
    folder = tmp_path / "net"
    record = records.encode(made(case=Case(model="square"))).decode()
    write(folder, {"weights.safetensors": "w" * 100, "records.jsonl": f"{record}\n"})
    manifests.write(folder, manifest(case=Case(model="square")))
    ship(state, folder)
    return state.settings.shipped[0]


def test_a_promise_of_the_cpu_is_verified_on_the_cpu_beside_a_gpu(state, large, monkeypatch):
    def verify(folder, shipped, session, *given, **named):
        assert session.machine.device == session.run("s").environment.device == "cpu"
        raise NotAvailable("on the CPU")

    monkeypatch.setattr(plan, "has_gpu", lambda *root: True)
    service.find_gpu(state)
    session = state.session
    assert session.run("s").environment.device == "cuda"
    monkeypatch.setattr(verifying, "verify", verify)
    deployed.verify(state, large)
    assert state.facts.shipped["net"].published.reason == "on the CPU"
    assert session.machine.device == session.run("s").environment.device == "cuda"


@pytest.mark.parametrize("process", ["sampler", "worker"])
def test_what_keeps_a_process_from_starting_breaks_no_promise(state, large, tmp_path, monkeypatch, process):
    if process == "sampler":
        monkeypatch.setattr(child, "START_S", 0.0)
    else:
        write(tmp_path / "runs", {"logs": "where the folder of the workers' logs would be"})
    deployed.verify(state, large)
    assert state.facts.shipped == {}
    assert deployed.next_due(state) is None, "it is not tried again at once"


def hashed(monkeypatch, read):
    """Call `read` for each piece of a file that is hashed."""

    class Digest:
        def __init__(self):
            self._digest = hashlib.sha256()
            self.hexdigest = self._digest.hexdigest

        def update(self, piece):
            read()
            self._digest.update(piece)

    monkeypatch.setattr(artifacts, "hashlib", SimpleNamespace(sha256=Digest))


def test_the_watchdog_is_fed_while_a_large_folder_is_verified(state, large, monkeypatch):
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

    def slowly_read():
        nonlocal now_s
        now_s += 10.0

    def measure(*_):
        raise NotAvailable("measured")

    monkeypatch.setattr(states, "time", SimpleNamespace(monotonic=lambda: now_s))
    monkeypatch.setattr(state.notifier, "watchdog", lambda: fed_s.append(now_s))
    hashed(monkeypatch, slowly_read)
    slow(plan.Machine, "environment")
    slow(verifying, "planned")
    slow(Session, "sampler", lambda session, cases: None)
    slow(Supervisor, "in_turn", measure)
    deployed.verify(state, large)
    assert state.facts.shipped["net"].published.reason == "measured"
    assert max(after - before for before, after in pairwise([*fed_s, now_s])) < 30.0


def test_a_large_folder_that_is_read_ends_with_the_service(state, large, monkeypatch):
    pieces = []

    def read():
        pieces.append(1)
        assert len(pieces) == 1, "it is read to its end"
        state.on_signal(signal.SIGTERM, None)

    hashed(monkeypatch, read)
    deployed.verify(state, large)
    assert (state.facts.shipped, state.session.interrupted) == ({}, True)


def test_unacknowledged_archives_are_kept_past_their_age(state, tmp_path, monkeypatch):
    source = state.records
    source.append(records.encode(made()))
    monkeypatch.setattr(disk, "file_time_s", lambda booted_s: 1e12)
    source.rotate(1)
    for _ in range(2):
        background.limit_what_is_old(state)
    assert [record.run_id for record in results_of(state)] == [made().run_id]
    state.link.delivery.records.acknowledged = 1
    background.limit_what_is_old(state)
    assert results_of(state) == []
