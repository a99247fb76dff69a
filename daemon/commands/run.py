"""`benchd run`: the service."""

from pathlib import Path
from typing import Annotated

import typer

from benchd.daemon.commands import application, arguments
from benchd.daemon.service import service

app = application()


@app.command(epilog="Example: benchd run --config /etc/benchd/benchd.toml")
def run(
    config: Annotated[Path, typer.Option(help="The TOML file of the service.")] = Path("/etc/benchd/benchd.toml"),
    artifacts: arguments.Artifacts = None,
) -> None:
    """Run the service: measure on a schedule, publish results, accept commands."""
    raise typer.Exit(service.run(config, arguments.folder_of_files(artifacts)))
