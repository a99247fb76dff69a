"""The commands that judge records: `compare`, `baseline` and `recommend`, from their arguments to an exit code."""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TextIO

import msgspec

from benchd.daemon import config
from benchd.daemon.config import Config
from benchd.daemon.delivery.sinks import lasting
from benchd.daemon.errors import UsageError
from benchd.daemon.measuring import paired, plan
from benchd.daemon.measuring.session import Session, made_output
from benchd.daemon.reporting.console import print_baseline, print_comparisons, print_decisions
from benchd.daemon.verdicts import baseline, noise_floor, results
from benchd.daemon.verdicts.compare import FAIL_ON, compare, exit_code
from benchd.daemon.verdicts.recommend import Requirements, decide


def compare_files(paths: Sequence[Path], min_effect: float, out: TextIO, as_json: bool) -> int:
    """Compare two files or folders of results and return the exit code of the verdicts, 6 for nothing measured."""
    if len(paths) != 2:
        raise UsageError(f"two result files are compared, and these are {len(paths)}; cases are compared with --live")
    first, second = (results.read(path) for path in paths)
    least = noise_floor.min_effect(second[0].device_id, second[0].environment.device, min_effect)
    noise_floor.tell(least, min_effect, sys.stderr)
    comparisons = compare(first, second, least)
    print_comparisons(out, comparisons, as_json)
    if not any(record.status == "ok" for record in (*first, *second)):
        sys.stderr.write(f"nothing was measured: no record in {paths[0]} and {paths[1]} has ended well\n")
        return 6
    return exit_code(comparisons, list(FAIL_ON))


def compare_live(
    request: paired.Request, path: Path | None, device: str, output: Path, out: TextIO, *, wait: bool, as_json: bool
) -> int:
    """Compare two cases here and now and return the exit code of the measurement, else of the verdict.

    `path` is the configuration's, whose broker gets the records too.
    """
    counts = (len(request.cases), len(request.pythons), len(request.modules))
    if request.is_aa and (counts[0] != 1 or max(counts) > 1):
        raise UsageError("--aa compares one case with itself")
    if not request.is_aa and (max(counts) != 2 or counts[0] == 0):
        raise UsageError("--live takes two cases, or one case and two --python or two --module")
    given, machine = config.read(path) if path else Config(), plan.inspect(device)
    planned = paired.planned_sides(request, given.limits, machine)
    waiting, folder = sys.stderr if wait else None, made_output(output)
    with Session(given, machine, folder, lasting(folder, given.mqtt, sys.stderr), waiting=waiting) as session:
        try:
            made, code = paired.compare(request, planned, session, sys.stderr)
        finally:
            session.end()
    print_comparisons(out, [made], as_json)
    sys.stderr.writelines(f"warning: not kept: {failure}\n" for failure in session.failures)
    return code or exit_code([made], list(FAIL_ON)) or int(bool(session.failures))


def set_baseline(paths: Sequence[Path], out: TextIO) -> int:
    """Store a baseline."""
    print_baseline(out, baseline.set_(paths), baseline.path())
    return 0


def show_baseline(out: TextIO, as_json: bool) -> int:
    """Print the stored baseline: its cases, or its records."""
    kept = baseline.read(baseline.STORED)
    if as_json:
        out.writelines(f"{msgspec.json.encode(record).decode()}\n" for record in kept)
    else:
        print_baseline(out, kept, baseline.path())
    return 0


def clear_baseline(out: TextIO) -> int:
    """Forget the stored baseline."""
    out.write("the baseline is cleared\n" if baseline.clear() else "no baseline was stored\n")
    return 0


def recommend(paths: Sequence[Path], requirements: Requirements, out: TextIO, as_json: bool) -> int:
    """Print which variant of each model to ship; return 4 where that is undecided for one of them, else 0."""
    found = results.read_all(paths)
    decisions = decide(found, requirements)
    if not decisions:
        raise UsageError("these records hold no inference; training is not shipped")
    trained = dict.fromkeys(record.case_id for record in found if record.case.direction == "training")
    sys.stderr.writelines(f"not {case_id}: training is not shipped\n" for case_id in trained)
    print_decisions(out, decisions, as_json)
    return 0 if all(decision.ship for decision in decisions) else 4
