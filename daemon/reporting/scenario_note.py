"""The figures of a scenario that the table's one median does not show, in one line."""

from collections.abc import Callable, Sequence

from benchd.daemon.records import ProcessResult, Record
from benchd.daemon.verdicts.statistics import median

_STAGES = ("spawn", "import", "build", "load", "first_run", "second_run")


def scenario_note(record: Record) -> str | None:
    """Return the line of a record whose scenario has more than one figure, else None."""
    note = _NOTES.get(record.case.scenario)
    return f"{record.case.scenario}: {record.case_id}: {note(record)}" if note else None


def _periodic(record: Record) -> str:
    return ", ".join(
        f"{one.rate_hz} Hz {one.misses} of {one.releases} missed (at most {one.worst_lateness_ms:.3g} ms late)"
        for one in record.deadlines
    )


def _wake_up(record: Record) -> str:
    gaps = {int(name.split("_")[1]): timing for name, timing in record.parts.items()}
    return ", ".join(f"{timing.median_ms:.4g} ms after {gap} ms idle" for gap, timing in sorted(gaps.items()))


def _cold_start(record: Record) -> str:
    ended = [process for process in record.processes if process.timing]
    return ", ".join(f"{stage.replace('_', ' ')} {_median_s(ended, stage):.3g} s" for stage in _STAGES)


def _median_s(ended: Sequence[ProcessResult], stage: str) -> float:
    return median([getattr(process.stages, f"{stage}_s") for process in ended])


def _sustained(record: Record) -> str:
    timeline = next(process.timeline for process in record.processes if process.timeline)
    first, last = timeline[0], timeline[-1]
    seen = [name for name in last.telemetry if name.startswith(("cpu_clock_hz", "gpu_clock_hz", "power_w"))]
    changes = [f"{name} {first.telemetry.get(name, 0):.4g} to {last.telemetry[name]:.4g}" for name in sorted(seen)]
    return ", ".join([f"{first.median_ms:.4g} ms at start, {last.median_ms:.4g} ms at {last.end_s:.0f} s", *changes])


_NOTES: dict[str, Callable[[Record], str]] = {
    "periodic": _periodic,
    "wake_up": _wake_up,
    "cold_start": _cold_start,
    "sustained": _sustained,
}
