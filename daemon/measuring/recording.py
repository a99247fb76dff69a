"""Turns the processes of a case into its Record: samples in each window, combined results, and reasons for gaps."""

import time
import uuid
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timedelta, timezone
from statistics import median
from typing import Literal

import msgspec

from benchd.daemon.machine import gpu, identity
from benchd.daemon.machine.environment import fingerprint
from benchd.daemon.machine.quiet import FOREIGN_CPUS
from benchd.daemon.measuring.plan import Machine, PlannedCase
from benchd.daemon.measuring.protocol import Limits, Outcome
from benchd.daemon.records import (
    BACK_TO_BACK,
    PERCENTILES,
    VERDICTS,
    Case,
    Check,
    Deadlines,
    Energy,
    Environment,
    Floor,
    Interference,
    Memory,
    ModelFacts,
    NeighbourResult,
    Probes,
    ProcessResult,
    Record,
    Requests,
    Sample,
    Status,
    Summary,
    TimeSlice,
    Timing,
    Window,
    of_range,
    wall_now,
    wall_text,
)
from benchd.daemon.sampling import energy, interference
from benchd.daemon.sampling.child import SamplerProcess
from benchd.daemon.verdicts import accuracy, figures, roofline, sameness, statistics, timings, when

RANGE_SHARE = 0.75  # share of the highest clock; boost clocks are not reached on all cores, or for long
DISTURBED_SHARE = 0.2
PROBES_SHARE = 0.03


@dataclass(frozen=True)
class RunHeader:
    """The part shared by all records of a run; `flags` say what else benchd was running on the machine."""

    device_id: str
    boot_id: str
    suite_id: str
    tool_version: str
    environment: Environment
    flags: tuple[str, ...] = ()


@dataclass(frozen=True)
class RunId:
    """The identity of a case's run: its id and its start on both clocks."""

    run_id: str
    t_wall: str
    t_mono_ns: int

    @classmethod
    def new(cls) -> "RunId":
        """Return the identity of a run that starts now."""
        return cls(uuid.uuid4().hex, wall_now(), time.monotonic_ns())

    def dated(self, boot_id: str) -> "RunId":
        """Return the id, with its start time recomputed if the wall clock was set only later, in the same boot."""
        if not when.is_unset(self.t_wall) or boot_id != identity.boot_id():
            return self
        start = datetime.now(timezone.utc) - timedelta(microseconds=(time.monotonic_ns() - self.t_mono_ns) / 1e3)
        return replace(self, t_wall=wall_text(start))


def with_samples(
    outcome: Outcome, case: Case, sampler: SamplerProcess, machine: Machine, read_period_s: float
) -> Outcome:
    """Return a process's results with the sensor readings in its window: summaries, energy and disturbed blocks."""
    process, window = outcome.process, outcome.process.window
    if window is None:
        return outcome
    sampler.flush()
    telemetry, report = sampler.cut(window)
    read = sampler.samples.raw(Window(0, time.monotonic_ns()))
    sampled, ran_on = machine.gpu_uuid, outcome.device_uuid
    measured: Energy | str | None = gpu.mismatch(sampled, ran_on) if sampled and ran_on else None
    if measured is None:
        idle = (process.idle[0], process.idle[1]) if len(process.idle) == 2 else None
        inferences = _inferences(process, case.batch_size)
        measured = energy.measure(read, sampler.samples.power, window, inferences, read_period_s, idle)
    if isinstance(measured, str):
        failed = [
            f"{name}: {why}; run `benchd doctor`" for name, why in report.failures.items() if f"({name} " in measured
        ]
        measured = "; ".join([measured, *failed])
    process = msgspec.structs.replace(
        process,
        telemetry=telemetry,
        timeline=[_with_means(part, sampler, window.start_ns) for part in process.timeline],
        sampler=report,
        energy=measured if isinstance(measured, Energy) else None,
        interference=_interference(process, read, machine.device),
    )
    missing = outcome.missing if isinstance(measured, Energy) else {"energy": measured, **outcome.missing}
    if not any(sample.metric == interference.throttling_of(machine.device) for sample in read):
        missing = {"throttled": "no sensor reports throttling", **missing}
    return msgspec.structs.replace(outcome, process=process, missing=missing)


