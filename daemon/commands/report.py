"""`benchd report`: writes records as a page with charts, or as Markdown, CSV or JSON."""

import sys
from pathlib import Path
from typing import Annotated

import typer

from benchd.daemon.commands import application
from benchd.daemon.commands.arguments import Files, choices, names
from benchd.daemon.reporting import report as reporting

app = application()


@app.command(epilog="Example: benchd report bench-out --format html,csv --output report")
def report(
    files: Files,
    format_: Annotated[str, typer.Option("--format", help="Any of html, md, csv, json.", metavar="A,B")] = "html",
    output: Annotated[Path, typer.Option(help="Folder for report.html and the other formats.", metavar="DIR")] = Path(
        "bench-out"
    ),
) -> None:
    """Write records as HTML, Markdown, CSV or JSON."""
    formats = choices("format", names("--format", format_), list(reporting.FORMATS))
    reporting.report(files, formats, output, sys.stdout)
