"""What a session keeps over its cases: one sampler, sinks of which one may fail, one description of the machine."""

import io
import math
from pathlib import Path

import pytest
from records_made import made
from sessions_made import session

from benchd.daemon.config import MqttConfig
from benchd.daemon.delivery.sinks import lasting
from benchd.daemon.errors import Full, UsageError
from benchd.daemon.machine.lock import Busy, MachineLock
from benchd.daemon.measuring.session import Sink, made_output
from benchd.daemon.measuring.supervisor import Supervisor
from benchd.daemon.records import decode
from benchd.daemon.verdicts.results import JOURNAL


def test_the_sampler_goes_on_from_case_to_case_until_the_session_rests(tmp_path):
    with session(tmp_path) as one:
        assert one.latest_samples() == []
        first = one.sampler([]).pid
        assert one.sampler([]).pid == first
        assert one.latest_samples()
        one.rest()
        assert one.latest_samples() == []
        assert one.sampler([]).pid != first
    assert not Path(f"/proc/{first}").exists()


def test_a_sink_that_fails_keeps_no_other_from_the_record(tmp_path):
    class Failing(Sink):
        def publish(self, record, body):
            raise Full("no room")

    kept = []

    class Keeping(Sink):
        def publish(self, record, body):
            kept.append(body)

    one = session(tmp_path, [Failing(), Keeping()])
    one.publish(made())
    assert len(kept) == 1
    assert one.failures == [f"{made().case_id}: no room"]


def test_a_number_that_is_not_finite_costs_its_record_alone(tmp_path):
    kept = []

    class Keeping(Sink):
        def publish(self, record, body):
            kept.append((record, decode(body)))

    one, reason = session(tmp_path, [Keeping()]), "record.throughput_per_s is not a finite number"
    one.publish(made(throughput_per_s=math.nan, flags=["mqtt"]))
    one.publish(made(run_id="r2"))
    (bad, read), (good, _) = kept
    assert (bad.run_id, bad.status, bad.timing, bad.flags, read) == ("r1", "failed", None, ["mqtt"], bad)
    assert bad.reason.startswith(reason)
    assert (good.run_id, good.status) == ("r2", "ok")
    assert [failure.split("; ")[0] for failure in one.failures] == [f"{made().case_id}: {reason}"]


def test_a_machine_that_is_busy_leaves_no_file_open(tmp_path):
    def open_files():
        return {str(one.readlink()) for one in Path("/proc/self/fd").iterdir() if one.is_symlink()}

    sinks = lasting(tmp_path, MqttConfig(), io.StringIO(), "mqtt://127.0.0.1:1")
    of_run = str(tmp_path / JOURNAL)
    assert of_run in open_files()
    with MachineLock(), pytest.raises(Busy), session(tmp_path, sinks) as one:
        Supervisor(one, []).run()
    assert of_run not in open_files()


def test_folders_that_cannot_be_written_are_said_before_anything_is_measured(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(UsageError, match=r"--output .*file/out: .* cannot be written: Not a directory"):
        made_output(tmp_path / "file" / "out")
