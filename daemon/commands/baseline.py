"""`benchd baseline`: the stored runs with which later runs are compared."""

import sys
from pathlib import Path
from typing import Annotated

import msgspec
import typer

from benchd.daemon.commands import application
from benchd.daemon.commands.arguments import AsJson
from benchd.daemon.reporting.console import print_baseline
from benchd.daemon.verdicts import baseline

app = application(no_args_is_help=True, help="Store, show or clear the runs to compare with.")


@app.command("set", epilog="Example: benchd baseline set bench-out")
def set_(
    runs: Annotated[list[Path], typer.Argument(help="Result files or folders: at least 3 runs of bench-once.")],
) -> None:
    """Store at least 3 runs as the baseline of this machine."""
    print_baseline(sys.stdout, baseline.set_(runs), baseline.path())


@app.command(epilog="Example: benchd baseline show --json")
def show(json: AsJson = False) -> None:
    """Print the stored baseline: its cases, or with --json its records."""
    kept = baseline.read(baseline.STORED)
    if json:
        sys.stdout.writelines(f"{msgspec.json.encode(record).decode()}\n" for record in kept)
    else:
        print_baseline(sys.stdout, kept, baseline.path())


@app.command(epilog="Example: benchd baseline clear")
def clear() -> None:
    """Delete the stored baseline."""
    sys.stdout.write("baseline cleared\n" if baseline.clear() else "no baseline is stored\n")