def _inferences(process: ProcessResult, batch_size: int) -> int:
    """Return how many inputs were answered in the timed section; for runs with pauses, the parts are counted."""
    if process.throughput_per_s is not None:
        return max(1, round(process.throughput_per_s * process.measured_s))
    if process.requests is not None:
        return max(1, process.requests.answered + process.requests.late) * batch_size
    runs = sum(timing.runs for timing in process.parts.values()) or (process.timing.runs if process.timing else 0)
    return max(1, runs) * batch_size


def _with_means(part: TimeSlice, sampler: SamplerProcess, start_ns: int) -> TimeSlice:
    """Return a part of a sustained run, with the sensors' means."""
    window = Window(start_ns + round(part.start_s * 1e9), start_ns + round(part.end_s * 1e9))
    means = {name: summary.mean for name, summary in sampler.cut(window)[0].items()}
    return msgspec.structs.replace(part, telemetry=means)


def _interference(process: ProcessResult, samples: Sequence[Sample], device: str) -> Interference | None:
    if process.blocks is None or len(process.blocks.bounds_ns) < 2:
        return None
    return interference.assess(samples, process.blocks.windows, process.blocks.medians_ms, device)


def record(
    case: Case,
    preset: str,
    run: RunHeader,
    run_id: RunId,
    outcomes: Sequence[Outcome],
    probes: Probes | None = None,
    limits: Limits | None = None,
) -> Record:
    """Return the Record of a case with at least one process; the record gets the worst status.

    `probes` are the first ones of the run, from which the roofline is computed; the default is those of its first
    process.
    """
    status, reason = _status(outcomes)
    t_wall = run_id.dated(run.boot_id).t_wall
    measured = [outcome for outcome in outcomes if outcome.process.timing]
    timing = _combined([outcome.process.timing for outcome in measured]) if status == "ok" else None
    if timing and _dropped_half(outcomes):
        timing = msgspec.structs.replace(timing, low_ms=None, high_ms=None)
    telemetry = _summaries(outcomes)
    probes = probes or next((outcome.process.probes for outcome in outcomes if outcome.process.probes), None)
    model = next((outcome.model for outcome in outcomes if outcome.model), None)
    least = _floor(case, model, probes, outcomes, reason)
    total = _energy(outcomes)
    is_back_to_back = case.scenario in BACK_TO_BACK
    has_floor = is_back_to_back and _is_alone(case)
    x_of_floor = timing.median_ms / least.floor_ms if timing and isinstance(least, Floor) and has_floor else None
    return Record(
        run_id=run_id.run_id,
        suite_id=run.suite_id,
        device_id=run.device_id,
        case_id=case.case_id,
        case=case,
        status=status,
        t_wall=t_wall,
        t_mono_ns=run_id.t_mono_ns,
        boot_id=run.boot_id,
        tool_version=run.tool_version,
        environment=_with_worker_facts(run.environment, outcomes),
        reason=reason,
        preset=preset,
        limits=limits.asked() if limits else {},
        model=model,
        artifacts=next((outcome.artifacts for outcome in outcomes if outcome.artifacts), []),
        runtime=next((outcome.runtime for outcome in outcomes if outcome.runtime), None),
        kernels_ran=next((outcome.kernels_ran for outcome in outcomes if outcome.kernels_ran), None),
        timing=timing,
        parts=_parts(outcomes) if timing else {},
        throughput_per_s=_throughput(case, timing, outcomes),
        throughput_basis=_throughput_basis(case) if timing and is_back_to_back else None,
        deadlines=_deadlines(outcomes),
        requests=_requests(outcomes),
        beside=_neighbour(outcomes),
        energy=total if isinstance(total, Energy) else None,
        telemetry=telemetry,
        memory=_memory(outcomes),
        occupancy=next((outcome.occupancy for outcome in outcomes if outcome.occupancy), None),
        check=_worst_check(outcomes),
        accuracy=next((outcome.accuracy for outcome in outcomes if outcome.accuracy), None),
        neurobench=next((outcome.neurobench for outcome in outcomes if outcome.neurobench), None),
        x_of_floor=x_of_floor,
        floor=least if isinstance(least, Floor) else None,
        probes=probes,
        flags=sorted(
            {
                *run.flags,
                *_flags(telemetry, run.environment, x_of_floor, outcomes),
                *(["clock_not_set"] if when.is_unset(t_wall) else []),
                *_threads(case, run.environment, outcomes),
                *_moved(probes, outcomes),
                *_slow_clocks(run.environment, telemetry),
            }
        ),
        missing=_missing(case, timing, total, probes, least, outcomes, reason),
        processes=[outcome.process for outcome in outcomes],
    )


