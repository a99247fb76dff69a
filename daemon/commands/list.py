"""`benchd list`: the models, options and variants, or the kernels for GPUs."""

import sys
from typing import Annotated

import typer

from benchd.daemon.commands import application
from benchd.daemon.commands.arguments import AsJson
from benchd.daemon.reporting.console import print_catalog, print_kernels

app = application()


@app.command("list", epilog="Example: benchd list --json")
def list_(
    kernels: Annotated[
        bool, typer.Option("--kernels", help="Compile and list the Triton kernels; needs no GPU.")
    ] = False,
    json: AsJson = False,
) -> None:
    """List models, options and variants, or the kernels for GPUs."""
    if kernels:
        print_kernels(sys.stdout, sys.stderr, json)
    else:
        print_catalog(sys.stdout, json)
