"""`benchd dashboard`: the fleet's collector and web pages."""

from pathlib import Path
from typing import Annotated

import typer

from benchd.daemon.commands import application
from benchd.daemon.commands.arguments import CaFile, CertificateFile, KeyFile, broker, choices
from benchd.daemon.errors import UsageError, needing

PARTS = ("collector", "pages")
IN_MEMORY = ("sqlite://", "sqlite:///", "sqlite:///:memory:")  # each connection to one of these has a separate database

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
    name: Annotated[
        str | None,
        typer.Option(
            "--collector",
            help="Name of this collector, unique in the fleet (default: the host's name).",
            metavar="NAME",
        ),
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
    to = broker(mqtt, ca_file, certificate_file, key_file)
    choices("part", [only] if only else [], PARTS)
    if notify and only == "pages":
        raise UsageError("--notify is for the collector: leave it out with --only pages")
    if database in IN_MEMORY:
        raise UsageError(f"--database {database}: the collector and the pages must share a file, sqlite:///PATH")
    with needing("dashboard"):
        from benchd.dashboard import collector, notices  # noqa: PLC0415
        from benchd.dashboard.store import default_url  # noqa: PLC0415
    url, name = database or default_url(), name or collector.default_name()
    settings = notices.read(notify) if notify else None
    if only == "collector":
        collector.run(to, url, name, settings)
        return
    with needing("dashboard"):
        from benchd.dashboard.app import serve  # noqa: PLC0415 - a collector alone needs no pages
    serve(to, url, name, host, port, collect=only is None, notify=settings)
