"""`benchd demo`: a demonstration fleet on this machine."""

import sys
from typing import Annotated

import typer

from benchd.daemon.commands import application
from benchd.daemon.errors import needing

app = application()


@app.command(epilog="Example: benchd demo --port 9000")
def demo(port: Annotated[int, typer.Option(help="Port to serve the pages on.", min=1, max=65535)] = 8420) -> None:
    """Try the dashboard with seven simulated boards.

    The records that bench-once measures on this machine are shown too.
    """
    with needing("dashboard"):
        from benchd.dashboard.demo.start import run  # noqa: PLC0415

        raise typer.Exit(run(port, sys.stderr))
