"""`benchd schema`: the JSON Schema of a record."""

import sys

import msgspec

from benchd.daemon.commands import application
from benchd.daemon.records import json_schema

app = application()


@app.command(epilog="Example: benchd schema > record.schema.json")
def schema() -> None:
    """Print the JSON Schema of a record."""
    sys.stdout.write(msgspec.json.format(msgspec.json.encode(json_schema())).decode() + "\n")
