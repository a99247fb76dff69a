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
from benchd.daemon.errors import BenchdError, NotAvailable, require_measure

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
    """Run a verb, or the command line's, and exit with its code; 0 becomes 1 if its output could not be written."""
    given = sys.stdout or Path(os.devnull).open("w", encoding="utf-8")  # noqa: SIM115
    pipe = _discarding(given)
    code = _code(verb, nullcontext(given) if pipe is None else _text(pipe, given))
    if pipe and pipe.failure:
        sys.stderr.write(f"error: standard output: {pipe.failure}\n")
        code = code or 1
    sys.exit(code)


def _code(verb: str | None, output: AbstractContextManager[TextIO]) -> int | str | None:
    """Run a verb, or the command line's; print a BenchdError as one line and return the exit code."""
    try:
        with output as out, redirect_stdout(out):
            (command(verb) if verb else _benchd)()
    except SystemExit as end:
        return end.code
    except KeyboardInterrupt:  # before the command's own handler
        return 130
    except BenchdError as error:
        sys.stderr.write(f"error: {error}\n")
        return 7 if isinstance(error, NotAvailable) else 2
    return 0


class _Discarding(io.FileIO):
    """A standard output that discards what cannot be written any more, so that the command's work goes on.

    A reader that leaves, as `| head` does, is no failure; a full disk is, and `failure` says so.
    """

    failure: str | None = None

    def write(self, data: Any) -> int:
        try:
            return super().write(data)
        except OSError as error:
            os.dup2(os.open(os.devnull, os.O_WRONLY), self.fileno())
            if not isinstance(error, BrokenPipeError):
                self.failure = error.strerror
            return len(data)


def _discarding(out: TextIO) -> _Discarding | None:
    try:
        return _Discarding(os.dup(out.fileno()), "w")
    except io.UnsupportedOperation:  # in memory: nobody reads it who could leave
        return None


def _text(pipe: _Discarding, out: TextIO) -> TextIO:
    return io.TextIOWrapper(io.BufferedWriter(pipe), out.encoding, out.errors, line_buffering=out.isatty())


if __name__ == "__main__":
    benchd()
