"""A profile's summary as a Record, flagged as a profile: it is published and shown but never ranked or compared."""

from benchd.daemon.measuring.recording import RunHeader, RunId
from benchd.daemon.profiling.profile import BenchmarkProfile, Distribution, Profile
from benchd.daemon.records import PROFILED, Record, Timing

ELSEWHERE = ("energy", "memory", "check", "floor", "x_of_floor", "probes")


def record(profile: Profile, run: RunHeader, run_id: RunId) -> Record:
    """Return the Record, with the benchmark method's times, if they are known."""
    missing = dict.fromkeys(ELSEWHERE, "not part of a profile; bench-once measures it") | profile.missing
    timing = _timing(profile.benchmark.step) if profile.benchmark else None
    if timing is None:
        missing["timing"] = profile.missing.get("benchmark", "the benchmark method was not requested")
    if profile.occupancy is None:
        missing["occupancy"] = "measured on GPUs only" if profile.device == "cpu" else "not in the trace"
    reasons = "; ".join(profile.missing.values())
    return Record(
        run_id=run_id.run_id,
        suite_id=run.suite_id,
        device_id=run.device_id,
        case_id=profile.case_id,
        case=profile.case,
        status="ok" if profile.measured else "failed",
        reason=None if profile.measured else reasons,
        t_wall=run_id.t_wall,
        t_mono_ns=run_id.t_mono_ns,
        boot_id=run.boot_id,
        tool_version=run.tool_version,
        environment=profile.environment,
        model=profile.model,
        kernels_ran=profile.kernels_ran,
        timing=timing,
        parts=_parts(profile.benchmark) if profile.benchmark else {},
        throughput_per_s=profile.benchmark.throughput_per_s if profile.benchmark else None,
        throughput_basis="measured" if profile.benchmark else None,
        occupancy=profile.occupancy,
        flags=[PROFILED, *(["busy_machine"] if profile.is_disturbed else [])],
        missing=missing,
    )


def _timing(times: Distribution) -> Timing:
    return Timing(
        median_ms=times.median_ns / 1e6,
        low_ms=times.low_ns / 1e6,
        high_ms=times.high_ns / 1e6,
        mean_ms=times.mean_ns / 1e6,
        min_ms=times.min_ns / 1e6,
        max_ms=times.max_ns / 1e6,
        runs=times.runs,
    )


def _parts(benchmark: BenchmarkProfile) -> dict[str, Timing]:
    parts = {"forward": benchmark.forward, "backward": benchmark.backward}
    return {name: _timing(times) for name, times in parts.items() if times}
