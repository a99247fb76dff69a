"""What a session keeps over its cases: one sampler, sinks of which one may fail, one description of the machine."""

import math
from pathlib import Path

from records_made import made
from sessions_made import session

from benchd.daemon.errors import Full
from benchd.daemon.measuring.session import Sink
from benchd.daemon.records import decode


def test_the_sampler_goes_on_from_case_to_case_until_the_session_rests(tmp_path):
    with session(tmp_path) as bench_session:
        assert bench_session.latest_samples() == []
        first = bench_session.sampler([]).pid
        assert bench_session.sampler([]).pid == first
        assert bench_session.latest_samples()
        bench_session.rest()
        assert bench_session.latest_samples() == []
        assert bench_session.sampler([]).pid != first
    assert not Path(f"/proc/{first}").exists()


class Keeping(Sink):
    """Keeps the records with what is read of their lines."""

    def __init__(self):
        self.kept = []

    def publish(self, record, body):
        self.kept.append((record, decode(body)))


def test_a_sink_that_fails_keeps_no_other_from_the_record(tmp_path):
    class Failing(Sink):
        def publish(self, record, body):
            raise Full("no room")

    bench_session = session(tmp_path, [Failing(), keeping := Keeping()])
    bench_session.publish(made())
    assert keeping.kept == [(made(), made())]
    assert bench_session.failures == [f"{made().case_id}: no room"]


def test_a_number_that_is_not_finite_costs_its_record_alone(tmp_path):
    bench_session, reason = session(tmp_path, [keeping := Keeping()]), "record.throughput_per_s is not a finite number"
    bench_session.publish(made(throughput_per_s=math.nan, flags=["mqtt"]))
    bench_session.publish(made(run_id="r2"))
    (bad, read), (good, _) = keeping.kept
    assert (bad.run_id, bad.status, bad.timing, bad.flags, read) == ("r1", "failed", None, ["mqtt"], bad)
    assert bad.reason.startswith(reason)
    assert (good.run_id, good.status) == ("r2", "ok")
    assert [failure.split("; ")[0] for failure in bench_session.failures] == [f"{made().case_id}: {reason}"]
