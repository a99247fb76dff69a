"""The real `benchd run` in a process of its own: commands, signals, kills, reloads, systemd's socket."""

import itertools
import json
import os
import queue
import signal
import socket
import subprocess
import sys
import time
import uuid
from contextlib import closing, contextmanager, suppress
from pathlib import Path

import msgspec
import psutil
import pytest
import torch
from asyncapi import Document
from disks import tmpfs
from forked import BENCHD, Program
from links import Watcher
from records_made import made
from waiting import WAIT_S, wait_for

from benchd.daemon import records
from benchd.daemon.config import Suite
from benchd.daemon.machine.lock import MachineLock
from benchd.daemon.records import Case, ProcessResult
from benchd.daemon.service.facts import STATE, Running
from benchd.daemon.service.schedule import Schedule, begin

ROOT = Path(__file__).parents[2]
CONFIG = """
[device]
id = "{device}"
name = "Test board"

[mqtt]
url = "{url}"
commands = "all"

[limits]
warm_up_cap_s = {cap_s}
measure_cap_s = {cap_s}
check_images = 1

[[suite]]
name = "small"
models = ["square"]
options = {{ size = {sizes} }}
variants = ["eager"]
preset = "quick"
"""
SHORT_S, LONG_S = 0.1, 3600.0
AGAIN_S = 30.0
HASTY = "from benchd.daemon.service import cases; cases.LOOK_S = 0.5\n"  # what waits looks again sooner
RUNNING = HASTY + BENCHD
# dies once the log has the record and before the service has taken in what follows from it
DYING = """
import os, signal, sys
from benchd.daemon import cli
from benchd.daemon.service import results
results.take_in = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
sys.exit(cli.benchd())
"""


class Site(Watcher):
    """A broker, a folder with a configuration, and everything that was heard of one device."""

    def __init__(self, folder, broker, environment):
        self.folder, self.broker = folder, broker
        self.device = f"d{uuid.uuid4().hex[:8]}"
        # where the code under test lies beside the installed one
        self.environment = environment | {key: os.environ[key] for key in ("PYTHONPATH",) if key in os.environ}
        self.sessions = set()
        super().__init__(broker, self.device, f"homeassistant/device/benchd-{self.device}/#")

    def configure(self, *, cap_s=SHORT_S, sizes="[16, 32]", more=""):
        text = CONFIG.format(device=self.device, url=self.broker.url, cap_s=cap_s, sizes=sizes)
        (self.folder / "benchd.toml").write_text(text + more)
        return self

    @contextmanager
    def service(self, *, connects=True, code=RUNNING, is_apart=False, **environment):
        """Run the service over the block, which begins once it listens; `code` is Python that runs it.

        With `is_apart` it is an interpreter of its own, which starts another for each worker: a forked one may be
        timed, so that nothing more is sent, before the answer to a command and the first telemetry are.
        """
        arguments = ["run", "--config", "benchd.toml"]
        environment = self.environment | environment
        with (self.folder / "log").open("ab") as log:
            if is_apart or torch.cuda.is_available():  # CUDA does not outlive a fork
                command = [sys.executable, "-c", code, *arguments]
                process = subprocess.Popen(command, cwd=self.folder, env=environment, stderr=log)
            else:
                process = Program(code, ["benchd", *arguments], self.folder, environment, log.fileno())
        with process:
            try:
                if connects:
                    self._until_listening()
                yield process
            finally:
                process.kill()

    def _until_listening(self):
        while (session := self.until("status", state="online")["session"]) in self.sessions:
            pass
        self.sessions.add(session)

    def command(self, verb, **parameters):
        """Send a command until it is answered: a device that connects anew does not hear it, and runs each id once."""
        body = {"id": uuid.uuid4().hex[:8], "client": "test", **parameters}
        for _ in range(round(WAIT_S / AGAIN_S)):
            self.say(f"benchd/v1/{self.device}/cmd/{verb}", msgspec.json.encode(body))
            with suppress(queue.Empty):
                return self._next(f"resp/test/{body['id']}", {}, AGAIN_S)
        return self._fail(f"answer to {verb}")

    def health_once(self, holds):
        """Return the health once it holds; it is asked for no more often than a device answers."""
        until_s = time.monotonic() + WAIT_S
        while not holds(health := self.command("status")["health"]):
            assert time.monotonic() < until_s, health
            time.sleep(0.6)
        return health

    def listen(self, seconds):
        """Take what comes in so many seconds."""
        until_s = time.monotonic() + seconds
        while (left_s := until_s - time.monotonic()) > 0:
            with suppress(queue.Empty):
                self.hear(left_s)

    def seen(self, kind):
        """Return the messages under this topic of the device that have been heard."""
        topic = f"benchd/v1/{self.device}/{kind}"
        return [
            json.loads(message.payload) for message in self.all if message.topic.startswith(topic) and message.payload
        ]

    def until(self, kind, **fields):
        """Return the next message under this topic of the device whose fields are these."""
        with suppress(queue.Empty):
            return self._next(kind, fields, WAIT_S)
        return self._fail(f"{kind} {fields}")

    def _next(self, kind, fields, wait_s):
        until_s = time.monotonic() + wait_s
        while True:
            message = self.hear(max(0.0, until_s - time.monotonic()))
            body = json.loads(message.payload) if message.payload else {}
            if message.topic.startswith(f"benchd/v1/{self.device}/{kind}") and fields.items() <= body.items():
                return body

    def _fail(self, what):
        topics, log = [message.topic for message in self.all], (self.folder / "log").read_text()
        pytest.fail(f"no {what} among {topics}; the service says:\n{log}")

    def seen_or_until(self, kind):
        """Return the message under exactly this topic, which may have come before others that were waited for."""
        topic = f"benchd/v1/{self.device}/{kind}"
        payloads = [message.payload for message in self.all if message.topic == topic and message.payload]
        return json.loads(payloads[-1]) if payloads else self.until(kind)

    def begun(self):
        """Wait until a case is under way."""
        path = self.folder / "state/benchd" / STATE
        wait_for(lambda: path.exists() and json.loads(path.read_bytes()).get("running"))


