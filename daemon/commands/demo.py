"""`benchd demo`: a demonstration fleet on this machine."""

from typing import Annotated

import typer

from benchd.daemon.commands import application
from benchd.dashboard.start import demonstrate

app = application()


@app.command(epilog="Example: benchd demo --port 9000")
def demo(port: Annotated[int, typer.Option(help="Port to serve the pages on.", min=1, max=65535)] = 8420) -> None:
    """Try the dashboard with seven simulated boards.

    The records that bench-once measures on this machine are shown too.
    """
    raise typer.Exit(demonstrate(port))
