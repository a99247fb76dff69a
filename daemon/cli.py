"""The commands `bench-once` and `benchd`: which verb is which file."""

import io
import os
import sys
from contextlib import AbstractContextManager, nullcontext, redirect_stdout
from importlib import import_module
from pathlib import Path
from typing import Any, TextIO

import typer
from typer.core import TyperGroup

from benchd.daemon.commands import Version, application
from benchd.daemon.errors import BenchdError, NotAvailable, UsageError, require_measure

VERBS = (  # in the order of `benchd --help`; a hyphen is an underscore in the file's name
    "ship",
    "verify",
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
def _root(version: Version = False) -> None:
    """Benchmark deployment variants of models on edge devices: speed, clocks, memory and agreement in one record."""


def bench_once() -> None:
    """Run the command `bench-once`."""
    _exit_with("once")


def benchd() -> None:
    """Run the command `benchd`."""
    _exit_with(None)


def _exit_with(verb: str | None) -> None:
    """Run a verb, or the command line's; print a BenchdError as one line and exit with the code of its kind."""
    given = sys.stdout or Path(os.devnull).open("w", encoding="utf-8")  # noqa: SIM115
    try:
        with _outlasting_its_reader(given) as out, redirect_stdout(out):
            (command(verb) if verb else _benchd)()
    except KeyboardInterrupt:  # before the command's own handler
        sys.exit(130)
    except BenchdError as error:
        sys.stderr.write(f"error: {error}\n")
        sys.exit(7 if isinstance(error, NotAvailable) else 2)


class _Discarding(io.FileIO):
    """A pipe that discards what nobody reads any more, so that `| head` does not change a command's exit code."""

    def write(self, data: Any) -> int:
        try:
            return super().write(data)
        except OSError as error:
            os.dup2(os.open(os.devnull, os.O_WRONLY), self.fileno())
            if isinstance(error, BrokenPipeError):
                return len(data)
            raise UsageError(f"standard output: {error.strerror}") from error


def _outlasting_its_reader(out: Any) -> AbstractContextManager[TextIO]:
    try:
        pipe = _Discarding(os.dup(out.fileno()), "w")
    except io.UnsupportedOperation:  # in memory: nobody reads it who could leave
        return nullcontext(out)
    return io.TextIOWrapper(io.BufferedWriter(pipe), out.encoding, out.errors, line_buffering=out.isatty())


if __name__ == "__main__":
    benchd()
