"""Summarises in one line a scenario's figures that the table's single median does not show."""

import math
from collections.abc import Callable
from statistics import median

from benchd.daemon.records import Load, NeighbourResult, Record, Requests, Timing
from benchd.daemon.verdicts import doubts
from benchd.daemon.verdicts.figures import dropped_half
from benchd.daemon.verdicts.statistics import minimum_samples

_PIPELINE = ("decode", "resize", "normalise", "copy", "model", "post")
_STAGES = ("spawn", "import", "build", "load", "first_run", "second_run")


def scenario_note(record: Record) -> str | None:
    """Return the line for a record whose scenario has more than one figure, else None."""
    figures = scenario_figures(record)
    return f"{record.case.scenario}: {record.case_id}: {figures}{doubts.mark([record])}" if figures else None


def scenario_figures(record: Record) -> str | None:
    """Return the figures of a scenario that has more than one, else None."""
    figures = _NOTES.get(record.case.scenario) or (_streams if record.case.streams > 1 else None)
    phrases = [figures(record)] if figures else []
    phrases += [words] if (words := _lengths(record)) else []
    return "; ".join([*phrases, _neighbour(record.beside)] if record.beside else phrases) or None


def _neighbour(neighbour: NeighbourResult) -> str:
    latency = f", {_percentiles(neighbour.timing)}" if neighbour.timing else ""
    missed = f"{neighbour.misses} of {neighbour.releases} missed"
    return f"beside {neighbour.case_id} at {neighbour.rate_hz:.4g} Hz, {missed}{latency}"


def _periodic(record: Record) -> str:
    return ", ".join(
        f"{rate.rate_hz} Hz {rate.misses} of {rate.releases} missed (at most {rate.worst_lateness_ms:.3g} ms late)"
        for rate in record.deadlines
    )


def _wake_up(record: Record) -> str:
    gaps = {int(name.split("_")[1]): timing for name, timing in record.parts.items()}
    return ", ".join(f"{timing.median_ms:.4g} ms after {gap} ms idle" for gap, timing in sorted(gaps.items()))


def _cold_start(record: Record) -> str:
    ended = [process.stages for process in record.processes if process.timing]
    times = {stage: [s for stages in ended if (s := getattr(stages, f"{stage}_s")) is not None] for stage in _STAGES}
    return ", ".join(f"{stage.replace('_', ' ')} {median(known):.3g} s" for stage, known in times.items() if known)


def _sustained(record: Record) -> str:
    timeline = next((process.timeline for process in record.processes if process.timeline), None)
    if timeline is None:
        return ""
    first, last = timeline[0], timeline[-1]
    metrics = [name for name in last.telemetry if name.startswith(("cpu_clock_hz", "gpu_clock_hz", "power_w"))]
    changes = [f"{name} {first.telemetry.get(name, 0):.4g} to {last.telemetry[name]:.4g}" for name in sorted(metrics)]
    return ", ".join([f"{first.median_ms:.4g} ms at start, {last.median_ms:.4g} ms at {last.end_s:.0f} s", *changes])


def _streams(record: Record) -> str:
    named = {name: timing for name, timing in record.parts.items() if name.startswith("stream_")}
    percentiles = [f"{name.replace('_', ' ')} {_percentiles(timing)}" for name, timing in sorted(named.items())]
    return ", ".join(percentiles)


def _lengths(record: Record) -> str:
    """Return the percentiles of each length class, if the items differ in length."""
    named = {int(name.partition("_")[2]): part for name, part in record.parts.items() if name.startswith("length_")}
    return ", ".join(f"length up to {length} {_percentiles(part)}" for length, part in sorted(named.items()))


def _percentiles(timing: Timing) -> str:
    """Return the percentiles that are backed by enough runs."""
    known = {"p50": timing.median_ms, "p90": timing.p90_ms, "p99": timing.p99_ms, "p99.9": timing.p999_ms}
    return f"{' '.join(f'{name} {ms:.4g}' for name, ms in known.items() if ms is not None)} ms"


def _server(record: Record) -> str:
    requests, load, timing = record.requests, record.case.load, record.timing
    if requests is None or load is None or timing is None:
        return "no requests"
    return ", ".join(
        [
            f"{_rate(requests, load)}: {requests.asked} asked = {requests.answered} in time + {requests.late} late + "
            f"{requests.dropped} dropped",
            *_all_percentiles(record, requests, timing),
            f"busy {100 * requests.busy_share:.3g} %",
            *([f"woken after {requests.noticed_ms:.3g} ms"] if requests.noticed_ms is not None else []),
            # a dropped request has no stream, so per-stream figures are for answered requests only
            *([_streams(record)] if record.case.streams > 1 and not requests.dropped else []),
        ]
    )


def _all_percentiles(record: Record, requests: Requests, timing: Timing) -> list[str]:
    """Return the percentiles of all requests with a latency, and those that are dropped requests."""
    known = {90.0: timing.p90_ms, 99.0: timing.p99_ms, 99.9: timing.p999_ms}
    hidden = [q for q, ms in known.items() if ms is None and requests.asked >= minimum_samples(q)]
    dropped = [f"p{q:g}" for q in hidden if requests.dropped > (1 - q / 100) * requests.asked]
    if dropped_half(record):
        return [f"{' '.join(['p50', *dropped])} dropped"]
    return [_percentiles(timing), *([f"{' '.join(dropped)} dropped"] if dropped else [])]


def _rate(requests: Requests, load: Load) -> str:
    """Return the rate and how well its deadline was met."""
    rate = f"{requests.rate_hz:.4g} requests per second"
    if load.deadline_ms is None:
        return rate
    goal = f"{load.deadline_ms:.4g} ms at p{load.percentile:g}"
    verdict = {True: "meet", False: "miss", None: "are too few to judge"}[requests.met]
    if load.rate_hz is None and requests.met:
        return f"at most {rate} meet {goal}"
    return f"{'no rate found, ' if load.rate_hz is None else ''}{rate} {verdict} {goal}"


def _pipeline(record: Record) -> str:
    total_ms = (record.timing.median_ms if record.timing else 0.0) or math.inf
    stages = {name: record.parts[name].median_ms for name in _PIPELINE if name in record.parts}
    return ", ".join(f"{name} {ms:.4g} ms ({100 * ms / total_ms:.3g} %)" for name, ms in stages.items())


_NOTES: dict[str, Callable[[Record], str]] = {
    "periodic": _periodic,
    "wake_up": _wake_up,
    "cold_start": _cold_start,
    "sustained": _sustained,
    "server": _server,
    "pipeline": _pipeline,
}
