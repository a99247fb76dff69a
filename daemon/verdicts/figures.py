"""Returns the latency, energy, power and memory of a record for comparison with limits; pure."""

import math
from collections.abc import Iterable, Iterator
from typing import TypeVar

from benchd.daemon.records import Energy, Record, Requests

T = TypeVar("T")


def latency_ms(record: Record) -> float | None:
    """Return p99 if there are enough runs for it, else the upper end of the median's interval, else None.

    If requests were dropped, only p99 counts, because the interval is that of answered requests only.
    """
    if record.timing is None:
        return None
    has_dropped = record.requests is not None and record.requests.dropped > 0
    return record.timing.p99_ms or (None if has_dropped else record.timing.high_ms)


def median_ms(record: Record) -> float | None:
    """Return the median in ms; None if there is none, or if half or more of a process's requests were dropped."""
    return record.timing.median_ms if record.timing and not dropped_half(record) else None


def dropped_half(record: Record) -> bool:
    """Return whether the median request of any process, or of the record, was dropped."""
    requests = [record.requests, *(process.requests for process in record.processes)]
    return any(is_dropped_median(request_counts) for request_counts in requests if request_counts)


def is_dropped_median(requests: Requests) -> bool:
    """Return whether the median request was dropped, so that there is no median latency."""
    return 2 * requests.dropped >= requests.asked > 0


def energy_error_share(energy: Energy | None) -> float | None:
    """Return the error bar as a share of the energy; None if there is no energy."""
    return energy.energy_err_j / energy.energy_j if energy and energy.energy_j > 0 else None


def largest_energy_j(record: Record) -> float | None:
    """Return the gross energy of one inference at the upper end of its error bar."""
    share = energy_error_share(record.energy)
    return record.energy.gross_per_inference_j * (1.0 + share) if record.energy and share is not None else None


def power_w(record: Record) -> float | None:
    """Return the mean power of the rail with the largest power, which is the input rail if there is one.

    If no rail was read but energy was counted, the power is that energy divided by the length of the window.
    """
    rails = [summary.mean for key, summary in record.telemetry.items() if key.partition("@")[0] == "power_w"]
    if rails:
        return max(rails)
    windows = [process.window for process in record.processes if process.energy and process.window]
    seconds = math.fsum(window.seconds for window in windows)
    return record.energy.energy_j / seconds if record.energy and seconds > 0 else None


def largest_power_w(record: Record) -> float | None:
    """Return the mean power at the upper end of the energy's error bar."""
    mean_w = power_w(record)
    return None if mean_w is None else mean_w * (1.0 + (energy_error_share(record.energy) or 0.0))


def memory_bytes(record: Record) -> int | None:
    """Return the peak memory of the device used: the accelerator's or, on a CPU, the process's."""
    if record.memory is None:
        return None
    on_cpu = record.environment.device == "cpu"
    return record.memory.rss_peak_bytes if on_cpu else record.memory.device_peak_bytes


def memory_mib(record: Record) -> float | None:
    """Return `memory_bytes` in MiB."""
    size = memory_bytes(record)
    return None if size is None else size / 2**20


def worker_peak_bytes(record: Record) -> int | None:
    """Return a CPU process's peak since its start, check included, if over 10 % above `memory_bytes`, else None."""
    size = memory_bytes(record)
    peak = record.memory.worker_peak_bytes if record.memory and record.environment.device == "cpu" else None
    return peak if size and peak and peak > 1.1 * size else None


def unbeaten(points: Iterable[tuple[float, float, T]]) -> Iterator[tuple[float, float, T]]:
    """Yield the points (latency, energy, item) that no other point beats in both respects, fastest first."""
    least = math.inf
    for point in sorted(points, key=lambda candidate: candidate[:2]):
        if point[1] < least:
            least = point[1]
            yield point