def of_planned(
    planned: PlannedCase, run: RunHeader, run_id: RunId, outcomes: Sequence[Outcome], probes: Probes | None = None
) -> Record:
    """Return the Record of a planned case, including everything needed to repeat the measurement."""
    base_record = record(planned.case, planned.preset, run, run_id, outcomes, probes, planned.limits)
    return msgspec.structs.replace(base_record, own=planned.own and planned.own.named, inputs=planned.inputs.named)


def _status(outcomes: Sequence[Outcome]) -> tuple[Status, str | None]:
    order: tuple[Status, ...] = ("aborted", "failed", "timeout", "unsupported", "ok")
    worst = min((outcome.process for outcome in outcomes), key=lambda process: order.index(process.status))
    other = sameness.model_difference(outcomes) if worst.status == "ok" else None
    return ("failed", other) if other else (worst.status, worst.reason)


def _combined(timings: Sequence[Timing | None]) -> Timing | None:
    """Return one Timing for all processes: centre and interval over process medians, the rest pooled where valid."""
    present = [timing for timing in timings if timing]
    if len(present) <= 1:
        return present[0] if present else None
    median_ms, interval = statistics.combine([timing.median_ms for timing in present])
    runs = sum(timing.runs for timing in present)
    return Timing(
        median_ms=median_ms,
        low_ms=interval.low if interval else None,
        high_ms=interval.high if interval else None,
        mean_ms=sum(timing.mean_ms * timing.runs for timing in present) / runs,
        min_ms=min(timing.min_ms for timing in present),
        max_ms=max(timing.max_ms for timing in present),
        p90_ms=_largest([timing.p90_ms for timing in present]),
        p95_ms=_largest([timing.p95_ms for timing in present]),
        p99_ms=_largest([timing.p99_ms for timing in present]),
        p99_upper_ms=_largest([timing.p99_upper_ms for timing in present]),
        p999_ms=_largest([timing.p999_ms for timing in present]),
        runs=runs,
        outliers_mild=sum(timing.outliers_mild for timing in present),
        outliers_severe=sum(timing.outliers_severe for timing in present),
        interval_basis="between_processes",
    )


def _largest(values: Sequence[float | None]) -> float | None:
    """Return the largest percentile of the processes; None if any process has too few runs for it."""
    present = [value for value in values if value is not None]
    return max(present) if len(present) == len(values) else None


def _parts(outcomes: Sequence[Outcome]) -> dict[str, Timing]:
    names = {name for outcome in outcomes for name in outcome.process.parts}
    combined = {name: _combined([outcome.process.parts.get(name) for outcome in outcomes]) for name in sorted(names)}
    return {name: timing for name, timing in combined.items() if timing}


def _is_alone(case: Case) -> bool:
    """Return whether the model has the device to itself: no other streams, pipeline stages or neighbour."""
    return case.streams == 1 and case.scenario != "pipeline" and case.beside is None


def _throughput_basis(case: Case) -> Literal["measured", "batch_over_median"]:
    return "measured" if case.scenario == "offline" or case.streams > 1 else "batch_over_median"


def _throughput(case: Case, timing: Timing | None, outcomes: Sequence[Outcome]) -> float | None:
    if timing is None or case.scenario not in BACK_TO_BACK:
        return None
    if _throughput_basis(case) == "batch_over_median":
        return case.batch_size / timing.median_ms * 1e3
    measured = [outcome.process.throughput_per_s for outcome in outcomes if outcome.process.throughput_per_s]
    return median(measured)


def _deadlines(outcomes: Sequence[Outcome]) -> list[Deadlines]:
    of_rate: dict[int, list[Deadlines]] = {}
    for outcome in outcomes:
        for tally in outcome.process.deadlines:
            of_rate.setdefault(tally.rate_hz, []).append(tally)
    return [
        Deadlines(
            rate_hz,
            sum(tally.releases for tally in deadlines),
            sum(tally.misses for tally in deadlines),
            max(tally.worst_lateness_ms for tally in deadlines),
        )
        for rate_hz, deadlines in of_rate.items()
    ]


