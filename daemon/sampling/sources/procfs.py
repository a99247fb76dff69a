"""CPU, memory and watched processes from procfs, CPU clocks from cpufreq: works everywhere, without privileges.

The kernel counts CPU time in 10 ms ticks, so a reading over a short interval is coarse, but the mean is not. If power
is sampled more than ten times per second, this source skips ticks, because reading it costs the most and adds little.
"""

import os
import re
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path

from benchd.daemon.machine import cgroup
from benchd.daemon.machine.sysfs import KernelFile, cpufreq_policies, number, text
from benchd.daemon.records import Sample

TICKS_PER_S = os.sysconf("SC_CLK_TCK")
PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
_MEMINFO_KIB = re.compile(rb"^(MemAvailable|SwapTotal|SwapFree|NvMapMemUsed):\s*(\d+)", re.MULTILINE)
_STOPS = re.compile(rb"^nr_throttled (\d+)", re.MULTILINE)
_CPUINFO_MHZ = re.compile(rb"^cpu MHz\s*:\s*([0-9.]+)", re.MULTILINE)

_Clock = tuple[str, int, float]  # for CPUs that share a clock: name, number of CPUs, Hz


class Procfs:
    """Yields values at most ten times per second, with shares in percent and process CPU time in percent of one CPU.

    These are `cpu_utilization_percent` and `cpu_steal_percent` for the time since the last reading;
    `memory_available_bytes`, `swap_used_bytes` and, on a Jetson, `nvmap_used_bytes`, the memory allocated by the GPU
    driver; `cpu_quota_stops`, how often a control group quota stopped this process since the last reading;
    `process_cpu_percent`, `process_major_faults_per_s` and `process_rss_bytes`, summed over all live watched processes;
    and `cpu_clock_hz` if the kernel reports it: the mean over all CPUs and, if CPUs share clocks, one rail per cluster.
    """

    name = "procfs"
    min_interval_ns = 90_000_000

    def __init__(self, root: Path = Path("/")) -> None:
        self._proc = root / "proc"
        self._stat = KernelFile(self._proc / "stat")
        self._meminfo = KernelFile(self._proc / "meminfo")
        self._read_clocks = _clocks(root)
        self._stopping = [KernelFile(file) for file in cgroup.limited(root)]
        self._stops: int | None = None
        self._processes: list[_Process] = []
        self._times: tuple[int, int, int] | None = None

    def unavailable(self) -> str | None:
        """Return why CPU or memory values cannot be read, else None; starts the first interval."""
        try:
            self._times = self._read_times()
            self._memory()
        except (OSError, ValueError, IndexError) as error:
            return f"{self._proc} does not contain stat and meminfo in Linux's format: {error}"
        return None

    def watch(self, *pids: int) -> None:
        """Follow each of these processes until it ends, which is not an error."""
        self._processes = [_Process(self._proc / str(pid) / "stat") for pid in pids]

    def sample(self) -> Iterator[Sample]:
        """Yield the current values; raise OSError or ValueError if a file is no longer readable."""
        yield from self._cpu()
        yield from self._samples(self._memory())
        yield from self._samples(self._watched())
        yield from self._quota()
        yield from self._clock()

    def _sample(self, metric: str, value: float, rail: str = "") -> Sample:
        return Sample(time.monotonic_ns(), metric, value, self.name, rail)

    def _samples(self, metrics: Mapping[str, float]) -> Iterator[Sample]:
        for metric, value in metrics.items():
            yield self._sample(metric, value)

    def _cpu(self) -> Iterator[Sample]:
        times = self._read_times()
        if self._times is None:
            self._times = times
            return
        total, idle, steal = (now - before for now, before in zip(times, self._times, strict=True))
        if total > 0:  # otherwise no tick has passed, and the interval continues
            self._times = times
            yield self._sample("cpu_utilization_percent", _percent(total - idle, total))
            yield self._sample("cpu_steal_percent", _percent(steal, total))

    def _read_times(self) -> tuple[int, int, int]:
        """Return the total, idle and stolen ticks, summed over all CPUs."""
        fields = [int(field) for field in self._stat.read(512).split(b"\n", 1)[0].split()[1:9]]
        # Guest time, in the remaining fields, is already part of user time.
        return sum(fields), fields[3] + fields[4], fields[7]

    def _memory(self) -> dict[str, int]:
        kib = {name: int(value) for name, value in _MEMINFO_KIB.findall(self._meminfo.read())}
        if b"MemAvailable" not in kib:
            raise ValueError(f"no MemAvailable in {self._proc / 'meminfo'}")
        metrics = {"memory_available_bytes": kib[b"MemAvailable"] * 1024}
        if b"SwapTotal" in kib:
            metrics["swap_used_bytes"] = (kib[b"SwapTotal"] - kib[b"SwapFree"]) * 1024
        if b"NvMapMemUsed" in kib:
            metrics["nvmap_used_bytes"] = kib[b"NvMapMemUsed"] * 1024
        return metrics

    def _watched(self) -> Mapping[str, float]:
        total: dict[str, float] = {}
        for process in list(self._processes):
            try:
                metrics = process.read()
            except (FileNotFoundError, ProcessLookupError):
                self._processes.remove(process)
                continue
            for metric, value in metrics.items():
                total[metric] = total.get(metric, 0.0) + value
        return total

    def _quota(self) -> Iterator[Sample]:
        before = self._stops
        self._stops = sum(int(count) for file in self._stopping for count in _STOPS.findall(file.read()))
        if self._stopping and before is not None:
            yield self._sample("cpu_quota_stops", self._stops - before)

    def _clock(self) -> Iterator[Sample]:
        clocks = self._read_clocks()
        if clocks:
            cpus = sum(cpus for _, cpus, _ in clocks)
            yield self._sample("cpu_clock_hz", sum(hz * cpus for _, cpus, hz in clocks) / cpus)
        if len(clocks) > 1 and any(cpus > 1 for _, cpus, _ in clocks):
            for rail, _, hz in clocks:
                yield self._sample("cpu_clock_hz", hz, rail)


