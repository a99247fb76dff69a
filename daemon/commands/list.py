"""`benchd list`: the models, options and variants."""

import sys

from benchd.daemon.commands import application
from benchd.daemon.commands.arguments import AsJson
from benchd.daemon.reporting.console import print_catalog

app = application()


@app.command("list", epilog="Example: benchd list --json")
def list_(json: AsJson = False) -> None:
    """List models, options and variants."""
    print_catalog(sys.stdout, json)
