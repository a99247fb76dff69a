"""`benchd recommend`: which variant of each model to ship, from records."""

import sys
from typing import Annotated

import typer

from benchd.daemon.commands import application, arguments
from benchd.daemon.config import Suite
from benchd.daemon.errors import UsageError, unknown
from benchd.daemon.measuring import loads
from benchd.daemon.records import PERCENTILE
from benchd.daemon.reporting.console import print_decisions
from benchd.daemon.verdicts import results
from benchd.daemon.verdicts.demand import Demand, missing
from benchd.daemon.verdicts.recommend import OBJECTIVES, Requirements, decide

app = application()


@app.command(epilog="Example: benchd recommend bench-out --max-latency 33ms --objective energy")
def recommend(
    files: arguments.Files,
    max_latency: arguments.MaxLatency = None,
    max_power: arguments.MaxPower = None,
    max_memory: arguments.MaxMemory = None,
    min_agreement: arguments.MinAgreement = None,
    max_accuracy_drop: arguments.MaxAccuracyDrop = None,
    rate: Annotated[
        str | None, typer.Option(help="Requests per second that it must answer, with --deadline.", metavar="30Hz")
    ] = None,
    streams: Annotated[int | None, typer.Option(help="Streams that answer them (default 1).")] = None,
    deadline: arguments.Deadline = None,
    percentile: arguments.Percentile = None,
    objective: Annotated[str, typer.Option(help="latency, energy or throughput.")] = "latency",
    json: arguments.AsJson = False,
) -> None:
    """Print which variant of each model to ship, and why.

    Exits with 4 if a model remains undecided.
    """
    if objective not in OBJECTIVES:
        raise unknown("objective", objective, OBJECTIVES)
    requirements = Requirements(
        max_latency_ms=arguments.limit("--max-latency", max_latency, arguments.LATENCY_UNITS),
        max_power_w=arguments.limit("--max-power", max_power, arguments.POWER_UNITS),
        max_memory_bytes=arguments.limit("--max-memory", max_memory, arguments.MEMORY_UNITS),
        min_agreement=arguments.agreement(min_agreement),
        max_accuracy_drop=arguments.accuracy_drop(max_accuracy_drop) if max_accuracy_drop else None,
        demand=_demand(rate, streams, deadline, percentile),
        objective=objective,
    )
    found = results.read_all(files)
    lacking = missing(found, requirements.demand) if requirements.demand else None
    if lacking:
        raise UsageError(lacking)
    decisions = decide(found, requirements)
    if not decisions:
        raise UsageError("no inference in these records; training is not shipped")
    trained = dict.fromkeys(record.case_id for record in found if record.case.direction == "training")
    sys.stderr.writelines(f"not {case_id}: training is not shipped\n" for case_id in trained)
    print_decisions(sys.stdout, decisions, json)
    raise typer.Exit(0 if all(decision.ship for decision in decisions) else 4)


def _demand(rate: str | None, streams: int | None, deadline: str | None, percentile: float | None) -> Demand | None:
    """Return what the options ask for, None without any; raise UsageError unless both rate and deadline are given."""
    rate_hz = arguments.limit("--rate", rate, arguments.RATE_UNITS)
    deadline_ms = arguments.limit("--deadline", deadline, arguments.LATENCY_UNITS)
    if rate_hz is None and deadline_ms is None and streams is None and percentile is None:
        return None
    if rate_hz is None or deadline_ms is None:
        raise UsageError("give both --rate and --deadline, as in --rate 30 --deadline 33ms")
    streams = 1 if streams is None else streams
    loads.refuse(Suite(scenarios=["server"], rates_hz=[rate_hz], streams=[streams], percentile=percentile))
    percentile = PERCENTILE if percentile is None else percentile
    return Demand(rate_hz=rate_hz, streams=streams, deadline_ms=deadline_ms, percentile=percentile)