@pytest.fixture
def site(tmp_path, mosquitto, child_environment):
    site = Site(tmp_path, mosquitto, child_environment)
    yield site
    site.close()


def test_a_command_is_measured_published_and_left_on_the_broker(site):
    """A run keeps its sampler."""
    site.configure()
    (site.folder / "benchd.toml").write_text(
        (site.folder / "benchd.toml").read_text().replace("[limits]", "home_assistant = true\n[limits]")
    )
    with site.service(is_apart=True) as process:
        info = site.until("info")
        assert (info["name"], [suite["name"] for suite in info["suites"]]) == ("Test board", ["small"])
        answer = site.command("run", suite="small")
        assert answer["accepted"]
        assert len(answer["cases"]) == 2
        results, samplers = [], set()
        for _ in answer["cases"]:
            results.append(site.until("result/"))
            samplers |= samplers_of(process.pid)
        assert len(samplers) == 1
        assert [result["case_id"] for result in results] == answer["cases"]
        assert "probes_moved" not in results[0]["flags"]
        for result in results:
            record = records.decode(msgspec.json.encode(result))
            assert (record.status, record.suite_id, record.device_id) == ("ok", answer["suite_id"], site.device)
            assert {"mqtt", "service"} <= set(record.flags)
        latest = site.seen_or_until(f"latest/{answer['cases'][1]}")
        assert latest["median_ms"] == results[1]["timing"]["median_ms"]
        assert latest["check"] == "passed"
        assert all(not isinstance(value, list | dict) for value in latest.values())
        assert len(msgspec.json.encode(latest)) <= 2048
        health = site.command("status")["health"]
        assert (health["activity"], health["cases_left"], health["problem"]) == ("idle", 0, None)
        assert health["rss_bytes"] <= 60 * 2**20
        assert (
            site.command("run", suite="other")["reason"] == "no suite with that name; the command `list` returns them"
        )
        assert "unknown model" in site.command("run", models=["../../etc/passwd"])["reason"]
        assert [suite["cases"] for suite in site.command("list")["suites"]] == [answer["cases"]]
        assert site.command("replay", log=health["log"])["rows"] == 2
        while sum("/result/" in message.topic for message in site.all) < 4:  # they may come before the answer
            site.until("result/")
        process.terminate()
        site.until("status", state="offline")
        assert process.wait(WAIT_S) == 0
    topics = {message.topic for message in site.all}
    assert f"homeassistant/device/benchd-{site.device}/config" in topics
    journal = next(site.folder.glob("state/benchd/records.jsonl")).read_bytes().splitlines()
    assert [records.decode(line).run_id for line in journal] == [result["run_id"] for result in results]


