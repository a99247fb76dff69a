"""The way from our number to another tool's, on workers whose times depend on the switches of their job."""

import io

import msgspec
import pytest
from sessions_made import session
from stub_interpreter import interpreter

from benchd.daemon.measuring.paired import Request
from benchd.daemon.why.bridge import Bridging, lines
from benchd.daemon.why.comparisons import Comparing
from benchd.daemon.why.foreign import Foreign

CASE = "square,eager,b1,size=16"
# one thread alone takes 2 ms more, bf16 alone 1 ms less, and both together one more than that
MS = (
    '5 + turn % 3 / 1000 + 2 * (one := \'"threads":1\' in job) - (half := \'"precision":"bf16"\' in job) '
    "+ (one and half) + 4 * ('\"batch_size\":2' in job) - ('\"one_input\":true' in job) / 2 "
    "+ ('\"span\":[0.0,255.0]' in job) / 4"
)


@pytest.fixture
def bridged(tmp_path):
    """Return a function that measures the way to a foreign result with these fields."""
    python = interpreter(tmp_path / "base", MS)
    with session(tmp_path / "out") as opened:

        def bridge(case=CASE, **fields):
            facts = {"same_input": False} | fields
            theirs = Foreign(tool="theirs", means="a call", latency_ms={"median": 8.0, "mean": 9.0}, **facts)
            request = Request([case], "quick", 0.01, pythons=[python])
            return Bridging(theirs, request, Comparing(opened, io.StringIO())).bridge()

        yield bridge


def test_each_switch_has_the_mean_of_both_orders_and_all_of_them_lead_to_their_number(bridged):
    bridge = bridged(quoted="median", threads=1, precision="bf16")
    assert bridge.ours_ms == pytest.approx(5.0, abs=0.01)
    added = {switch.name: switch.ms for switch in bridge.switches}
    assert added == pytest.approx({"1 thread, not all": 2.5, "bf16, not fp32": -0.5}, abs=0.02)
    assert bridge.unexplained_ms == pytest.approx(8.0 - 7.0, abs=0.02)
    assert bridge.explained == pytest.approx(2 / 3, abs=0.01)
    first, *_, unexplained, last = lines(msgspec.structs.replace(bridge, mark=""))
    assert first.startswith(CASE)
    assert unexplained.endswith("ms  unexplained")
    assert last == "theirs: 8 ms, median: a call"


def test_an_input_that_stays_in_the_caches_and_its_values_are_switches(bridged):
    (switch,) = bridged(quoted="median", same_input=True).switches
    assert (switch.name, switch.ms) == ("one input, which stays in the caches", pytest.approx(-0.5, abs=0.01))
    one, drawn = bridged(quoted="median", same_input=True, span=(0.0, 255.0)).switches
    assert one.ms == pytest.approx(-0.5, abs=0.01)
    assert (drawn.name, drawn.ms) == ("inputs drawn from 0 to 255", pytest.approx(0.25, abs=0.01))


def test_fewer_streams_than_ours_are_a_switch_too(bridged):
    (switch,) = bridged(f"{CASE},streams=2", quoted="median").switches
    assert switch.name == "1 stream, not 2"


def test_requests_that_wait_and_a_mean_need_no_run(bridged):
    bridge = bridged(quoted="mean", streams=1, in_flight=2)
    assert [switch.name for switch in bridge.switches] == [
        "2 requests in flight, 1 of them running",
        "mean, not median",
    ]
    assert bridge.switches[0].ms == pytest.approx(bridge.ours_ms)
    assert bridge.switches[1].ms == pytest.approx(2 * bridge.ours_ms * (9 / 5 - 1), rel=0.01)  # the stub's mean is 9 ms


def test_the_mean_is_that_of_our_case_with_all_switches(bridged):
    *_, mean = bridged(quoted="mean", threads=1, precision="bf16").switches
    assert (mean.name, mean.ms) == ("mean, not median", pytest.approx(9.0 - 7.0, abs=0.02))


def test_a_switch_that_the_case_cannot_take_is_named_with_the_reason(bridged):
    bridge = bridged(quoted="median", batch=2, threads=100_000)
    assert [switch.name for switch in bridge.switches] == ["batch 2, not 1"]
    assert len(bridge.untried) == 1
    assert bridge.untried[0].startswith("100000 threads, not all: ")
