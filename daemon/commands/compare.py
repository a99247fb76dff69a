"""`benchd compare`: two sets of records, or two cases measured here and now."""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, TextIO

import typer

from benchd.daemon import config as configuration
from benchd.daemon.commands import application
from benchd.daemon.commands.arguments import AsJson, Device, Inputs, Wait, quantity, waits
from benchd.daemon.config import Config
from benchd.daemon.delivery.sinks import lasting
from benchd.daemon.errors import UsageError
from benchd.daemon.measuring import paired, plan
from benchd.daemon.measuring.session import Session, made_output
from benchd.daemon.measuring.user_model import UserModule
from benchd.daemon.reporting.console import print_comparisons
from benchd.daemon.verdicts import compare as verdicts
from benchd.daemon.verdicts import noise_floor, results
from benchd.daemon.verdicts.compare import FAIL_ON, exit_code

app = application()


@app.command(epilog="Example: benchd compare before after; benchd compare --live vim_tiny,eager vim_tiny,custom")
def compare(
    sides: Annotated[list[str], typer.Argument(help="Two result files or folders; with --live, two cases.")],
    live: Annotated[bool, typer.Option("--live", help="Measure both alternately, in fresh processes.")] = False,
    aa: Annotated[bool, typer.Option("--aa", help="Measure one case against itself: the noise floor.")] = False,
    python: Annotated[
        list[Path] | None, typer.Option(help="With --live: the interpreter of each side.", metavar="BIN/python")
    ] = None,
    module: Annotated[
        list[str] | None,
        typer.Option(help="With --live: your own module, or one per side.", metavar="FILE.py:FUNCTION"),
    ] = None,
    input_: Inputs = None,
    pairs: Annotated[
        int | None, typer.Option(help="Number of pairs (default 7, extended to 11 or 15 while undecided).")
    ] = None,
    min_effect: Annotated[str, typer.Option(help="Smallest change that counts.", metavar="0.5%")] = "0.5%",
    preset: Annotated[str, typer.Option(help="With --live: how long each process measures.")] = "quick",
    device: Device = "auto",
    threads: Annotated[int | None, typer.Option(help="With --live: CPU threads of the model.")] = None,
    config: Annotated[Path | None, typer.Option(help="With --live: a TOML file for limits and delivery.")] = None,
    output: Annotated[Path, typer.Option(help="With --live: folder for the records.")] = Path("bench-out"),
    wait: Wait = None,
    json: AsJson = False,
) -> None:
    """Report whether B is faster than A, slower or the same."""
    least = quantity("--min-effect", min_effect, {"%": 0.01})
    if not (live or aa):
        raise typer.Exit(compare_files([Path(side) for side in sides], least, sys.stdout, json))
    modules = [UserModule.at(path, input_ or []) for path in module or []]
    _refuse(sides, python or [], modules, is_aa=aa)
    request = paired.Request(
        cases=sides,
        pythons=[str(path) for path in python or []],
        modules=modules,
        pairs=pairs,
        min_effect=least,
        preset=preset,
        threads=threads,
        is_aa=aa,
    )
    given, machine = configuration.read(config) if config else Config(), plan.inspect(device)
    planned = paired.planned_sides(request, given.limits, machine)
    waiting, folder = sys.stderr if waits(wait) else None, made_output(output)
    with Session(given, machine, folder, lasting(folder, given.mqtt, sys.stderr), waiting=waiting) as session:
        try:
            made, code = paired.compare(request, planned, session, sys.stderr)
        finally:
            session.end()
    print_comparisons(sys.stdout, [made], json)
    unstored = session.unstored(sys.stderr)
    raise typer.Exit(code or exit_code([made], list(FAIL_ON)) or unstored)


def _refuse(cases: Sequence[str], pythons: Sequence[Path], modules: Sequence[UserModule], *, is_aa: bool) -> None:
    """Raise UsageError for too few or too many sides."""
    counts = (len(cases), len(pythons), len(modules))
    if is_aa and (counts[0] != 1 or max(counts) > 1):
        raise UsageError("--aa compares one case with itself")
    if not is_aa and (max(counts) != 2 or counts[0] == 0):
        raise UsageError("--live takes two cases, or one case and two --python or two --module")


def compare_files(paths: Sequence[Path], min_effect: float, out: TextIO, as_json: bool) -> int:
    """Compare two files or folders of results; return the exit code of the verdicts, 6 if nothing was measured."""
    if len(paths) != 2:
        raise UsageError(f"compare takes two result files, not {len(paths)}; use --live to compare cases")
    first, second = (results.read(path) for path in paths)
    floors = noise_floor.of_device(second[0].device_id, second[0].environment.device)
    noise_floor.report(floors, (record.case_id for record in second), min_effect, sys.stderr)
    comparisons = verdicts.compare(first, second, min_effect, floors=floors)
    print_comparisons(out, comparisons, as_json)
    if not any(record.status == "ok" for record in (*first, *second)):
        sys.stderr.write(f"nothing was measured: no record in {paths[0]} or {paths[1]} succeeded\n")
        return 6
    return exit_code(comparisons, list(FAIL_ON))
