"""`benchd schema`: the JSON Schema of a record, or of a shipped folder's manifest."""

import sys
from typing import Annotated

import msgspec
import typer

from benchd.daemon import records
from benchd.daemon.commands import application
from benchd.daemon.verdicts import manifest

app = application()


@app.command(epilog="Example: benchd schema > record.schema.json")
def schema(
    shipped: Annotated[bool, typer.Option("--shipped", help="That of manifest.json in a shipped folder.")] = False,
) -> None:
    """Print the JSON Schema of a record."""
    printed = manifest.json_schema() if shipped else records.json_schema()
    sys.stdout.write(msgspec.json.format(msgspec.json.encode(printed)).decode() + "\n")
