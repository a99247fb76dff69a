"""`benchd power-sweep`, as root: runs bench-once in each of a Jetson's power modes, then restores the original mode."""

import sys
from pathlib import Path
from typing import Annotated

import typer

from benchd.daemon.commands import application
from benchd.daemon.commands.arguments import names
from benchd.daemon.measuring import power_modes

BENCH_ONCE = Path(sys.executable).with_name("bench-once")

app = application()


@app.command("power-sweep", epilog="Example: sudo .venv/bin/benchd power-sweep --modes 15W,25W -- --preset quick")
def power_sweep(
    modes: Annotated[str, typer.Option(help="Power modes, as nvpmodel names them.", metavar="15W,25W,MAXN")],
    case: Annotated[list[str], typer.Argument(help="Options of bench-once.", metavar="-- OPTIONS")],
) -> None:
    """Measure the same cases in several power modes.

    The original mode is always restored.
    """
    raise typer.Exit(power_modes.run(names("--modes", modes), [str(BENCH_ONCE), *case], sys.stderr))
