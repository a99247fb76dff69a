"""`benchd verify`: checks whether a shipped folder is unchanged, gives the same answers, and keeps its promise."""

import sys
from pathlib import Path
from typing import Annotated

import msgspec
import typer

from benchd.daemon import config as configuration
from benchd.daemon.commands import application
from benchd.daemon.commands.arguments import AsJson, ConfigFile, Device, QuietFor, Wait, start
from benchd.daemon.config import Config
from benchd.daemon.errors import UsageError
from benchd.daemon.journal import explaining
from benchd.daemon.measuring import plan
from benchd.daemon.measuring.session import Session, temporary_output
from benchd.daemon.reporting.console import SlowStages
from benchd.daemon.shipping import manifest, promise, race, verifying

app = application()


@app.command(epilog="Example: benchd verify shipped")
def verify(
    folder: Annotated[Path, typer.Argument(help="A folder written by benchd ship.", metavar="DIR")],
    processes: Annotated[int, typer.Option(help="Fresh processes to measure.")] = verifying.PROCESSES,
    trust_code: Annotated[
        bool, typer.Option("--trust-code", help="Run Python code that another user or machine shipped.")
    ] = False,
    trust_plan: Annotated[
        bool,
        typer.Option("--trust-plan", help="Load a TensorRT plan or AOTInductor package from another user or machine."),
    ] = False,
    device: Device = "auto",
    config: ConfigFile = None,
    json: AsJson = False,
    wait: Wait = None,
    quiet_for: QuietFor = None,
) -> None:
    """Check whether a shipped folder keeps its promise.

    Exits with 3 if it is slower than promised, 4 if that is inconclusive (as on a different machine), 5 if its answers
    differ.
    """
    if processes < 1:
        raise UsageError(f"--processes {processes}: must be at least 1")
    with explaining(folder):
        shipped = manifest.read(folder)
    verifying.refuse_untrusted(folder, shipped, trust_code=trust_code)
    settings = configuration.read(config) if config else Config()
    is_of_cpu = device == "auto" and shipped.environment.device == "cpu"
    machine = plan.inspect("cpu" if is_of_cpu else device)
    limits = plan.limited(race.LIMITS, settings.limits)
    with (
        temporary_output() as output,
        Session(settings, machine, output, [SlowStages(sys.stderr)], start=start(wait, quiet_for)) as session,
    ):
        verified = verifying.verify(folder, shipped, session, limits, processes, trust_plan=trust_plan)
    if session.interrupted:
        raise typer.Exit(130)
    if json:
        sys.stdout.write(msgspec.json.encode(verified).decode() + "\n")
    else:
        sys.stdout.write(f"{promise.line(verified)}\n")
        sys.stdout.writelines(f"    {text}\n" for text in promise.explained(verified))
        if verified.rebuilt:
            sys.stdout.write(f"    rebuilt: {verified.rebuilt}\n")
        sys.stdout.writelines(f"    changed since: {change}\n" for change in verified.changed)
    raise typer.Exit(promise.EXIT_CODES[verified.answer])
