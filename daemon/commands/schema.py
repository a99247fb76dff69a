"""`benchd schema`: prints the JSON Schema of a record, of a shipped folder's manifest, or of a command's output."""

import sys
from typing import Annotated, Any

import msgspec
import typer

from benchd.daemon import records
from benchd.daemon.commands import application
from benchd.daemon.errors import unknown
from benchd.daemon.measuring.capabilities import Capability, SelfCheck
from benchd.daemon.records import Record
from benchd.daemon.shipping.folder import ShipReport
from benchd.daemon.shipping.manifest import Manifest
from benchd.daemon.shipping.promise import VerificationResult
from benchd.daemon.verdicts.compare import Comparison
from benchd.daemon.why.comparing import Explanation

SCHEMAS: dict[str, Any] = {
    "record": Record,
    "manifest": Manifest,
    "compare": list[Comparison],
    "doctor": list[Capability],
    "selfcheck": SelfCheck,
    "ship": ShipReport,
    "verify": VerificationResult,
    "why": Explanation,
}

app = application()


@app.command(epilog="Example: benchd schema > record.schema.json")
def schema(
    what: Annotated[str, typer.Argument(help=f"{', '.join(SCHEMAS)}.", metavar="NAME")] = "record",
) -> None:
    """Print the JSON Schema of a record, a manifest or a command's --json output."""
    if what not in SCHEMAS:
        raise unknown("schema", what, SCHEMAS)
    printed = records.json_schema(SCHEMAS[what])
    sys.stdout.write(msgspec.json.format(msgspec.json.encode(printed)).decode() + "\n")