def _percent(part: int, whole: int) -> float:
    # The kernel's idle and I/O wait counts may decrease slightly.
    return 100.0 * min(max(part, 0), whole) / whole


class _Process:
    """One process's usage; the open file refers to this process even if its pid is reused."""

    def __init__(self, stat: Path) -> None:
        self._stat = KernelFile(stat)
        self._before: tuple[int, int, int] | None = None

    def read(self) -> dict[str, float]:
        """Return the metrics: resident bytes and, from the second reading on, the rates since the last reading.

        Raises ProcessLookupError or FileNotFoundError for a process that has ended.
        """
        # The name, which may contain spaces and brackets, ends at the last bracket; then state, ..., majflt, ...,
        # utime, stime, ...
        fields = self._stat.read().rpartition(b")")[2].split()
        if fields[0] in (b"Z", b"X"):
            raise ProcessLookupError("it has ended (zombie)")
        now = time.monotonic_ns(), int(fields[11]) + int(fields[12]), int(fields[9])
        before, self._before = self._before, now
        metrics: dict[str, float] = {"process_rss_bytes": int(fields[21]) * PAGE_BYTES}
        if before:
            ns, ticks, faults = (late - early for late, early in zip(now, before, strict=True))
            metrics["process_cpu_percent"] = 100.0 * ticks / TICKS_PER_S / (ns / 1e9)
            metrics["process_major_faults_per_s"] = faults / (ns / 1e9)
        return metrics


def _clocks(root: Path) -> Callable[[], list[_Clock]]:
    """Return a function that reads cpufreq or else /proc/cpuinfo; on some ARM machines, it finds no clocks."""
    files = [
        (policy.name, len((text(policy / "affected_cpus") or "0").split()), KernelFile(policy / "scaling_cur_freq"))
        for policy in cpufreq_policies(root)
        if number(policy / "scaling_cur_freq")
    ]
    if files:
        return lambda: [(name, cpus, int(file.read()) * 1e3) for name, cpus, file in files]
    cpuinfo = KernelFile(root / "proc/cpuinfo")
    try:
        return partial(_cpuinfo_clocks, cpuinfo) if _cpuinfo_clocks(cpuinfo) else list
    except (OSError, ValueError):
        return list


def _cpuinfo_clocks(cpuinfo: KernelFile) -> list[_Clock]:
    megahertz = _CPUINFO_MHZ.findall(cpuinfo.read_all())
    return [(f"cpu{i}", 1, float(mhz) * 1e6) for i, mhz in enumerate(megahertz)]
