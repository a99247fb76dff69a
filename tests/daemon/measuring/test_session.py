"""What a session keeps over its cases: one sampler, sinks of which one may fail, one description of the machine."""

from pathlib import Path

import pytest
from records_made import made
from sessions_made import session

from benchd.daemon.errors import Full, UsageError
from benchd.daemon.measuring.session import Sink, made_output


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


def test_folders_that_cannot_be_written_are_said_before_anything_is_measured(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(UsageError, match=r"--output .*file/out: .* cannot be written: Not a directory"):
        made_output(tmp_path / "file" / "out")