def test_every_message_of_a_session_is_as_the_documentation_says(site):
    document = Document()
    pinned = pin(site.folder / "pinned.jsonl", made(case=Case(model="square", options={"size": 16})))
    absent = f'\n[[shipped]]\npath = "{site.folder}/absent"\n'
    with site.configure(sizes="[16]", more=pinned + absent).service() as process:
        assert site.seen_or_until("shipped/absent")["verdict"] == "broken"
        site.command("run", suite="small")
        assert site.until("event", event="baseline_stale")["judgement"]["verdict"] == "inconclusive"
        assert site.seen_or_until("latest/square,eager,b1,size=16")["verdict"] == "inconclusive"
        site.command("list")
        site.command("status")
        site.command("run", suite="../x")
        process.terminate()
        site.until("status", state="offline")
    channels = {document.validate(message.topic, message.payload) for message in site.all}
    assert channels == set(document.tree["channels"])


def pin(path, record):
    """Write five runs like `record`, half a day apart; return the lines that pin them."""
    processes = [ProcessResult(status="ok", timing=process.timing) for process in record.processes] * 2
    runs = [
        msgspec.structs.replace(
            record,
            run_id=f"b{number}",
            suite_id=f"b{number}",
            processes=processes,
            telemetry={},
            t_wall=f"2026-01-0{number + 1}T00:00:00Z",
        )
        for number in range(5)
    ]
    path.write_bytes(b"".join(records.encode(run) + b"\n" for run in runs))
    return f'[baseline]\nruns = ["{path}"]\n'


def facts(site):
    return json.loads((site.folder / "state/benchd" / STATE).read_text())


def keep(site, **values):
    """Give the facts of a stopped service other values."""
    path = site.folder / "state/benchd" / STATE
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(msgspec.json.encode((facts(site) if path.exists() else {}) | values))


def under_way(site, *sizes):
    """Give the next service a run; return its id and cases. A command would have no answer while one is timed."""
    case_ids = [f"square,eager,b1,size={size}" for size in sizes]
    suite = Suite(name="small", models=["square"], options={"size": list(sizes)}, variants=["eager"], preset="quick")
    schedule = begin(Schedule(), suite, case_ids)
    keep(site, schedule=schedule)
    return schedule.passes[0].suite_id, case_ids


def test_a_service_stopped_during_a_case_resumes_with_that_case(site):
    suite_id, (case_id,) = under_way(site, 16)
    with site.configure(cap_s=LONG_S, sizes="[16]").service() as process:
        site.begun()
        process.terminate()
        aborted = site.until("result/")
        assert (aborted["status"], aborted["case_id"]) == ("aborted", case_id)
        assert process.wait(WAIT_S) == 0
    with site.configure(sizes="[16]").service():
        again = site.until("result/")
    assert (again["case_id"], again["status"], again["suite_id"]) == (case_id, "ok", suite_id)


def test_a_service_killed_during_a_case_reports_it_and_continues_with_the_next(site):
    _, case_ids = under_way(site, 16, 32)
    with site.configure(cap_s=LONG_S).service() as process:
        site.begun()
        process.kill()
    site.until("status", state="offline")
    with site.configure().service():
        results = [site.until("result/") for _ in case_ids]
    assert [(result["case_id"], result["status"]) for result in results] == list(
        zip(case_ids, ("aborted", "ok"), strict=True)
    )
    assert results[0]["reason"] == "the service died while this case ran"


