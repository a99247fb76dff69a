"""`benchd baseline`: stores the runs that later runs are compared with."""

import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import msgspec
import typer

from benchd.daemon import config as configuration
from benchd.daemon.commands import application
from benchd.daemon.commands.arguments import AsJson
from benchd.daemon.config import Config
from benchd.daemon.measuring import plan
from benchd.daemon.records import Record
from benchd.daemon.reporting.console import print_baseline
from benchd.daemon.service.agenda import Agenda
from benchd.daemon.service.facts import Facts
from benchd.daemon.verdicts import baseline
from benchd.daemon.verdicts.alarms import DAILY, Budget

app = application(
    no_args_is_help=True,
    help="Store, show or clear the runs to compare with.",
    epilog="Example: benchd baseline set bench-out",
)


@app.command("set", epilog="Example: benchd baseline set bench-out")
def set_(
    runs: Annotated[list[Path], typer.Argument(help="Result files or folders from bench-once.")],
) -> None:
    """Store these runs as the baseline of this machine."""
    records = baseline.chosen(runs)
    baseline.store(records)
    print_baseline(sys.stdout, records, _stored(), _budget(records, None))


@app.command(epilog="Example: benchd baseline show --config /etc/benchd/benchd.toml")
def show(
    config: Annotated[
        Path | None, typer.Option(help="The service's TOML file: baseline runs, schedule and budget for false alarms.")
    ] = None,
    json: AsJson = False,
) -> None:
    """Print the baseline: its cases and the slowdown that raises an alarm or, with --json, its records."""
    settings = configuration.read(config) if config else None
    runs = settings.baseline.runs if settings else []
    records = baseline.pinned(runs)
    if json:
        sys.stdout.writelines(f"{msgspec.json.encode(record).decode()}\n" for record in records)
    else:
        place = f"read from {', '.join(runs)}" if runs else _stored()
        print_baseline(sys.stdout, records, place, _budget(records, settings))


def _stored() -> str:
    return f"stored in {baseline.path()}"


def _budget(records: Sequence[Record], settings: Config | None) -> Budget:
    """Return the service's budget or, without its configuration, the default one, as if each case ran once a day."""
    if settings:
        results = Agenda(settings, plan.inspect("auto"), Facts()).results_per_month(time.time())
        return Budget(settings.baseline.false_alarms_per_month, results)
    results = dict.fromkeys((record.case_id for record in records), DAILY)
    return Budget(Config().baseline.false_alarms_per_month, results)


@app.command(epilog="Example: benchd baseline clear")
def clear() -> None:
    """Delete the stored baseline."""
    sys.stdout.write("baseline cleared\n" if baseline.clear() else "no baseline is stored\n")
