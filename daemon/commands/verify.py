"""`benchd verify`: whether a shipped folder still is what it was, answers as it did, and keeps its promise."""

import sys
import tempfile
from pathlib import Path
from typing import Annotated

import msgspec
import typer

from benchd.daemon import config as configuration
from benchd.daemon.commands import application
from benchd.daemon.commands.arguments import AsJson, ConfigFile, Device, Wait, waits
from benchd.daemon.config import Config
from benchd.daemon.errors import UsageError
from benchd.daemon.journal import explaining
from benchd.daemon.measuring import plan, race, verifying
from benchd.daemon.measuring.session import Session
from benchd.daemon.verdicts import manifest, promise
from benchd.daemon.verdicts.manifest import ONNX

app = application()


@app.command(epilog="Example: benchd verify shipped")
def verify(
    folder: Annotated[Path, typer.Argument(help="A folder that benchd ship wrote.", metavar="DIR")],
    processes: Annotated[int, typer.Option(help="Fresh processes to measure.")] = verifying.PROCESSES,
    trust_code: Annotated[
        bool, typer.Option("--trust-code", help="Run Python code that another user or machine shipped.")
    ] = False,
    trust_plan: Annotated[
        bool, typer.Option("--trust-plan", help="Load a TensorRT plan of another user or machine.")
    ] = False,
    device: Device = "auto",
    config: ConfigFile = None,
    json: AsJson = False,
    wait: Wait = None,
) -> None:
    """Compare a shipped folder with its hashes, its golden answers and its promise.

    Exits with 3 if it is slower than promised, 4 if that cannot be told (another machine too), 5 for other answers.
    """
    if processes < 1:
        raise UsageError(f"--processes {processes}: at least 1")
    with explaining(folder):
        shipped = manifest.read(folder)
    verifying.refuse_untrusted(folder, shipped, trust_code=trust_code)
    settings = configuration.read(config) if config else Config()
    is_of_cpu = device == "auto" and shipped.environment.device == "cpu"
    machine = plan.inspect("cpu" if is_of_cpu else device)
    limits = plan.limited(race.LIMITS, settings.limits)
    waiting = waits(wait)
    with explaining(Path("TMPDIR")):
        temporary = tempfile.TemporaryDirectory()
    with temporary as output, Session(settings, machine, Path(output), waiting=waiting) as session:
        found = verifying.verify(folder, shipped, session, limits, processes, trust_plan=trust_plan)
    if session.interrupted:
        raise typer.Exit(130)
    if json:
        sys.stdout.write(msgspec.json.encode(found).decode() + "\n")
    else:
        sys.stdout.write(f"{promise.line(found)}\n")
        if found.rebuilt:
            sys.stdout.write(f"    built again from {ONNX}: {found.rebuilt}\n")
        sys.stdout.writelines(f"    changed since: {one}\n" for one in found.changed)
    raise typer.Exit(promise.EXIT_CODES[found.answer])
