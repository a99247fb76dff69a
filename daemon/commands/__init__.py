"""One file per verb, with its options next to the code that uses them; no verb imports another."""

import sys
from importlib.metadata import version
from typing import Annotated, Any

import typer

from benchd.daemon.commands.command import Application


def _print_version(is_requested: bool) -> None:
    if is_requested:
        sys.stdout.write(f"benchd {version('benchd')}\n")
        raise typer.Exit


Version = Annotated[
    bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
]


def application(**settings: Any) -> typer.Typer:
    """Return an empty Typer application with plain help and plain errors, whose commands reject empty values."""
    settings["context_settings"] = {"help_option_names": ["-h", "--help"]}
    return Application(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False, **settings)
