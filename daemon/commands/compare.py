"""`benchd compare`: two sets of records, or two cases measured here and now."""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, TextIO

import typer

from benchd.daemon.commands import application
from benchd.daemon.commands.arguments import AsJson, Device, Inputs, Wait, quantity, waits
from benchd.daemon.commands.once import own_module
from benchd.daemon.errors import UsageError
from benchd.daemon.measuring import paired
from benchd.daemon.reporting.console import print_comparisons
from benchd.daemon.verdicts import compare as verdicts
from benchd.daemon.verdicts import noise_floor, results
from benchd.daemon.verdicts.compare import FAIL_ON, exit_code

app = application()


@app.command(epilog="Example: benchd compare before after; benchd compare --live vim_tiny,eager vim_tiny,custom")
def compare(
    sides: Annotated[list[str], typer.Argument(help="Two result files or folders; with --live, two cases.")],
    live: Annotated[bool, typer.Option("--live", help="Measure both in turns, in fresh processes.")] = False,
    aa: Annotated[bool, typer.Option("--aa", help="Measure one case against itself: the noise floor.")] = False,
    python: Annotated[
        list[Path] | None, typer.Option(help="With --live: the interpreter of each side.", metavar="BIN/python")
    ] = None,
    module: Annotated[
        list[str] | None,
        typer.Option(help="With --live: a module of your own, or one for each side.", metavar="FILE.py:FUNCTION"),
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
    """Tell whether B is faster than A, slower or the same."""
    least = quantity("--min-effect", min_effect, {"%": 0.01})
    if not (live or aa):
        raise typer.Exit(compare_files([Path(side) for side in sides], least, sys.stdout, json))
    request = paired.Request(
        cases=sides,
        pythons=[str(path) for path in python or []],
        modules=[own_module(path, input_ or []) for path in module or []],
        pairs=pairs,
        min_effect=least,
        preset=preset,
        config=config,
        device=device,
        threads=threads,
        output=output,
        is_aa=aa,
        wait=waits(wait),
    )
    raise typer.Exit(compare_live(request, sys.stdout, json))


def compare_files(paths: Sequence[Path], min_effect: float, out: TextIO, as_json: bool) -> int:
    """Compare two files or folders of results and return the exit code of the verdicts, 6 for nothing measured."""
    if len(paths) != 2:
        raise UsageError(f"two result files are compared, and these are {len(paths)}; cases are compared with --live")
    first, second = (results.read(path) for path in paths)
    least = noise_floor.min_effect(second[0].device_id, second[0].environment.device, min_effect)
    noise_floor.tell(least, min_effect, sys.stderr)
    comparisons = verdicts.compare(first, second, least)
    print_comparisons(out, comparisons, as_json)
    if not any(record.status == "ok" for record in (*first, *second)):
        sys.stderr.write(f"nothing was measured: no record in {paths[0]} and {paths[1]} has ended well\n")
        return 6
    return exit_code(comparisons, list(FAIL_ON))


def compare_live(request: paired.Request, out: TextIO, as_json: bool) -> int:
    """Compare two cases here and now and return the exit code of the measurement, else of the verdict."""
    counts = (len(request.cases), len(request.pythons), len(request.modules))
    if request.is_aa and (counts[0] != 1 or max(counts) > 1):
        raise UsageError("--aa compares one case with itself")
    if not request.is_aa and (max(counts) != 2 or counts[0] == 0):
        raise UsageError("--live takes two cases, or one case and two --python or two --module")
    made, code = paired.compare(request, sys.stderr)
    print_comparisons(out, [made], as_json)
    return code or exit_code([made], list(FAIL_ON))