def _neighbour(outcomes: Sequence[Outcome]) -> NeighbourResult | None:
    """Return the neighbour's frames, added up over all processes."""
    neighbours = [outcome.process.beside for outcome in outcomes if outcome.process.beside]
    if not neighbours:
        return None
    return NeighbourResult(
        case_id=neighbours[0].case_id,
        rate_hz=neighbours[0].rate_hz,
        releases=sum(neighbour.releases for neighbour in neighbours),
        misses=sum(neighbour.misses for neighbour in neighbours),
        timing=_combined([neighbour.timing for neighbour in neighbours]),
    )


def _requests(outcomes: Sequence[Outcome]) -> Requests | None:
    """Return the requests of all processes at the lowest of their rates, which is met if each process meets its own."""
    requests = [outcome.process.requests for outcome in outcomes if outcome.process.requests]
    if not requests:
        return None
    met = [summary.met for summary in requests]
    return Requests(
        rate_hz=min(summary.rate_hz for summary in requests),
        asked=sum(summary.asked for summary in requests),
        answered=sum(summary.answered for summary in requests),
        late=sum(summary.late for summary in requests),
        dropped=sum(summary.dropped for summary in requests),
        met=False if False in met else None if None in met else True,
        arrivals_p=min(summary.arrivals_p for summary in requests),
        noticed_ms=max((summary.noticed_ms for summary in requests if summary.noticed_ms is not None), default=None),
        busy_share=median([summary.busy_share for summary in requests]),
    )


def _dropped_half(outcomes: Sequence[Outcome]) -> bool:
    """Return whether a process dropped its median request, so that there is no median latency."""
    requests = [outcome.process.requests for outcome in outcomes if outcome.process.requests]
    return any(figures.is_dropped_median(summary) for summary in requests)


def _memory(outcomes: Sequence[Outcome]) -> Memory | None:
    peaks = [outcome.process.memory for outcome in outcomes if outcome.process.memory]
    if not peaks:
        return None
    worker = [peak.worker_peak_bytes for peak in peaks if peak.worker_peak_bytes is not None]
    device = [peak.device_peak_bytes for peak in peaks if peak.device_peak_bytes is not None]
    return Memory(
        rss_peak_bytes=max(peak.rss_peak_bytes for peak in peaks),
        worker_peak_bytes=max(worker, default=None),
        device_peak_bytes=max(device, default=None),
    )


def _worst_check(outcomes: Sequence[Outcome]) -> Check | None:
    checks = [outcome.check for outcome in outcomes if outcome.check]
    return min(checks, key=lambda check: (VERDICTS.index(check.verdict), -check.error_share)) if checks else None


def _energy(outcomes: Sequence[Outcome]) -> Energy | str | None:
    """Return the energy over all processes, or the reason why there is none; None if any process lacks it."""
    energies = [outcome.process.energy for outcome in outcomes]
    present = [measured for measured in energies if measured is not None]
    return energy.combined(present) if present and len(present) == len(energies) else None


def _floor(
    case: Case, model: ModelFacts | None, probes: Probes | None, outcomes: Sequence[Outcome], reason: str | None
) -> Floor | str:
    """Return the roofline of one run, or the reason why there is none."""
    if model is None or probes is None:
        return reason or "the device was not probed"
    counted = next((outcome.counted for outcome in outcomes if outcome.counted), None)
    cost = roofline.cost_of(case, model, counted)
    if isinstance(cost, str):
        return cost
    synaptic_flops = next(filter(None, (outcome.synaptic_flops for outcome in outcomes)), None)  # per image
    spent = synaptic_flops * case.batch_size if synaptic_flops and case.direction == "inference" else None
    floor = roofline.of(cost, probes, spent, is_convolved=roofline.is_convolved(case, counted))
    return msgspec.structs.replace(floor, uncounted=counted.uncounted if counted else [])


def _summaries(outcomes: Sequence[Outcome]) -> dict[str, Summary]:
    by_name: dict[str, list[Summary]] = {}
    for outcome in outcomes:
        for name, summary in outcome.process.telemetry.items():
            by_name.setdefault(name, []).append(summary)
    return {name: _pooled(summaries) for name, summaries in sorted(by_name.items())}


