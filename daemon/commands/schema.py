"""`benchd schema`: the JSON Schema of a record, or of a shipped folder's manifest."""

import sys
from typing import Annotated

import msgspec
import typer

from benchd.daemon import records
from benchd.daemon.commands import application
from benchd.daemon.records import Record
from benchd.daemon.shipping.manifest import Manifest

app = application()


@app.command(epilog="Example: benchd schema > record.schema.json")
def schema(
    shipped: Annotated[bool, typer.Option("--shipped", help="Print the schema of a shipped manifest.json.")] = False,
) -> None:
    """Print the JSON Schema of a record."""
    printed = records.json_schema(Manifest if shipped else Record)
    sys.stdout.write(msgspec.json.format(msgspec.json.encode(printed)).decode() + "\n")