@pytest.mark.parametrize("connects", [True, False], ids=["broker", "no broker"])
def test_a_record_that_is_only_in_the_log_is_processed_and_not_measured_again(site, connects):
    sizes = [16, 32] if connects else [16]
    site.configure(sizes=str(sizes))
    _, case_ids = under_way(site, *sizes)
    if not connects:
        without_broker(site)
    with site.service(connects=connects, code=DYING) as process:
        assert process.wait(WAIT_S) == -signal.SIGKILL
    with site.service(connects=connects) as process:
        wait_for(lambda: not facts(site)["schedule"]["passes"], process)
        process.terminate()
        assert process.wait(WAIT_S) == 0
    journal = journal_of(site)
    assert [(record.case_id, record.status) for record in journal] == [(case_id, "ok") for case_id in case_ids]
    if connects:
        results = [site.until("result/"), site.until("result/")]
        assert [result["run_id"] for result in results] == [record.run_id for record in journal]


def journal_of(site):
    path = site.folder / "state/benchd/records.jsonl"
    whole = path.read_bytes().rpartition(b"\n")[0] if path.exists() else b""  # a line may be half written just now
    return [records.decode(line) for line in whole.splitlines()]


def samplers_of(pid):
    children = psutil.Process(pid).children()
    return {child.pid for child in children if "benchd.daemon.sampling.sources" in child.cmdline()}


def test_a_running_pass_is_cancelled_by_command(site):
    suite_id, _ = under_way(site, 16, 32)
    with site.configure(cap_s=LONG_S).service():
        site.begun()
        assert site.command("cancel", suite_id=suite_id)["accepted"]
        result = site.until("result/")
        assert (result["status"], result["reason"]) == ("aborted", "cancelled by a command")
        assert site.command("status")["health"]["cases_left"] == 0
        assert site.command("cancel", suite_id="another")["reason"] == "no such run is in progress"


def test_a_reload_takes_over_the_new_plan_or_keeps_the_old_one(site):
    with site.configure(sizes="[16]").service() as process:
        site.until("info")
        site.command("run", suite="small")
        site.until("latest/")
        site.configure(sizes="[32]")
        process.send_signal(signal.SIGHUP)
        assert site.until("info")["suites"][0]["cases"] == ["square,eager,b1,size=32"]
        site.until("latest/square,eager,b1,size=16")  # the empty one that takes it away
        assert site.all[-1].payload == b""
        (site.folder / "benchd.toml").write_text("[devise]")
        assert "unknown configuration key" in site.command("reload")["reason"]
        process.send_signal(signal.SIGHUP)
        assert "unknown configuration key" in site.until("event", event="reload_failed")["detail"]
        assert site.command("status")["accepted"]


def test_a_machine_that_another_measures_is_waited_for_and_nothing_is_said_to_run(site):
    with site.configure(sizes="[16]").service():
        with MachineLock():
            site.command("run", suite="small")
            health = site.health_once(lambda health: health["waiting_for"])
        assert health["waiting_for"].startswith("this machine is already being measured")
        assert "measuring" not in [health["activity"] for health in site.seen("health")]
        assert site.until("result/")["status"] == "ok"


def test_a_service_rolled_back_after_a_crash_in_an_unknown_case_starts_and_reports_it_once(site):
    with site.configure().service() as process:
        process.terminate()
        assert process.wait(WAIT_S) == 0
    running = Running("s1", Case(model="square"), "quick", "boot", "2026-01-01T00:00:00Z", 1)
    keep(site, running=msgspec.to_builtins(running) | {"t_mono_ns": "in the words of a newer version"})
    path = site.folder / "state/benchd" / STATE
    for lost in ([f"{path} cannot be read (Expected `int`, got `str` - at `$.running.t_mono_ns`)"], []):
        site.all.clear()
        with site.service() as process:
            site.until("event", event="started")
            process.terminate()
            assert process.wait(WAIT_S) == 0
        site.until("event", event="stopped")
        details = [
            event["detail"].partition(" and is now")[0]
            for event in site.seen("event")
            if event["event"] == "state_lost"
        ]
        assert details == lost


@pytest.fixture
def disk(site, request):
    """A disk of 12 MB under the state folder, which is less than a case needs, or of the size that the test gives."""
    with tmpfs(site.folder / "state", f"size={getattr(request, 'param', '12m')}") as folder:
        yield folder