def _pooled(summaries: Sequence[Summary]) -> Summary:
    samples = sum(summary.samples for summary in summaries)
    return Summary(
        minimum=min(summary.minimum for summary in summaries),
        mean=sum(summary.mean * summary.samples for summary in summaries) / samples,
        maximum=max(summary.maximum for summary in summaries),
        samples=samples,
        source=summaries[0].source,
    )


def _flags(
    telemetry: dict[str, Summary], environment: Environment, x_of_floor: float | None, outcomes: Sequence[Outcome]
) -> list[str]:
    flags = {flag for outcome in outcomes for flag in outcome.flags}
    runtimes = [outcome.runtime for outcome in outcomes if outcome.runtime]
    if any(runtime.typing == "weak" for runtime in runtimes):
        flags.add("weak_typing")
    if any(runtime.node_shares.get(runtime.provider, 1.0) < 1.0 for runtime in runtimes):
        flags.add("provider_fallback")
    for outcome in outcomes:
        flags |= _disturbances(outcome.process.interference)
    if x_of_floor is not None and x_of_floor < 1:
        flags.add("faster_than_floor")
    if _foreign_cpus(telemetry, _online_cpus(environment)) > FOREIGN_CPUS:
        flags.add("busy_machine")
    if sameness.files_changed(outcomes):
        flags.add("files_changed")
    return sorted(flags | _uneven([outcome.process for outcome in outcomes]))


def _uneven(processes: Sequence[ProcessResult]) -> set[str]:
    """Return the flags for times whose interval is unreliable, because they jump between levels or are correlated."""
    medians_ms = [process.timing.median_ms for process in processes if process.timing and process.timing.median_ms > 0]
    blocks = [process.blocks for process in processes if process.blocks]
    flags = (
        {"two_levels"}
        if timings.two_levels(medians_ms) or any(process_blocks.levels for process_blocks in blocks)
        else set()
    )
    # a disturbance that correlates interleaved blocks affects both processes equally
    misleading = any(process_blocks.is_correlated and not process_blocks.is_interleaved for process_blocks in blocks)
    return flags | ({"correlated_blocks"} if misleading else set())


def _threads(case: Case, environment: Environment, outcomes: Sequence[Outcome]) -> set[str]:
    """Return the flags for an unrequested number of threads, or for threads that share CPUs."""
    ran = {outcome.threads for outcome in outcomes if outcome.threads}
    flags = {"other_threads"} if case.threads and ran - {case.threads} else set()
    return flags | {"shared_cpus" for threads in ran if threads * case.streams > environment.cpu_count}


def _moved(probes: Probes | None, outcomes: Sequence[Outcome]) -> set[str]:
    """Return the flag for a device whose peak rates have changed since the run began."""
    later = [outcome.process.probes for outcome in outcomes if outcome.process.probes]
    return {"probes_moved" for later_probes in later if probes and roofline.change(probes, later_probes) > PROBES_SHARE}


def _slow_clocks(environment: Environment, telemetry: dict[str, Summary]) -> set[str]:
    """Return the flag for a device whose clock stayed far below its maximum throughout."""
    clock_range = of_range(environment, telemetry)
    return {"clock_below_range"} if clock_range and clock_range[0] < RANGE_SHARE * clock_range[1] else set()


def _disturbances(interference: Interference | None) -> set[str]:
    """Return the causes that disturbed more than a fifth of the blocks."""
    reasons = Counter(reason for block in interference.reasons for reason in block) if interference else Counter[str]()
    return {
        reason
        for reason, count in reasons.items()
        if interference and count > DISTURBED_SHARE * len(interference.reasons)
    }


def _foreign_cpus(telemetry: dict[str, Summary], online_cpus: int) -> float:
    """Return the mean number of CPUs that other processes used while the case was timed, 0 if not observed."""
    machine, process = telemetry.get("cpu_utilization_percent"), telemetry.get("process_cpu_percent")
    return (machine.mean * online_cpus - process.mean) / 100 if machine and process else 0.0


