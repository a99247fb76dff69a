"""A real worker that ends in every way a worker can end; the supervisor's side must always know how."""

import os
import re
import select
import sys
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest
import sessions_made
from planted import planted
from waiting import WAIT_S, wait_for
from worker_jobs import TINY, changed, job, run, run_here, user_module

from benchd.daemon.delivery.broker import PASSWORD_VARIABLE
from benchd.daemon.measuring import plan, process
from benchd.daemon.measuring.protocol import Limits
from benchd.daemon.records import Variant
from benchd.daemon.sampling.child import SamplerProcess
from benchd.models import catalog


@pytest.mark.usefixtures("new_interpreters")
def test_a_worker_has_no_secret_and_like_the_sampler_imports_nothing_from_the_current_folder(tmp_path, monkeypatch):
    (tmp_path / "here").mkdir()
    planted(tmp_path / "here", tmp_path / "mark")
    monkeypatch.chdir(tmp_path / "here")
    secrets = {PASSWORD_VARIABLE, "CREDENTIALS_DIRECTORY", "NOTIFY_SOCKET", "WATCHDOG_USEC"}
    for name in (*secrets, "OF_THE_SITE"):
        monkeypatch.setenv(name, "a secret")
    with SamplerProcess(["procfs"], 0.05):
        outcome = run(job(tmp_path, module=user_module(tmp_path, build="print('has', *os.environ)")))
    assert not (tmp_path / "mark").exists()
    assert (outcome.process.status, outcome.process.reason) == ("ok", None)
    assert outcome.check is not None
    assert outcome.check.passed
    assert outcome.model.weights == "of the module"
    stages = msgspec.structs.asdict(outcome.process.stages)
    assert stages.pop("idle_s") is None  # no power sensor asks for a rest
    assert stages.pop("accuracy_s") is None  # no labels were given
    assert all(seconds is not None and seconds > 0 for seconds in stages.values()), stages
    (line,) = [line for line in (tmp_path / "logs" / "run.log").read_text().splitlines() if line.startswith("has ")]
    assert "OF_THE_SITE" in line
    assert not secrets & set(line.split())


# a worker without torch, which begins to build and ends as given
BUILDS = """#!{python} -IS
import os, sys
pipe = int(sys.argv[-1])
os.write(pipe, b'{{"type":"stage","name":"build"}}\\n')
{ends}
"""


def without_torch(folder, ends):
    """Write such a worker; return its path."""
    worker = folder / "worker"
    worker.write_text(BUILDS.format(python=sys.executable, ends=ends))
    worker.chmod(0o755)
    return str(worker)


@pytest.mark.parametrize(
    ("ends", "reason"),
    [
        ("os.kill(os.getpid(), 11)", r"killed by SIGSEGV in stage build"),
        ("os._exit(3)", r"status 3 and without a result in stage build; remove os\._exit from the module"),
        ("os.write(1, b'the last words'); os._exit(3)", r"in stage build: the last words"),
        ("os.write(pipe, b'{rubbish\\n'); os._exit(0)", r"wrote garbage to its pipe"),
        ("os.write(pipe, b'\\xff' * 100); os._exit(0)", r"status 0 and without a result"),
    ],
    ids=["segfault", "exit", "last-words", "rubbish", "torn"],
)
def test_a_worker_that_ends_badly(tmp_path, ends, reason):
    outcome = run(job(tmp_path, module=user_module(tmp_path)), without_torch(tmp_path, ends))
    assert outcome.process.status == "failed"
    assert re.search(reason, outcome.process.reason), outcome.process.reason


@pytest.mark.parametrize(
    ("lines", "reason"),
    [
        ({"build": "torch.empty(10**15)"}, r"out of memory: "),
        ({"forward": "sys.exit(4)"}, r"in forward: .*ends the process with sys\.exit\(4\): raise an error"),
    ],
    ids=["memory", "sys-exit"],
)
def test_a_module_that_fails_gives_a_reason(tmp_path, lines, reason):
    outcome = run_here(job(tmp_path, module=user_module(tmp_path, **lines)))
    assert outcome.process.status == "failed"
    assert re.search(reason, str(outcome.process.reason)), outcome.process.reason


def test_a_stage_that_says_that_it_goes_on_has_its_deadline_anew(tmp_path, monkeypatch):
    """A child that says five times that it goes on, each time most of a deadline later, on a clock of the test."""
    os.mkfifo(fifo := tmp_path / "goes-on")
    go, now_s, messages = os.open(fifo, os.O_RDWR), [0.0], process.Worker.messages

    def one_at_a_time(worker):
        for message in messages(worker):
            yield message
            if message.name == "accuracy":
                now_s[0] += 5.0
                os.write(go, b"\n")

    monkeypatch.setattr(process.Worker, "messages", one_at_a_time)
    monkeypatch.setattr(process, "time", SimpleNamespace(monotonic=lambda: now_s[0]))
    line = '{"type":"stage","name":"accuracy","done":"image 1 of 2"}'
    says = f"go = open('{fifo}'); [(os.write(pipe, b'{line}\\n'), go.readline()) for part in range(5)]"
    limits = msgspec.structs.replace(TINY, check_deadline_s=6.5)
    worker = without_torch(tmp_path, f"{says}; os.write(1, b'all said'); os._exit(3)")
    outcome = run(job(tmp_path, limits=limits, module=user_module(tmp_path)), worker)
    assert outcome.process.status == "failed"
    assert "in stage accuracy: all said" in outcome.process.reason
    os.close(go)


