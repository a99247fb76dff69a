"""Streams and loads in a plan: which cases they make, how they are named and repeated, and what is refused."""

import pytest

from benchd.daemon.config import LimitsConfig, Suite
from benchd.daemon.errors import UsageError
from benchd.daemon.measuring import plan
from benchd.daemon.measuring.plan import Machine
from benchd.daemon.records import Case, Variant
from benchd.daemon.verdicts.statistics import minimum_samples

CPU = Machine("cpu", has_cxx=True)


def planned(**fields):
    return plan.plan([Suite(models=["square"], variants=["eager"], preset="quick", **fields)], LimitsConfig(), CPU)


def test_rates_and_streams_multiply_into_cases():
    cases = planned(scenarios=["server"], rates_hz=[30, 12.5], streams=[1, 4], deadline_ms=33, queue=8)
    assert [entry.case.case_id for entry in cases] == [
        "square,eager,b1,server,rate=30,deadline=33,queue=8",
        "square,eager,b1,server,rate=12.5,deadline=33,queue=8",
        "square,eager,b1,server,streams=4,rate=30,deadline=33,queue=8",
        "square,eager,b1,server,streams=4,rate=12.5,deadline=33,queue=8",
    ]


def test_a_load_is_of_a_server_alone_and_streams_of_inference_alone():
    cases = planned(
        scenarios=["single_stream", "server"], rates_hz=[30], streams=[2], directions=["inference", "training"]
    )
    assert [entry.case.case_id for entry in cases] == [
        "square,eager,b1,streams=2",
        "square,eager,b1,server,streams=2,rate=30",
        "square,eager,b1,training",
    ]


def test_a_server_runs_until_its_percentile_has_enough_requests():
    (slow,) = planned(scenarios=["server"], rates_hz=[10])
    assert slow.limits.rule.cap_s == minimum_samples(99) / 10
    assert slow.limits.asked()["cap_s"] == slow.limits.rule.cap_s
    (fast,) = planned(scenarios=["server"], rates_hz=[1000], percentile=90)
    assert fast.limits.rule.cap_s == plan.PRESETS["quick"].rule.cap_s


@pytest.mark.parametrize(
    ("device", "variant", "streams", "most"),
    [
        ("cuda", "eager", 32, None),
        ("cuda", "eager", 33, 32),
        ("cuda", "custom-cudagraph-fp16", 16, None),
        ("cuda", "cudagraph", 17, 16),
        ("cpu", "eager", 64, None),
    ],
)
def test_no_two_streams_share_a_cuda_stream(device, variant, streams, most):
    case = Case(model="vim_tiny", variant=Variant.parse(variant), streams=streams)
    reason = plan.why_not(case, Machine(device, has_cxx=True)) or ""
    allowed = f"torch's 32 CUDA streams allow at most {most} streams of {case.variant.backend}"
    named = f"{allowed}: give --streams {most} or fewer"
    assert reason == named if most else "CUDA streams" not in reason


SERVER = {"scenarios": ["server"], "rates_hz": [30.0]}
FOUND = {"scenarios": ["server"], "find_rate": True}


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"rates_hz": [30.0]}, "--rate needs --scenario server"),
        ({"find_rate": True, "deadline_ms": 3.0}, "--find-rate needs --scenario server"),
        ({"deadline_ms": 3.0, "scenarios": ["periodic"]}, "--deadline needs --scenario server"),
        ({"scenarios": ["server"]}, r"give --rate 30 \(requests per second\), or --find-rate with --deadline 33ms"),
        (FOUND, "--find-rate: also give the deadline to meet, such as --deadline 33ms"),
        ({**SERVER, "directions": ["training"]}, "training is measured only with --scenario single_stream"),
        ({**FOUND, **SERVER, "deadline_ms": 3.0}, "--rate and --find-rate: give only one"),
        ({"streams": [1, 4], "directions": ["training"]}, "--streams: for inference only"),
        (
            {"streams": [1, 2], "scenarios": ["single_stream", "offline"]},
            "--streams: with --scenario single_stream or server, not offline",
        ),
    ],
)
def test_what_cannot_be_meant_is_refused(fields, words):
    with pytest.raises(UsageError, match=words):
        planned(**fields)
