"""`--verify` on this machine: what is measured, what cannot be, and what a finding says then."""

from io import StringIO

import pytest
from profile_shown import shown_on_cpu
from sessions_made import session

from benchd.daemon.delivery.log import Log
from benchd.daemon.delivery.sinks import LogSink
from benchd.daemon.profiling.profile import Finding
from benchd.daemon.profiling.verification import MOST_CASES, tried
from benchd.daemon.records import Case
from benchd.daemon.verdicts import results


def finding(variant=None, **fields):
    return Finding(rule=str(variant), title="t", evidence=[], advice="a", expected=0.5, variant=variant, **fields)


def square(*findings):
    return shown_on_cpu(case=Case(model="square", options={"size": 64}), findings=list(findings))


def test_what_cannot_run_here_is_said_and_the_finding_stays_unmeasured(tmp_path):
    profile = square(finding(), finding("tensorrt"), finding("custom"))
    result = tried(profile, 2, session(tmp_path), StringIO())
    assert result.findings == profile.findings
    assert "TensorRT needs an NVIDIA GPU" in result.missing["verify square,tensorrt,b1,size=64"]
    assert "no custom kernels" in result.missing["verify square,custom,b1,size=64"]


def test_equal_cases_are_tried_once_and_of_many_the_first(tmp_path):
    names = ["tensorrt", "tensorrt", "tensorrt-fp16", "cudagraph", "cudagraph-fp16"]
    err = StringIO()
    result = tried(square(*map(finding, names)), 2, session(tmp_path), err)
    assert len(result.missing) == MOST_CASES == err.getvalue().count("verify ")
    assert "verify square,cudagraph-fp16,b1,size=64" not in result.missing


@pytest.mark.slow
def test_a_larger_square_refutes_that_it_is_faster(tmp_path, monkeypatch):
    """By 1024 times the work, so that no other load decides it."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    sink = LogSink(Log(tmp_path / "records.jsonl"))
    with session(tmp_path, [sink]) as one:
        found = tried(square(finding("eager", options={"size": 2048})), 2, one, StringIO())
    (one,) = found.findings
    assert (one.verdict, found.missing) == ("refuted", {})
    assert one.measured > 2
    assert [record.case.options["size"] for record in results.read(tmp_path)] == [64, 2048]