def test_a_worker_with_an_endless_line_or_log_is_ended_at_its_deadline(tmp_path):
    """And is listened to meanwhile: the service attends to its watchdog and its signals."""
    worker = without_torch(tmp_path, "while True: [os.write(1, b'x' * 2**20), os.write(pipe, b'x' * 2**16)]")
    given, attended = job(tmp_path, limits=msgspec.structs.replace(TINY, build_deadline_s=3.0)), []
    bench_session = sessions_made.session(tmp_path)
    bench_session.attend = lambda: attended.append((tmp_path / "logs" / "run.log").stat().st_size)
    with (
        bench_session,
        bench_session.measuring(),
        process.Worker(given, tmp_path / "logs" / "run.log", worker) as running,
    ):
        while not (ended := bench_session.follow(running, running.remaining_s(), "too long")):
            pass
        assert running.outcome(*ended).process.status == "timeout"
    assert len(attended) > 10
    assert max(attended) < process.LOG_BYTES + 2**25


def test_a_hanging_worker_is_ended_with_everything_that_it_started(tmp_path, monkeypatch):
    """A child of its own session, and one of another."""
    shell = "echo started; (sleep 1000; true) & sleep 1000; true"  # two shells and two children of theirs
    readers, starts = [], "import subprocess"
    for own_session in (False, True):
        os.mkfifo(fifo := tmp_path / f"held-by-the-child-{own_session}")
        readers.append(os.open(fifo, os.O_RDONLY | os.O_NONBLOCK))
        started = f"['sh', '-c', '{shell}'], stdout=open('{fifo}', 'w'), start_new_session={own_session}"
        starts += f"; subprocess.Popen({started})"

    def deadline_s(limits, stage):
        """The build's is over once both have started."""
        started = stage == "build" and all(select.select([reader], [], [], WAIT_S)[0] for reader in readers)
        return 0.0 if started else WAIT_S

    monkeypatch.setattr(Limits, "deadline_s", deadline_s)
    outcome = run(job(tmp_path, module=user_module(tmp_path, build=f"{starts}; time.sleep(1000)")))
    assert (outcome.process.status, outcome.process.reason) == ("timeout", "stage build")
    for reader in readers:
        assert os.read(reader, 100) == b"started\n"
        assert select.select([reader], [], [], WAIT_S)[0], "a child is still there"
        assert os.read(reader, 100) == b""
        os.close(reader)


def test_shared_memory_that_a_process_of_torch_guards_is_given_back(tmp_path_factory):
    folder = tmp_path_factory.mktemp("shm")
    share = "torch.multiprocessing.set_sharing_strategy('file_system'); kept = torch.zeros(2**18).share_memory_()"
    tell = f"open('{folder}/told', 'w').write(' '.join([str(os.getpid()), *os.listdir('/dev/shm')]))"
    module = user_module(folder, build=f"global kept; {share}; {tell}")
    assert run(job(folder, module=module)).process.status == "ok"
    pid, *names = (folder / "told").read_text().split()
    (segment,) = [name for name in names if name.startswith(f"torch_{pid}_")]
    wait_for(lambda: not Path("/dev/shm", segment).exists())  # noqa: S108 - torch's place


def test_what_was_found_before_a_failure_is_kept(tmp_path):
    lines = "self.runs = getattr(self, 'runs', 0) + 1\n        assert self.runs < 20"
    outcome = run_here(job(tmp_path, module=user_module(tmp_path, forward=lines)))
    assert outcome.process.status == "failed"
    assert outcome.check is not None
    assert outcome.model is not None
    assert outcome.process.stages.build_s is not None


def test_a_compiler_that_fails_makes_custom_kernels_unsupported_and_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setenv("CC", "false")  # as a gcc that finds no Python.h does to Triton
    a_job = job(tmp_path, model="snn_onepass", variant=Variant.parse("custom"))
    outcome = run(changed(a_job, options=catalog.entry("snn_onepass").resolve({})))
    assert outcome.process.status == "unsupported"
    assert "sudo apt install gcc python3-dev" in outcome.process.reason


@pytest.mark.parametrize(("device", "kept"), [("cpu", {"MALLOC_MMAP_MAX_": "0"}), ("cuda", {})])
def test_the_heap_is_kept_on_a_cpu_alone_and_the_record_says_so(device, kept, tmp_path):
    environment = process.environment(device, str(tmp_path), None)
    assert {name: value for name, value in environment.items() if name == "MALLOC_MMAP_MAX_"} == kept
    allocator = plan.Machine(device, has_cxx=True).environment().allocator
    assert allocator == {name: value for name, value in environment.items() if name.startswith("MALLOC_")}


@pytest.mark.parametrize(("fails", "deadline_s"), [("time.sleep(1000)", 0.0), ("os._exit(3)", WAIT_S)])
def test_a_probe_that_does_not_end_costs_the_floor_and_not_the_measurement(fails, deadline_s, tmp_path, monkeypatch):
    monkeypatch.setattr(Limits, "deadline_s", lambda limits, stage: deadline_s if stage == "probe" else WAIT_S)
    replaced = f"import os, time; from benchd.daemon.worker import probes; probes.probe = lambda *_: {fails}"
    outcome = run(job(tmp_path, module=user_module(tmp_path, build=f"exec({replaced!r}, {{}})"), probes=True))
    assert (outcome.process.status, outcome.process.timing is not None) == ("ok", True)
    assert "probe" in outcome.missing["probes"]
