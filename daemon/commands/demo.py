"""`benchd demo`: a whole fleet on this machine, to look at."""

from typing import Annotated

import typer

from benchd.daemon.commands import application
from benchd.dashboard.start import demonstrate

app = application()


@app.command(epilog="Example: benchd demo --port 9000")
def demo(port: Annotated[int, typer.Option(help="Port of the pages.")] = 8420) -> None:
    """Try it all: broker, dashboard and three simulated devices.

    This machine is measured beside them.
    """
    raise typer.Exit(demonstrate(port))
