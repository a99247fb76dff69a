"""`benchd recommend`: which variant of each model to ship, from records."""

import sys
from typing import Annotated

import typer

from benchd.daemon.commands import application
from benchd.daemon.commands.arguments import AsJson, Files, accuracy_drop, quantity
from benchd.daemon.errors import UsageError, unknown
from benchd.daemon.reporting.console import print_decisions
from benchd.daemon.verdicts import results
from benchd.daemon.verdicts.recommend import OBJECTIVES, Requirements, decide

MEMORY_UNITS = {"GiB": 2**30, "MiB": 2**20, "GB": 1e9, "MB": 1e6}

app = application()


@app.command(epilog="Example: benchd recommend bench-out --max-latency 33ms --objective energy")
def recommend(
    files: Files,
    max_latency: Annotated[
        str | None, typer.Option(help="Limit of p99, or of the median's upper bound if p99 is missing.", metavar="33ms")
    ] = None,
    max_power: Annotated[str | None, typer.Option(help="Limit of the mean input power.", metavar="10W")] = None,
    max_memory: Annotated[str | None, typer.Option(help="Limit of peak memory.", metavar="2GiB")] = None,
    min_agreement: Annotated[
        float | None,
        typer.Option(help="Least share of images, except ties, with float64's class (default 0.98).", metavar="0.995"),
    ] = None,
    max_accuracy_drop: Annotated[
        str | None,
        typer.Option(help="Limit of the accuracy lost against plain fp32 on the same images.", metavar="1%"),
    ] = None,
    objective: Annotated[str, typer.Option(help="latency, energy or throughput.")] = "latency",
    json: AsJson = False,
) -> None:
    """Print which variant of each model to ship, and why.

    Exits with 4 if a model remains undecided.
    """
    if objective not in OBJECTIVES:
        raise unknown("objective", objective, OBJECTIVES)
    if min_agreement is not None and not 0.0 < min_agreement <= 1.0:
        raise UsageError(f"--min-agreement {min_agreement:g}: expected a share above 0 and at most 1, such as 0.995")
    requirements = Requirements(
        max_latency_ms=quantity("--max-latency", max_latency, {"ms": 1, "s": 1e3, "us": 1e-3}) if max_latency else None,
        max_power_w=quantity("--max-power", max_power, {"W": 1, "mW": 1e-3}) if max_power else None,
        max_memory_bytes=quantity("--max-memory", max_memory, MEMORY_UNITS) if max_memory else None,
        min_agreement=min_agreement,
        max_accuracy_drop=accuracy_drop(max_accuracy_drop) if max_accuracy_drop else None,
        objective=objective,
    )
    found = results.read_all(files)
    decisions = decide(found, requirements)
    if not decisions:
        raise UsageError("no inference in these records; training is not shipped")
    trained = dict.fromkeys(record.case_id for record in found if record.case.direction == "training")
    sys.stderr.writelines(f"not {case_id}: training is not shipped\n" for case_id in trained)
    print_decisions(sys.stdout, decisions, json)
    raise typer.Exit(0 if all(decision.ship for decision in decisions) else 4)
