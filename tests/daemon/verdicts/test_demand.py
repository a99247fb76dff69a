"""Which variant to ship for a rate, streams and a deadline, from the records of servers."""

import math

import msgspec
import pytest
from records_made import ENERGY, PASSED, made, requests, timing

from benchd.daemon.records import Case, Load, ProcessResult, Variant
from benchd.daemon.verdicts.compare import compare
from benchd.daemon.verdicts.demand import Demand, answering, missing, shortfall
from benchd.daemon.verdicts.recommend import Requirements, decide, line
from benchd.daemon.verdicts.rows import row

DEMAND = Demand(rate_hz=30.0, deadline_ms=33.0, streams=4)


def server(variant="eager", rate_hz=30.0, median_ms=5.0, *, met=True, is_found=False, streams=4, run_id="r", **load):
    """Return the record of a server with three processes."""
    given = Load(**{"rate_hz": None if is_found else rate_hz, "deadline_ms": 33.0} | load)
    answered = requests(late=0 if met else 100, met=met, rate_hz=rate_hz)
    times = [timing(median_ms * (1 + step / 1000)) for step in range(3)]
    return made(
        run_id=run_id,
        case=Case(model="vim_tiny", variant=Variant.parse(variant), scenario="server", streams=streams, load=given),
        timing=times[1],
        requests=answered,
        check=PASSED,
        processes=[ProcessResult(status="ok", timing=process_timing, requests=answered) for process_timing in times],
    )


def decided(*records, demand=DEMAND):
    (decision,) = decide(records, Requirements(demand=demand))
    return decision


def test_the_fastest_that_meets_the_deadline_ships():
    decision = decided(server(median_ms=5.0), server("amp", median_ms=4.0), server("compile", median_ms=1.0, met=False))
    assert decision.ship == "eager-amp"
    assert decision.subject == "vim_tiny b1 for 30 requests per second on 4 streams within 33 ms at p99"
    assert decision.excluded == {
        "compile": "misses 33 ms at p99 at 30 requests per second (100 late and 0 dropped of 1000)"
    }
    assert "4.004 ms at 30 requests per second" in line(decision)


@pytest.mark.parametrize("is_found", [False, True])
def test_a_higher_rate_or_a_found_one_answers_too(is_found):
    decision = decided(*(server(name, rate_hz=45.0, is_found=is_found) for name in ("eager", "amp")))
    assert len(decision.tied) == 2
    assert decision.excluded == {}


def with_energy(record, joules):
    """Return the record with an energy per inference, of each process too."""
    energy = msgspec.structs.replace(ENERGY, gross_per_inference_j=joules)
    processes = [msgspec.structs.replace(process, energy=energy) for process in record.processes]
    return msgspec.structs.replace(record, energy=energy, processes=processes)


@pytest.mark.parametrize("demand", [DEMAND, None])
def test_joules_at_two_found_rates_are_not_ranked(demand):
    """At 70 per second each request has less of the idle power than at 30."""
    fast, slow = (server(name, rate_hz=rate_hz, is_found=True) for name, rate_hz in (("amp", 70.0), ("eager", 30.0)))
    records = [with_energy(fast, 0.171), with_energy(slow, 0.26)]
    (decision,) = decide(records, Requirements(demand=demand, objective="energy"))
    assert (decision.ship, list(decision.candidates)) == (None, ["eager"])
    assert decision.excluded == {
        "eager-amp": "was measured at 70 requests per second, not at 30: measure it with --rate 30"
    }
    assert decision.unsettled == ["eager-amp"]


@pytest.mark.parametrize("is_found", [False, True])
def test_latencies_at_two_rates_are_not_ranked(is_found):
    decision = decided(server(), server("amp", rate_hz=60.0, median_ms=1.0, is_found=is_found))
    assert (decision.ship, decision.fastest) == (None, "eager")
    assert list(decision.excluded.values()) == [
        "was measured at 60 requests per second, not at 30: measure it with --rate 30"
    ]
    assert decision.unsettled == list(decision.excluded)


@pytest.mark.parametrize(
    ("record", "words"),
    [
        (server(rate_hz=20.0), "meets 33 ms only up to the measured 20 requests per second"),
        (server(rate_hz=20.0, is_found=True), "meets 33 ms only up to the measured 20 requests per second"),
        (server(deadline_ms=50.0), "was measured for 50 ms at p99, not for 33 ms at p99"),
        (server(percentile=90.0), "was measured for 33 ms at p90, not for 33 ms at p99"),
        (server(deadline_ms=None), "was measured for no deadline, not for 33 ms at p99"),
    ],
)
def test_what_does_not_answer_says_why(record, words):
    decision = decided(record)
    assert decision.ship is None
    assert decision.excluded == {"eager": words}


