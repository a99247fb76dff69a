"""The commands `bench-once` and `benchd`: which file implements which verb."""

import errno
import os
import sys
from contextlib import redirect_stderr, redirect_stdout
from importlib import import_module
from typing import Any

import typer
from typer.completion import get_completion_inspect_parameters
from typer.core import TyperGroup

from benchd.daemon.commands import Version, application
from benchd.daemon.errors import BenchdError, NotAvailable, require_measure
from benchd.daemon.machine.standard_streams import STDERR, STDOUT, lasting
from benchd.daemon.machine.ticker import show, ticker_of

GROUPS = {  # as shown by `benchd --help`; a hyphen is an underscore in the file name
    "Decide": ("ship", "verify", "compare", "why", "recommend", "baseline", "noise-floor"),
    "Look": ("report", "show", "profile", "list", "schema"),
    "Fleet": ("run", "dashboard", "watch", "replay", "demo"),
    "Maintain": ("doctor", "selfcheck", "export", "power-sweep"),
}
VERBS = tuple(verb for verbs in GROUPS.values() for verb in verbs)

LASTING = {"run", "dashboard", "demo", "watch", "power-sweep"}
"""The verbs that run until stopped, or whose children write to the terminal."""

UNREACHABLE = (errno.EACCES, errno.ENAMETOOLONG)
"""The errors that `Path.is_file` raises for an inaccessible path; for an absent one it returns False."""


class _Verbs(TyperGroup):
    """Imports a verb's file only when that verb is invoked, so that each starts quickly."""

    def __init__(self, **attributes: Any) -> None:
        super().__init__(**attributes)
        self.commands: dict[str, Any] = dict.fromkeys(VERBS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        return command(cmd_name) if cmd_name in VERBS else None

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """Write the verbs by group, each with its short help."""
        for group, verbs in GROUPS.items():
            lines = [(verb, command(verb).get_short_help_str(limit=80)) for verb in verbs]
            with formatter.section(group):
                formatter.write_dl(lines)


def command(verb: str) -> Any:
    """Return the command for a verb (`once` for bench-once), or one that says which extra to add."""
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


_benchd = application(
    cls=_Verbs,
    no_args_is_help=True,
    epilog="Example: benchd ship vim_tiny --output vim-shipped. The command bench-once measures this machine.",
)


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
    """Run `verb`, or the verb on the command line, and exit with its code, or 1 instead of 0 if output was lost."""
    ticker = ticker_of(sys.stderr)
    out, file = lasting(sys.stdout, STDOUT, ticker)
    err, _ = lasting(sys.stderr, STDERR, ticker)
    with redirect_stdout(out), redirect_stderr(err):
        name = "bench-once" if verb else " ".join(["benchd", *sys.argv[1:2]])
        show(err, name, until_output=bool(LASTING & {*sys.argv[1:2]}))
        code = _code(verb)
        show(err, "")
        out.flush()
        if file and file.failure:
            err.write(f"error: standard output: {file.failure}\n")
            code = code or 1
        err.flush()
    sys.exit(code)


def _code(verb: str | None) -> int | str | None:
    """Run a verb as `_exit_with` does; print a benchd or path error as one line and return the exit code."""
    if any(name.startswith("_BENCH") and name.endswith("_COMPLETE") for name in os.environ):
        get_completion_inspect_parameters()  # registers the shells with typer
    try:
        (command(verb) if verb else _benchd)()
    except SystemExit as end:
        return end.code
    except KeyboardInterrupt:  # before the command's own handler is installed
        return 130
    except BenchdError as error:
        sys.stderr.write(f"error: {error}\n")
        return 7 if isinstance(error, NotAvailable) else 2
    except OSError as error:
        if error.errno not in UNREACHABLE or error.filename is None:
            raise
        sys.stderr.write(f"error: {error.filename}: {error.strerror}\n")
        return 2
    return 0


if __name__ == "__main__":
    benchd()
