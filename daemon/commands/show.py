"""`benchd show`: prints a record in readable form, or the command that repeats its measurement."""

import errno
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer

from benchd.daemon.commands import application
from benchd.daemon.errors import UsageError
from benchd.daemon.measuring.plan import PRESETS
from benchd.daemon.records import Record
from benchd.daemon.reporting.record_text import lines
from benchd.daemon.shipping import race
from benchd.daemon.verdicts import compare, results
from benchd.models import demo

app = application()


@app.command(epilog="Example: benchd show bench-out --command")
def show(
    record: Annotated[str, typer.Argument(help="A result file or folder, or the id of a run or a case.")],
    results_: Annotated[Path, typer.Option("--results", help="Where to look up an id.", metavar="FILE|DIR")] = Path(
        "bench-out"
    ),
    command: Annotated[bool, typer.Option("--command", help="Print the command that measures it again.")] = False,
) -> None:
    """Print records in full, or the commands that repeat them."""
    chosen, where = _found(record, results_), record if _exists(Path(record)) else str(results_)
    if command:
        sys.stderr.writelines(f"note: {note}\n" for chosen_record in chosen for note in _notes(chosen_record))
        sys.stdout.writelines(
            f"{line}\n"
            for line in dict.fromkeys(compare.command(chosen_record, records=where) for chosen_record in chosen)
        )
    else:
        sys.stdout.writelines(f"{line}\n" for chosen_record in chosen for line in lines(chosen_record, where))


def _found(name: str, folder: Path) -> list[Record]:
    """Return the records in a file or folder, a run's record or a case's newest; raise UsageError if there is none."""
    if _exists(Path(name)):
        return results.read(Path(name))
    if not _exists(folder):
        raise UsageError(f"{name}: no such file, and no {folder} in which to look up a run or a case; give --results")
    records = results.of_case(folder, name)
    if not records:
        raise UsageError(f"{name}: no such file, and no run or case with that id in {folder}; `benchd show {folder}`")
    return records[-1:]


def _exists(path: Path) -> bool:
    """Return whether this path exists or may exist: reading an inaccessible folder then reports the reason."""
    try:
        return path.exists()
    except OSError as error:
        return error.errno != errno.ENAMETOOLONG  # a case's id may be longer than a file name


def _notes(record: Record) -> Iterator[str]:
    """Yield the conditions that the command alone does not reproduce."""
    inputs = record.inputs
    named = [record.own.path if record.own else "", inputs.weights, inputs.data, inputs.samples, inputs.labels]
    named += [inputs.metric, inputs.calibration]
    if files := [name for name in named if name and name not in (demo.DEMO, demo.RANDOM)]:
        yield f"{record.case_id}: run it in the folder with {', '.join(files)}, because records do not store paths"
    if record.preset == race.PRESET:
        yield f"{record.case_id}: measured by benchd ship; `benchd verify DIR` repeats it"
    usual = PRESETS[record.preset].asked() if record.preset in PRESETS else {}
    changed = [f"{name} {value:g}" for name, value in record.limits.items() if value != usual.get(name) and value]
    others = [words for words in changed if not words.startswith("processes ")]
    if others and usual:
        yield f"{record.case_id}: a configuration file set {', '.join(others)}; add it with --config"
