"""The commands `bench-once` and `benchd`: which verb is which file."""

import sys
from collections.abc import Callable
from importlib import import_module
from typing import Any

import typer
from typer.core import TyperGroup

from benchd.daemon.commands import application
from benchd.daemon.errors import BenchdError, NotAvailable, require_measure

VERBS = (  # in the order of `benchd --help`; a hyphen is an underscore in the file's name
    "compare",
    "baseline",
    "noise-floor",
    "recommend",
    "report",
    "show",
    "profile",
    "list",
    "schema",
    "replay",
    "run",
    "export",
    "doctor",
    "selfcheck",
    "power-sweep",
    "dashboard",
    "demo",
    "watch",
)


class _Verbs(TyperGroup):
    """Imports a verb's file only when that verb is invoked, so that each starts fast."""

    def __init__(self, **attributes: Any) -> None:
        super().__init__(**attributes)
        self.commands: dict[str, Any] = dict.fromkeys(VERBS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        return command(cmd_name) if cmd_name in VERBS else None


def command(verb: str) -> Any:
    """Return the command of a verb (`once` for bench-once); if its packages are missing, it names the extra to add."""
    try:
        app = import_module(f"benchd.daemon.commands.{verb.replace('-', '_')}").app
    except ModuleNotFoundError as error:
        app = _lacking(error)
    return typer.main.get_command(app)


def _lacking(error: ModuleNotFoundError) -> typer.Typer:
    app = application()

    @app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
    def lacking() -> None:
        """Needs an extra that is not installed, such as benchd[cpu]."""
        require_measure()
        raise error

    return app


_benchd = application(cls=_Verbs, no_args_is_help=True)


@_benchd.callback()
def _root() -> None:
    """Benchmark deployment variants of models on edge devices: speed, clocks, memory and agreement in one record."""


def bench_once() -> None:
    """Run the command `bench-once`."""
    _exit_with(command("once"))


def benchd() -> None:
    """Run the command `benchd`."""
    _exit_with(_benchd)


def _exit_with(app: Callable[[], None]) -> None:
    """Run `app`; print a BenchdError as one line and exit with the code of its kind."""
    try:
        app()
    except BenchdError as error:
        sys.stderr.write(f"error: {error}\n")
        sys.exit(7 if isinstance(error, NotAvailable) else 2)


if __name__ == "__main__":
    benchd()
