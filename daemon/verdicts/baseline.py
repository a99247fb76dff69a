"""The machine's baseline: the records with which later runs are compared."""

from collections.abc import Sequence
from pathlib import Path

from benchd.daemon import journal, records
from benchd.daemon.errors import UsageError
from benchd.daemon.machine import folders
from benchd.daemon.records import Record
from benchd.daemon.verdicts import results, sameness
from benchd.daemon.verdicts.compare import Comparison, compare
from benchd.daemon.verdicts.effects import MIN_EFFECT
from benchd.daemon.verdicts.recommend import impossible, wrong

FILE = "baseline.jsonl"
STORED = "stored"


def path() -> Path:
    """Return the path of the stored baseline."""
    return folders.state() / FILE


def chosen(files: Sequence[Path]) -> list[Record]:
    """Return the records of a new baseline: the successful ones in these files.

    Raises UsageError if there are none, if they come from several devices, or if one is unfit for a verdict.
    """
    successful = [record for record in results.read_all(files) if record.status == "ok"]
    for record in successful:
        reason = "is simulated" if "simulated" in record.flags else impossible(record) or wrong(record)
        if reason:
            raise UsageError(f"{record.case_id} from {record.t_wall} {reason}: a baseline needs valid results")
    if not successful:
        raise UsageError(f"no result in {', '.join(map(str, files))} was successful")
    devices = sorted({record.device_id for record in successful})
    if len(devices) > 1:
        raise UsageError(f"a baseline covers one device, and these records come from {', '.join(devices)}")
    return successful


def store(kept: Sequence[Record]) -> None:
    """Replace the stored baseline with these records."""
    journal.replace(path(), (records.encode(record) + b"\n" for record in kept))


def read(name: str) -> list[Record]:
    """Return the baseline in a file or folder, or the stored one for "stored"; raise UsageError if there is none."""
    if name != STORED:
        return results.read(Path(name))
    if not path().exists():
        raise UsageError("no baseline is stored; store one with `benchd baseline set RUN...`")
    return results.read(path())


def pinned(runs: Sequence[str]) -> list[Record]:
    """Return the successful records in these files and folders or, if `runs` is empty, the stored baseline.

    Raises UsageError if there are none.
    """
    if not runs:
        return read(STORED)
    records = [record for record in results.read_all([Path(run) for run in runs]) if record.status == "ok"]
    if not records:
        raise UsageError(f"baseline.runs: no result in {', '.join(runs)} was successful")
    return records


def of_case(runs: Sequence[str], case_id: str) -> list[Record]:
    """Return the records of a case in these files and folders or, if `runs` is empty, in any stored baseline."""
    paths = [Path(run) for run in runs] or [path()] * path().exists()
    records = [record for source in paths for record in results.of_case(source, case_id)]
    return list({record.key: record for record in records}.values())


def against(stored: Sequence[Record], measured: Sequence[Record]) -> list[Comparison]:
    """Return the comparison of each measured case with the baseline."""
    return compare(alike(stored, measured), measured, MIN_EFFECT)


def alike(stored: Sequence[Record], measured: Sequence[Record]) -> list[Record]:
    """Return the stored runs of the measured cases, in a different environment only if a case has no others."""
    case_ids = {record.case_id for record in measured}
    same_cases = [record for record in stored if record.case_id in case_ids]
    matching = [record for record in same_cases if any(is_alike(record, reference) for reference in measured)]
    has_alike = {record.case_id for record in matching}
    return matching + [record for record in same_cases if record.case_id not in has_alike]


def is_alike(record: Record, other: Record) -> bool:
    """Return whether two records have the same case and environment."""
    return (
        record.case_id == other.case_id
        and sameness.environment_difference(record.environment, other.environment) is None
    )


def newest_environment(of_case: Sequence[Record]) -> list[Record]:
    """Return the runs of a case that share the environment of its newest run."""
    return alike(of_case, [max(of_case, key=lambda record: record.t_wall)])


def clear() -> bool:
    """Delete the baseline; return whether there was one."""
    with journal.explaining(path()):
        was_there = path().exists()
        path().unlink(missing_ok=True)
    return was_there
