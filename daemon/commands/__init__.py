"""One file per verb: its options next to the code that uses them; no verb imports another."""

from typing import Any

import typer


def application(**settings: Any) -> typer.Typer:
    """Return an empty Typer application with plain help and plain errors."""
    return typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False, **settings)
