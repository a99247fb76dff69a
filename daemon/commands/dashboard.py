"""`benchd dashboard`: the fleet's collector and web pages."""

from pathlib import Path
from typing import Annotated

import typer

from benchd.daemon.commands import application
from benchd.daemon.commands.arguments import CaFile, CertificateFile, KeyFile, broker
from benchd.dashboard.start import start

app = application()


@app.command(epilog="Example: benchd dashboard --mqtt mqtt://collector@broker.local")
def dashboard(
    mqtt: Annotated[str, typer.Option(help="The fleet's broker.", metavar="mqtt://HOST[:PORT]")],
    database: Annotated[
        str | None,
        typer.Option(
            help="sqlite:///PATH or postgresql://HOST/NAME (default: a file in the state folder).", metavar="URL"
        ),
    ] = None,
    host: Annotated[str, typer.Option(help="Address to serve the pages on.", metavar="ADDRESS")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port to serve the pages on.", min=1, max=65535)] = 8420,
    collector: Annotated[
        str | None,
        typer.Option(help="Name of this collector, unique in the fleet (default: the host's name).", metavar="NAME"),
    ] = None,
    only: Annotated[str | None, typer.Option(help="Run only one of the two parts.", metavar="collector|pages")] = None,
    notify: Annotated[
        Path | None,
        typer.Option(help="Tell people about regressions, silent devices and failed checks.", metavar="FILE.toml"),
    ] = None,
    ca_file: CaFile = None,
    certificate_file: CertificateFile = None,
    key_file: KeyFile = None,
) -> None:
    """Show a fleet live on web pages and store its history."""
    start(broker(mqtt, ca_file, certificate_file, key_file), database, host, port, collector, only, notify)