def _online_cpus(environment: Environment) -> int:
    """Return the number of CPUs that the utilisation covers: all online ones, even those closed to the case."""
    spans = [span.partition("-") for span in environment.system.get("online_cpus", "").split(",") if span]
    return sum(int(last or first) - int(first) + 1 for first, _, last in spans) or environment.cpu_count


def _with_worker_facts(environment: Environment, outcomes: Sequence[Outcome]) -> Environment:
    """Return the environment with the facts that only a process with torch knows."""
    versions = {name: version for outcome in outcomes for name, version in outcome.versions.items()}
    known = msgspec.structs.replace(
        environment,
        threads=next((outcome.threads for outcome in outcomes if outcome.threads), environment.threads),
        gpu=next((outcome.device_name for outcome in outcomes if outcome.device_name), environment.gpu),
        versions=environment.versions | versions,
        variables=next((outcome.variables for outcome in outcomes if outcome.variables is not None), None),
        software=next((outcome.software for outcome in outcomes if outcome.software), {}),
    )
    return msgspec.structs.replace(known, fingerprint=fingerprint(known))


def _missing_percentile(least: int, outcomes: Sequence[Outcome]) -> str:
    """Return why a percentile is missing: each process needs `least` runs, including dropped requests."""
    processes = [outcome.process for outcome in outcomes]
    runs = [
        process.requests.asked if process.requests else process.timing.runs for process in processes if process.timing
    ]
    fewest = min(runs, default=0)
    requests = _requests(outcomes)
    if requests and requests.dropped and fewest >= least:
        return f"{requests.dropped} of {requests.asked} requests were dropped"
    return f"needs {least} runs per process, has {fewest}"


def _no_interval(timing: Timing, outcomes: Sequence[Outcome]) -> str:
    if timing.interval_basis == "within_process":
        return "too few runs, or too much variation, for an interval of the median"
    medians_ms = [outcome.process.timing.median_ms for outcome in outcomes if outcome.process.timing]
    apart = f"{len(medians_ms)} processes took {min(medians_ms):.4g} to {max(medians_ms):.4g} ms"
    return f"{apart}, too far apart to predict the next one: measure more (--processes)"


def _missing_timing(
    case: Case, timing: Timing | None, reason: str | None, outcomes: Sequence[Outcome]
) -> dict[str, str]:
    missing = {}
    if timing is None:
        missing["timing"] = missing["x_of_floor"] = reason or "not measured"
    else:
        requests = _requests(outcomes)
        if requests and _dropped_half(outcomes):
            dropped = f"{requests.dropped} of {requests.asked} requests were dropped"
            missing["timing.median_ms"] = f"{dropped}: the times are those of the answered ones only"
        elif timing.low_ms is None:
            missing["timing.low_ms"] = _no_interval(timing, outcomes)
        for name, q in PERCENTILES.items():
            if getattr(timing, name) is None:
                missing[f"timing.{name}"] = _missing_percentile(statistics.minimum_samples(q), outcomes)
    if not _is_alone(case):
        missing["x_of_floor"] = "the floor assumes that the model has the device to itself"
    if case.scenario not in BACK_TO_BACK:
        missing["throughput_per_s"] = missing["x_of_floor"] = f"{case.scenario} runs are not back to back"
    return missing


def _missing(
    case: Case,
    timing: Timing | None,
    total: Energy | str | None,
    probes: Probes | None,
    least: Floor | str,
    outcomes: Sequence[Outcome],
    reason: str | None,
) -> dict[str, str]:
    missing = {} if isinstance(total, Energy) else {"energy": total or "no_sensor"}
    missing |= _missing_timing(case, timing, reason, outcomes)
    if isinstance(least, str):
        missing["floor"] = missing["x_of_floor"] = least
    for outcome in outcomes:
        missing |= outcome.missing
    if any(memory.device_peak_bytes for memory in (outcome.process.memory for outcome in outcomes) if memory):
        missing.pop("memory.device_peak_bytes", None)
    if not any(outcome.accuracy for outcome in outcomes):
        missing.setdefault("accuracy", reason or accuracy.NOT_ASKED)
    if any(outcome.occupancy for outcome in outcomes):
        missing.pop("occupancy", None)
    else:
        missing.setdefault("occupancy", reason or "measured on GPUs only")
    if probes:
        missing.pop("probes", None)
    else:
        missing.setdefault("probes", reason or "not measured")
    return missing
