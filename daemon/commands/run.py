"""`benchd run`: the service."""

from pathlib import Path
from typing import Annotated

import typer

from benchd.daemon.commands import application, arguments
from benchd.daemon.measuring import plan
from benchd.daemon.service import configuration, service

app = application()


@app.command(epilog="Example: benchd run --config /etc/benchd/benchd.toml")
def run(
    config: Annotated[Path, typer.Option(help="The service's TOML file.")] = Path("/etc/benchd/benchd.toml"),
    artifacts: arguments.Artifacts = None,
    check: Annotated[bool, typer.Option("--check", help="Check the configuration and exit.")] = False,
) -> None:
    """Run the service: measure on a schedule, and publish."""
    if check:
        configuration.checked(config, plan.inspect("auto"))
        raise typer.Exit
    raise typer.Exit(service.run(config, arguments.folder_of_files(artifacts)))