@pytest.mark.parametrize("disk", ["40m"], indirect=True)
def test_a_full_disk_neither_stops_a_service_nor_prevents_its_start(site, disk):
    with site.configure(sizes="[16]").service() as process:
        site.until("event", event="started")
        eat(disk)
        cases = site.command("run", suite="small")["cases"]
        assert degraded(site)["cases_left"] == len(cases)
        site.configure(sizes="[32]")
        process.send_signal(signal.SIGHUP)
        wait_for(lambda: "reloaded: " in (site.folder / "log").read_text(), process)
        (disk / "filler").unlink()
        site.until("result/")
        process.terminate()
        assert process.wait(WAIT_S) == 0
    eat(disk)
    with site.service():
        site.command("run", suite="small")
        assert degraded(site)["cases_left"] == 1
        (disk / "filler").unlink()
        assert site.until("result/")["case_id"] == "square,eager,b1,size=32"
        assert "pass_failed" not in [event["event"] for event in site.seen("event")]


def test_a_sampler_killed_at_its_start_costs_only_one_case(site):
    """It waits for its script, so that it has read nothing when it is killed."""
    script, ready = site.folder / "script.json", site.folder / "ready.json"
    os.mkfifo(script)
    ready.write_text('{"metrics": [{"metric": "power_w", "values": [5.0], "period_s": 1.0}]}')
    with site.configure(more=f'[sampling]\nsources = ["fake={script}"]\n').service() as process:
        cases = site.command("run", suite="small")["cases"]
        wait_for(lambda: samplers_of(process.pid), process)
        with script.open("wb"):  # opens once the sampler has
            ready.replace(script)
            os.kill(samplers_of(process.pid).pop(), signal.SIGKILL)
        results = [site.until("result/") for _ in cases]
    assert [result["status"] for result in results] == ["failed", "ok"]
    assert results[0]["reason"].startswith("the case did not start: the sampler process ended with status -9 before")


def eat(disk, name="filler"):
    """Leave nothing of the disk, whoever else writes there meanwhile."""
    with (disk / name).open("wb", buffering=0) as file, pytest.raises(OSError, match="No space left"):
        file.writelines(itertools.repeat(bytes(4096)))


def degraded(site):
    """Return the health once it says that the disk is full."""
    return site.health_once(lambda health: (health["problem"] or "").startswith("degraded:disk"))


def test_a_state_folder_that_cannot_be_written_is_said_at_once(site, disk):
    subprocess.run(["mount", "-o", "remount,ro", disk], check=True)
    with site.configure().service(connects=False) as process:
        assert process.wait(WAIT_S) == 2
    log = (site.folder / "log").read_text()
    assert f"cannot create the state folder {disk}/benchd: Read-only file system" in log
    assert "Traceback" not in log


def test_systemd_hears_ready_status_watchdog_and_stopping(site, tmp_path):
    with closing(socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)) as notify:
        notify.bind(str(tmp_path / "notify"))
        notify.settimeout(WAIT_S)
        with site.configure().service(NOTIFY_SOCKET=str(tmp_path / "notify")) as process:
            messages = [notify.recv(4096).decode()]
            assert messages == ["READY=1"]
            while not {"STATUS=idle; mqtt up", "WATCHDOG=1"} <= set(messages):
                messages.append(notify.recv(4096).decode())
            process.send_signal(signal.SIGHUP)
            while not messages[-1].startswith("RELOADING=1\nMONOTONIC_USEC="):
                messages.append(notify.recv(4096).decode())
            process.terminate()
            while messages[-1] != "STOPPING=1":
                messages.append(notify.recv(4096).decode())


def test_two_services_never_share_a_state_folder(site):
    with site.configure().service():
        site.until("info")
        with site.service(connects=False) as second:
            assert second.wait(WAIT_S) == 7
    assert "already runs with the state folder" in (site.folder / "log").read_text()


def without_broker(site):
    text = (site.folder / "benchd.toml").read_text()
    (site.folder / "benchd.toml").write_text("\n".join(line for line in text.splitlines() if "url" not in line))
