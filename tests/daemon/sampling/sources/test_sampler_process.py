"""The real sampler process, from both ends of its pipes; what it is told and what befalls it."""

import json
import os
import select
import signal
import subprocess
import sys
import time
from itertools import pairwise
from pathlib import Path

import msgspec
import pytest
from waiting import WAIT_S

from benchd.daemon.errors import UsageError
from benchd.daemon.records import Sample, Window
from benchd.daemon.sampling.child import SamplerProcess
from benchd.daemon.sampling.sources.protocol import Batch, FollowRequest


@pytest.fixture
def fake(tmp_path):
    """The source of a script with one rail at 5 W; what is given is added to the script."""

    def source(**fields):
        path = tmp_path / "script.json"
        rail = {"metric": "power_w", "rail": "VDD_IN", "values": [5.0], "period_s": 0.1}
        path.write_text(json.dumps({"metrics": [rail]} | fields))
        return f"fake={path}"

    return source


def receive_until(process, done):
    """Receive as an owner does, until `done()`."""
    deadline = time.monotonic() + WAIT_S
    while not done():
        ready, _, _ = select.select([process], [], [], deadline - time.monotonic())
        assert ready, "nothing came in time"
        process.receive()


def since(start_ns):
    return Window(start_ns, time.monotonic_ns())


def samples_since(process, start_ns, metric):
    summary = process.cut(since(start_ns))[0].get(metric)
    return summary.samples if summary else 0


def test_samples_of_all_sources_are_cut_to_the_window(fake):
    with SamplerProcess(["procfs", fake()], 0.01) as process:
        start_ns = time.monotonic_ns()
        process.watch(os.getpid())
        receive_until(process, lambda: samples_since(process, start_ns, "cpu_utilization_percent") > 1)
        assert process.flush(WAIT_S)
        telemetry, report = process.cut(since(start_ns))
    assert telemetry["power_w@VDD_IN"].mean == 5.0
    assert telemetry["power_w@VDD_IN"].source == "fake"
    assert telemetry["process_rss_bytes"].minimum > 2**20
    assert 0.0 <= telemetry["cpu_utilization_percent"].mean <= 100.0
    assert (report.sources, report.period_s, report.failures) == (["procfs", "fake"], 0.01, {})
    assert report.samples == sum(summary.samples for summary in telemetry.values())
    assert report.cpu_s > 0.0
    assert report.period_p99_error is not None


def test_a_flush_brings_what_is_younger_than_a_batch(fake):
    with SamplerProcess([fake()], 0.001) as process:
        start_ns = time.monotonic_ns()
        while not samples_since(process, start_ns, "power_w@VDD_IN"):
            assert process.flush(WAIT_S)


def test_a_failing_sampler_is_named_and_retried_and_the_others_go_on(fake):
    with SamplerProcess([fake(fail_at=3), "procfs"], 0.05) as process:
        start_ns = time.monotonic_ns()
        receive_until(process, lambda: samples_since(process, start_ns, "power_w@VDD_IN") > 5)
        telemetry, report = process.cut(since(start_ns))
    assert "reading 3 fails" in report.failures["fake"]
    assert list(report.failures) == ["fake"]
    assert telemetry["memory_available_bytes"].samples > 1


def test_a_sampler_without_its_hardware_is_named_in_every_window_until_it_appears(fake, tmp_path):
    root = tmp_path / "board"
    with SamplerProcess([f"procfs={root}", fake()], 0.02) as process:
        for _ in range(2):
            start_ns = time.monotonic_ns()
            receive_until(process, lambda: samples_since(process, start_ns, "power_w@VDD_IN") > 0)  # noqa: B023
            assert "stat" in process.cut(since(start_ns))[1].failures["procfs"]
        (root / "proc").mkdir(parents=True)
        (root / "proc/meminfo").write_text("MemAvailable: 8 kB\n")
        (root / "proc/stat").write_text("cpu 1 2 3 4 5 6 7 8 0 0\n")
        receive_until(process, lambda: samples_since(process, start_ns, "memory_available_bytes") > 0)


def test_a_bad_script_or_name_is_refused_before_anything_is_measured(fake):
    with pytest.raises(UsageError, match="fails_at"), SamplerProcess([fake(fails_at=1)], 0.1):
        pass
    with pytest.raises(UsageError, match="did you mean 'procfs'"):
        SamplerProcess(["procf"], 0.1)


def test_a_cpu_of_its_own(fake):
    cpu = max(os.sched_getaffinity(0))
    with SamplerProcess([fake()], 0.1, cpu=cpu) as process:
        assert os.sched_getaffinity(process.pid) == {cpu}
    with pytest.raises(UsageError, match="--cpu 100000"), SamplerProcess([fake()], 0.1, cpu=100000):
        pass


