"""`benchd recommend`: recommends which variant of each model to ship, based on records."""

import sys
from typing import Annotated, Any

import typer

from benchd.daemon.commands import application, arguments, options
from benchd.daemon.commands.options import OfferedField
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
@options.of_suite(
    OfferedField("rates_hz", "Requests per second that the variant must answer (with --deadline).", single=True),
    OfferedField("streams", "Streams that answer them (default 1).", single=True),
    *("deadline_ms", "percentile"),
)
def recommend(
    given: dict[str, Any],
    files: arguments.Files,
    max_latency: arguments.MaxLatency = None,
    max_power: arguments.MaxPower = None,
    max_memory: arguments.MaxMemory = None,
    min_agreement: arguments.MinAgreement = None,
    max_accuracy_drop: arguments.MaxAccuracyDrop = None,
    objective: Annotated[
        str, typer.Option(help="What to rank the variants by.", metavar="latency|energy|throughput")
    ] = "latency",
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
        demand=_demand(options.suite(given | {"scenarios": ["server"]})) if given else None,
        objective=objective,
    )
    records = results.read_all(files)
    lacking = missing(records, requirements.demand) if requirements.demand else None
    if lacking:
        raise UsageError(lacking)
    decisions = decide(records, requirements)
    if not decisions:
        raise UsageError("these records contain no inference, and training cannot be shipped")
    trained = dict.fromkeys(record.case_id for record in records if record.case.direction == "training")
    sys.stderr.writelines(f"ignoring {case_id}: training cannot be shipped\n" for case_id in trained)
    print_decisions(sys.stdout, decisions, json)
    raise typer.Exit(0 if all(decision.ship for decision in decisions) else 4)


def _demand(suite: Suite) -> Demand:
    """Return the demand given by a server's options; raise UsageError unless both rate and deadline are given."""
    if not suite.rates_hz or suite.deadline_ms is None:
        raise UsageError("give both --rate and --deadline, as in --rate 30 --deadline 33ms")
    loads.refuse(suite)
    percentile = PERCENTILE if suite.percentile is None else suite.percentile
    streams = suite.streams[0] if suite.streams else 1
    return Demand(rate_hz=suite.rates_hz[0], streams=streams, deadline_ms=suite.deadline_ms, percentile=percentile)