def test_of_several_records_the_one_at_the_least_sufficient_rate_counts():
    records = [server(rate_hz=rate_hz, run_id=f"{rate_hz}") for rate_hz in (90.0, 20.0, 31.0, 60.0)]
    assert [record.requests.rate_hz for record in answering(records, DEMAND)] == [31.0]
    late = [server(rate_hz=30.0, met=False), server(rate_hz=60.0)]
    assert [record.requests.rate_hz for record in answering(late, DEMAND)] == [60.0]


def test_records_of_other_streams_and_scenarios_do_not_answer():
    records = [server(streams=1), made()]
    assert answering(records, DEMAND) == []
    assert missing(records, DEMAND) == (
        "no record of a server with 4 streams; measure one: "
        "bench-once --scenario server --streams 4 --rate 30 --deadline 33ms"
    )
    assert missing([server()], DEMAND) is None
    assert shortfall(made(), DEMAND) == "was not measured as a server"


def test_without_a_demand_found_rates_rank_the_variants_and_not_their_latencies():
    fast, slow = server(rate_hz=60.0, median_ms=9.0, is_found=True), server("amp", rate_hz=30.0, is_found=True)
    (decision,) = decide([fast, slow], Requirements())
    assert decision.tied == ["eager b1"]
    assert "eager b1  60 requests per second" in line(decision)
    assert "2x" in line(decision)


def test_a_lead_of_found_rates_lies_in_its_interval():
    """A rate is the least of the processes; what is told apart is all of them."""
    records = []
    for variant, rates in (("eager", [100.0, 100.0, 99.0, 98.0, 90.0]), ("amp", [80.0, 80.0, 79.0, 78.0, 79.0])):
        record = server(variant, rate_hz=min(rates), is_found=True)
        each = [msgspec.structs.replace(record.requests, rate_hz=rate_hz) for rate_hz in rates]
        processes = [msgspec.structs.replace(record.processes[0], requests=served) for served in each]
        records.append(msgspec.structs.replace(record, processes=processes))
    (decision,) = decide(records, Requirements())
    assert decision.ship == "eager b1"
    assert decision.ratio == pytest.approx(math.prod([100 / 80, 100 / 80, 99 / 79, 98 / 78, 90 / 79]) ** 0.2)
    assert decision.ratio_interval.low < decision.ratio < decision.ratio_interval.high


def test_a_server_that_misses_its_own_deadline_never_ships():
    (decision,) = decide([server(met=False), server("amp", met=None)], Requirements())
    assert decision.ship is None
    assert set(decision.excluded) == {"eager", "eager-amp"}
    assert "too few requests to tell whether it meets 33 ms at p99" in decision.excluded["eager-amp"]


def overloaded(dropped):
    """Return the record of a server without a deadline that dropped so many of 1000 requests."""
    return msgspec.structs.replace(server(deadline_ms=None), requests=requests(dropped=dropped, met=None))


@pytest.mark.parametrize("dropped", [300, 700])
def test_a_server_that_drops_requests_beside_other_programs_says_so(dropped):
    record = msgspec.structs.replace(overloaded(dropped), flags=["busy_machine"])
    (decision,) = decide([record], Requirements())
    assert decision.excluded == {"eager": f"dropped {dropped} of 1000 requests: lower --rate (busy machine)"}


def test_a_server_that_drops_requests_neither_ships_nor_compares():
    record = overloaded(300)
    (decision,) = decide([record], Requirements())
    assert decision.excluded == {"eager": "dropped 300 of 1000 requests: lower --rate"}
    (comparison,) = compare([record], [msgspec.structs.replace(record, run_id="s")], 0.01)
    assert comparison.verdict.answer == "inconclusive"
    assert "A: dropped 300 of 1000 requests" in comparison.verdict.reason


def test_the_latency_of_the_answered_requests_meets_no_limit():
    record = overloaded(5)
    (decision,) = decide([record], Requirements(max_latency_ms=50.0))
    assert list(decision.excluded.values()) == [
        "has no p99 to compare with 50 ms (5 of 1000 requests were dropped): "
        "measure longer, for example with --preset standard, or lower --rate"
    ]
    assert row(record)["latency_upper_ms"] is None
    (decision,) = decide([record], Requirements())
    assert decision.excluded == {}