def test_a_process_that_dies_costs_the_samples_of_its_case(fake):
    with SamplerProcess([fake()], 0.01) as process:
        process.watch(os.getpid())
        os.kill(process.pid, signal.SIGKILL)
        receive_until(process, lambda: process.pid is None)
        assert not select.select([process], [], [], 0)[0]
        assert not process.flush()
        failure = process.cut(since(time.monotonic_ns()))[1].failures["sampler"]
        assert failure == "the sampler process ended with status -9; no samples since then"

        process.watch(os.getpid())
        start_ns = time.monotonic_ns()
        receive_until(process, lambda: samples_since(process, start_ns, "power_w@VDD_IN") > 0)
        _, report = process.cut(since(start_ns))
        assert (report.failures, report.cpu_s >= 0.0) == ({}, True)


def test_a_process_that_hangs_does_not_hold_up_its_owner(fake):
    with SamplerProcess([fake()], 0.01) as process:
        start_ns = time.monotonic_ns()
        os.kill(process.pid, signal.SIGSTOP)
        assert not process.flush(wait_s=0.1)
        assert "no answer within 0.1 s" in process.cut(since(start_ns))[1].failures["sampler"]
        os.kill(process.pid, signal.SIGCONT)
        assert process.flush(wait_s=WAIT_S)
        os.kill(process.pid, signal.SIGSTOP)
        stopped = process.pid
    with pytest.raises(ProcessLookupError):
        os.kill(stopped, 0)


def test_partial_lines_and_rubbish(fake):
    """The sampler stands still while its pipe is written to in its place."""
    with SamplerProcess([fake()], 0.01) as process:
        process.flush(WAIT_S)
        os.kill(process.pid, signal.SIGSTOP)
        os.waitid(os.P_PID, process.pid, os.WSTOPPED)
        process.receive()
        start_ns = time.monotonic_ns()
        sample = Sample(start_ns, "power_w", 7.0, "fake", "VDD_IN")
        line = msgspec.json.encode(Batch(samples=[sample], t_ns=start_ns, cpu_s=1.0, ticks_ns=[start_ns], flushes=1))
        with pipe_of(process) as pipe:
            pipe.write(b"\xff\x00 no JSON\n" + line[:40])
            process.receive()
            assert samples_since(process, start_ns, "power_w@VDD_IN") == 0
            pipe.write(line[40:] + b"\n")
            process.receive()
        telemetry, report = process.cut(since(start_ns))
        assert telemetry["power_w@VDD_IN"].maximum == 7.0
        assert "invalid message" in report.failures["sampler"]
        os.kill(process.pid, signal.SIGCONT)
        assert process.flush(wait_s=WAIT_S)


def pipe_of(process):
    """Open the writing end of the sampler's pipe."""
    inode = os.fstat(process.fileno()).st_ino
    ours = next(fd for fd in Path(f"/proc/{process.pid}/fd").iterdir() if fd.stat().st_ino == inode)
    return ours.open("wb", buffering=0)


def test_it_ends_with_its_parent(fake):
    code = (
        "import sys\n"
        "from benchd.daemon.sampling.child import SamplerProcess\n"
        "with SamplerProcess([sys.argv[1]], 0.01) as process:\n"
        "    print(process.pid, flush=True)\n"
        "    sys.stdin.read()\n"
    )
    command = [sys.executable, "-c", code, fake()]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as parent:
        sampler = os.pidfd_open(int(parent.stdout.readline()))
        parent.kill()
        assert select.select([sampler], [], [], WAIT_S)[0]
    os.close(sampler)


def test_ticks_whose_time_has_passed_are_left_out(fake):
    command = [sys.executable, "-m", "benchd.daemon.sampling.sources", "--sources", fake(), "--period", "0.01"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as sampler:
        first = msgspec.json.decode(sampler.stdout.readline(), type=Batch)
        sampler.send_signal(signal.SIGSTOP)
        assert not select.select([sampler.stdout], [], [], 0.1)[0]
        sampler.send_signal(signal.SIGCONT)
        sampler.stdin.write(msgspec.json.encode(FollowRequest(flush=True)) + b"\n")
        sampler.stdin.flush()
        batches, longest_ns = [first], 0
        while longest_ns < 0.1e9:
            batches.append(msgspec.json.decode(sampler.stdout.readline(), type=Batch))
            ticks = [tick for batch in batches for tick in batch.ticks_ns]
            longest_ns = max((later - earlier for earlier, later in pairwise(ticks)), default=0)
        sampler.stdin.close()
        assert sampler.wait(WAIT_S) == 0
    assert ticks == sorted(set(ticks))
    # the ten or more of the pause are not made up for; each side of it may begin late and end early
    assert len(ticks) <= (ticks[-1] - ticks[0] - longest_ns) / 0.01e9 + 4
    assert all(batch.failures == {} for batch in batches)
    assert batches[-1].flushes <= 1
