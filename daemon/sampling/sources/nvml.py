"""Power, energy, clocks and load of one NVIDIA GPU from NVML, through nvidia-ml-py; NVML has no values on an Orin.

`nvml` is read while a case is timed. `gpm` reads the performance counters of Hopper and newer in a separate run,
because counting may disturb the timing.
"""

import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

from benchd.daemon.errors import NotAvailable
from benchd.daemon.machine.gpu import NO_MIG, check, cuda_uuid, open_nvml
from benchd.daemon.records import Sample
from benchd.daemon.sampling.sources.protocol import PowerSource

MIN_INTERVAL_NS = 90_000_000  # for all values except the instantaneous power
POLL_S = 0.0005
COUNTER_STAMP_S = 5e-3  # the thread that watches the counter polls at 2 kHz, but less regularly on a busy machine
LEAD_NS = 1_000_000  # polling starts this long before a change is due
LONGEST_PERIOD_S = 0.1  # the longest of any known GPU, for values that did not change while the period was measured
PERIODS_MEASURED = 10
MEASURE_S = 2.0
STALE_NS = 2_000_000_000
AVERAGE_S = 1.0  # the window of NVML's average from Ampere on
GPM_INTERVAL_NS = 200_000_000
GPM_FIRST_S = 0.12  # readings less than 0.1 s apart are invalid

THROTTLE_REASONS = {
    0x1: "idle",
    0x2: "application clocks",
    0x4: "software power cap",
    0x8: "hardware slowdown",
    0x10: "sync boost",
    0x20: "software thermal slowdown",
    0x40: "hardware thermal slowdown",
    0x80: "power brake",
    0x100: "display clocks",
}

_Key = tuple[str, str]  # metric, rail
_Readings = dict[_Key, Callable[[], float]]

_ENERGY: _Key = ("energy_counter_j", "gpu")
_HISTORY: _Key = ("power_w", "gpu_history")
_LOAD: _Key = ("gpu_utilization_percent", "")
_UNSUPPORTED = (2, 3, 6, 13)  # NVML's codes: unknown field, not supported, no such data, no such function
_LOST = (1, 15, 999)  # not initialised, GPU lost, unknown error: the GPU may come back
# the id and the scope of NVML's fields
_PRESENT_POWERS: dict[_Key, tuple[int, int]] = {("power_w", "module"): (186, 1), ("power_w", "gpu"): (186, 0)}
_AVERAGE_POWERS: dict[_Key, tuple[int, int]] = {
    ("power_w", "module_average"): (185, 1),
    ("power_w", "gpu_average"): (185, 0),
}
_GPM_METRICS = {
    1: "gpm_graphics_utilization_percent",
    2: "gpm_sm_utilization_percent",
    3: "gpm_sm_occupancy_percent",
    5: "gpm_tensor_percent",
    7: "gpm_hmma_tensor_percent",
    9: "gpm_imma_tensor_percent",
    10: "gpm_dram_bandwidth_percent",
}


def throttle_names(mask: int) -> list[str]:
    """Return the names of the bits set in `gpu_throttle_reasons`, with `bit 0x...` for an unnamed bit."""
    bits = [1 << bit for bit in range(mask.bit_length()) if mask >> bit & 1]
    return [THROTTLE_REASONS.get(bit, f"bit {bit:#x}") for bit in bits]


class Nvml:
    """Yields the metrics that the GPU supports; the GPU is given by UUID or CUDA index (`cuda`, `cuda:1`).

    At each tick, it yields `power_w` for the rails gpu and module, and the changes in `energy_counter_j` since the last
    tick, with the times at which they occurred. At most ten times per second, it yields the rest: `power_w` for the
    rails gpu_average, module_average and gpu_history (the driver's own samples); `gpu_clock_hz` (of the SMs),
    `gpu_memory_clock_hz`, `gpu_throttle_reasons` (a mask, see `throttle_names`), `gpu_temp_c`,
    `gpu_utilization_percent`, `gpu_memory_used_bytes` and `gpu_foreign_processes`, the number of processes with a
    compute context other than the watched ones. Values that the driver refuses are left out, and the reason is reported
    as a failure.
    """

    name = "nvml"

    def __init__(self, device: str | Path = "cuda") -> None:
        self._device = check(str(device))
        self._watched: set[int] = set()
        self._due_ns = 0

    def unavailable(self) -> str | None:
        """Return None after one reading of every available value, else why no value is available.

        This takes up to two seconds to measure the update periods of energy and power.
        """
        try:
            self._open(_Gpu(self._device))
        except NotAvailable as error:
            return str(error)
        return None

    def _open(self, gpu: "_Gpu") -> None:
        self._gpu = gpu
        self._present = gpu.answering({key: partial(gpu.power_w, *field) for key, field in _PRESENT_POWERS.items()})
        self._others = gpu.answering(self._other_readings(gpu))
        energy = gpu.answering({_ENERGY: gpu.energy_j})
        self._history = _History(gpu) if gpu.answering({_HISTORY: lambda: len(gpu.history(0))}) else None
        # On a Tegra, the process count works; on a Thor, so does the load, unlike in devfreq
        if not (self._present or energy or self._history or self._others.keys() & {_LOAD, *_AVERAGE_POWERS}):
            nothing = f"NVML reports neither power nor load for {gpu.uuid}, as on a Jetson Orin; use ina3221 there"
            why = gpu.refused or [nothing]
            raise NotAvailable("; ".join(why))
        self._periods_s = _measured_periods_s(self._present | energy)
        self._counter = _EnergyCounter(gpu.energy_j, self._period_s(_ENERGY)) if energy else None

    def _period_s(self, key: _Key) -> float:
        return self._periods_s.get(key, LONGEST_PERIOD_S)

    def _other_readings(self, gpu: "_Gpu") -> _Readings:
        nvml, handle = gpu.nvml, gpu.handle
        readings: _Readings = {
            ("gpu_clock_hz", ""): lambda: nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_SM) * 1e6,
            ("gpu_memory_clock_hz", ""): lambda: nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_MEM) * 1e6,
            ("gpu_throttle_reasons", ""): lambda: nvml.nvmlDeviceGetCurrentClocksEventReasons(handle),
            ("gpu_temp_c", ""): lambda: nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU),
            _LOAD: lambda: nvml.nvmlDeviceGetUtilizationRates(handle).gpu,
            ("gpu_memory_used_bytes", ""): lambda: nvml.nvmlDeviceGetMemoryInfo(handle).used,
            ("gpu_foreign_processes", ""): lambda: sum(map(_is_here, gpu.computing_pids() - self._watched)),
        }
        return readings | {key: partial(gpu.power_w, *field) for key, field in _AVERAGE_POWERS.items()}

    def watch(self, *pids: int) -> None:
        """Treat these processes as benchd's own: any other process that computes on the GPU is foreign."""
        self._watched = set(pids)

    def power_sources(self) -> list[PowerSource]:
        """Return the module's power sources, if any (superchips like Grace Hopper), then those of the GPU board."""
        powers = [*self._present, *(key for key in self._others if key in _AVERAGE_POWERS)]
        module = [key for key in powers if key[1].startswith("module")]
        board = [_ENERGY] * bool(self._counter) + [_HISTORY] * bool(self._history)
        board += [key for key in powers if key not in module]
        sources = [self._power_source(key, "module of GPU, CPU and memory", total=True) for key in module]
        return sources + [self._power_source(key, "GPU board", total=not module) for key in board]

    def _power_source(self, key: _Key, scope: str, *, total: bool) -> PowerSource:
        return PowerSource(
            source=self.name,
            rail=key[1],
            metric="energy_counter_j" if key == _ENERGY else "power_w",
            scope=scope,
            total=total,
            period_s=self._history.period_s if self._history and key == _HISTORY else self._period_s(key),
            averaging_s=AVERAGE_S if key in _AVERAGE_POWERS else 0.0,
            stamp_s=COUNTER_STAMP_S if key == _ENERGY else None,
        )

    def sample(self) -> Iterator[Sample]:
        """Yield the current values; then raise OSError listing those that could not be read."""
        now_ns = time.monotonic_ns()
        due = now_ns >= self._due_ns
        failures = list(self._gpu.refused) if due else []
        for key, read in (self._present | self._others if due else self._present).items():
            yield from self._try(key, partial(_reading, read), failures)
        if self._counter:
            yield from self._try(_ENERGY, self._counter.changes, failures)
        if due:
            self._due_ns = now_ns + MIN_INTERVAL_NS
            if self._history:
                yield from self._try(_HISTORY, self._history.fresh, failures)
        if failures:
            raise OSError("; ".join(failures))

    def _try(self, key: _Key, read: Callable[[], list[tuple[int, float]]], failures: list[str]) -> Iterator[Sample]:
        try:
            values = read()
        except (self._gpu.error, TimeoutError) as error:
            failures.append(f"{_named(key)}: {error}")
            return
        yield from (Sample(t_ns, key[0], value, self.name, key[1]) for t_ns, value in values)


def _code(error: Exception) -> int | None:
    return getattr(error, "value", None)


def _named(key: _Key) -> str:
    return " ".join(key).strip()


def _is_here(pid: int) -> bool:
    """Return whether a process with this pid exists in this container; the driver may report the host's pids."""
    if pid == 0:  # stands for a process outside this pid namespace
        return False
    try:
        os.kill(pid, 0)  # used because in /proc, a unit hides other users' processes
    except OSError as error:
        return isinstance(error, PermissionError)
    return True


def _reading(read: Callable[[], float]) -> list[tuple[int, float]]:
    """Return the value and the midpoint of its reading time, as a list with one item."""
    begin_ns, value = time.monotonic_ns(), float(read())
    return [((begin_ns + time.monotonic_ns()) // 2, value)]


class _Gpu:
    """One whole GPU, opened by UUID; raises NotAvailable if it is absent or partitioned by MIG."""

    def __init__(self, device: str) -> None:
        self.uuid = cuda_uuid(device)
        self.nvml: Any = open_nvml()
        self.error: type[Exception] = self.nvml.NVMLError
        self.refused: list[str] = []
        try:
            self.handle = self.nvml.nvmlDeviceGetHandleByUUID(self.uuid)
        except self.error as error:
            raise NotAvailable(f"NVML cannot open {self.uuid}: {error}") from error
        if self._is_shared_out():
            raise NotAvailable(f"{self.uuid} is partitioned by MIG; {NO_MIG}")

    def _is_shared_out(self) -> bool:
        try:
            return bool(self.nvml.nvmlDeviceGetMigMode(self.handle)[0])
        except self.error as error:
            if _code(error) in _UNSUPPORTED:
                return False
            raise NotAvailable(f"MIG mode of {self.uuid}: {error}") from error

    def answering(self, readings: _Readings) -> _Readings:
        """Try each reading and return those that yield a value; raise NotAvailable if none does.

        `refused` gets the reasons for the others, except lack of support.
        """
        return {key: read for key, read in readings.items() if self._answers(key, read)}

    def _answers(self, key: _Key, read: Callable[[], float]) -> bool:
        try:
            read()
        except self.error as error:
            if _code(error) in _LOST:
                raise NotAvailable(f"{_named(key)} of {self.uuid}: {error}") from error
            if _code(error) not in _UNSUPPORTED:
                self.refused.append(f"{_named(key)}: {error}")
            return False
        return True

    def energy_j(self) -> float:
        """Return the energy used since the driver was loaded."""
        return float(self.nvml.nvmlDeviceGetTotalEnergyConsumption(self.handle)) / 1e3

    def power_w(self, field: int, scope: int) -> float:
        """Return the power from an NVML field, whose value includes a return code."""
        value = self.nvml.nvmlDeviceGetFieldValues(self.handle, [(field, scope)])[0]
        if value.nvmlReturn:
            raise self.nvml.NVMLError(value.nvmlReturn)
        return float(value.value.uiVal) / 1e3

    def computing_pids(self) -> set[int]:
        """Return the processes that have a compute context."""
        return {process.pid for process in self.nvml.nvmlDeviceGetComputeRunningProcesses(self.handle)}

    def history(self, since_us: int) -> list[tuple[int, float]]:
        """Return the powers that the driver recorded after `since_us`, as (microseconds of UTC, W)."""
        _, samples = self.nvml.nvmlDeviceGetSamples(self.handle, self.nvml.NVML_TOTAL_POWER_SAMPLES, since_us)
        return [(sample.timeStamp, sample.sampleValue.uiVal / 1e3) for sample in samples if sample.timeStamp > since_us]


class _History:
    """The driver's own power samples, each returned once, from the creation of this object on."""

    def __init__(self, gpu: _Gpu) -> None:
        self._gpu = gpu
        self._last_ns = time.monotonic_ns()
        times_us = [t_us for t_us, _ in gpu.history(0)]
        self._seen_us = max(times_us, default=0)
        self.period_s = _median_gap(times_us) / 1e6 if len(times_us) > 1 else LONGEST_PERIOD_S

    def fresh(self) -> list[tuple[int, float]]:
        """Return the samples since the last call."""
        try:
            samples = self._gpu.history(self._seen_us)
        except self._gpu.nvml.NVMLError_NotFound:  # no samples
            return []
        now_ns = time.monotonic_ns()
        from_utc_ns = now_ns - time.time_ns()
        self._seen_us = max((t_us for t_us, _ in samples), default=self._seen_us)
        stamped = [(t_us * 1000 + from_utc_ns, power_w) for t_us, power_w in samples]
        # a step of the wall clock in between would shift the stamps
        credible = [(t_ns, power_w) for t_ns, power_w in stamped if self._last_ns < t_ns <= now_ns]
        self._last_ns = max((t_ns for t_ns, _ in credible), default=self._last_ns)
        return credible


def _measured_periods_s(readings: _Readings) -> dict[_Key, float]:
    """Return the median time between changes of each value, over ten changes or as many as occur in two seconds.

    Values that changed fewer than three times are left out.
    """
    changes: dict[_Key, list[int]] = {key: [] for key in readings}
    values = {key: read() for key, read in readings.items()}
    end_ns = time.monotonic_ns() + round(MEASURE_S * 1e9)
    while time.monotonic_ns() < end_ns and any(len(times) <= PERIODS_MEASURED for times in changes.values()):
        time.sleep(POLL_S)
        for key, read in readings.items():
            before, values[key] = values[key], read()
            if values[key] != before:
                changes[key].append(time.monotonic_ns())
    return {key: _median_gap(times) / 1e9 for key, times in changes.items() if len(times) > 2}


def _median_gap(times: Sequence[int]) -> float:
    return median(late - early for early, late in pairwise(times))


class _EnergyCounter:
    """The changes of the energy counter, stamped by a separate thread when they occur.

    At the sampler's ticks, a change would be seen up to a period late, which at 10 Hz is 20 % of a 0.5 s window. The
    thread sleeps until shortly before a change is due and then polls at 2 kHz until it occurs.
    """

    def __init__(self, read_j: Callable[[], float], period_s: float) -> None:
        self._read_j = read_j
        self._period_ns = round(period_s * 1e9)
        self._thread: threading.Thread | None = None
        self._changes: deque[tuple[int, float]] = deque()
        self._failure: Exception | None = None

    def changes(self) -> list[tuple[int, float]]:
        """Return the changes since the last call as (stamp, J); the first call returns the current value.

        Raises the reading's error, or TimeoutError if the counter has not changed for two seconds.
        """
        if self._thread is None:
            self._follow_from(*_reading(self._read_j)[0])
        # changes that precede a failure are returned before the failure is raised
        if self._changes:
            return [self._changes.popleft() for _ in range(len(self._changes))]
        if self._failure:
            raise self._failure.with_traceback(None)
        idle_ns = time.monotonic_ns() - self._changed_ns
        if idle_ns > STALE_NS:
            raise TimeoutError(f"no change for {idle_ns / 1e9:.1f} s")
        return []

    def _follow_from(self, t_ns: int, energy_j: float) -> None:
        self._changes.append((t_ns, energy_j))
        self._changed_ns, self._unchanged_ns, self._energy_j = t_ns, t_ns, energy_j
        # it is unknown how old this value is within its period
        self._due_ns = t_ns
        self._thread = threading.Thread(target=self._follow, name="nvml energy counter", daemon=True)
        self._thread.start()

    def _follow(self) -> None:
        while True:
            time.sleep(max(0, self._due_ns - LEAD_NS - time.monotonic_ns()) / 1e9)
            try:
                self._await_change()
                self._failure = None
            except Exception as error:  # the next call of `changes` raises it
                self._failure = error
                time.sleep(self._period_ns / 1e9)

    def _await_change(self) -> None:
        while True:
            begin_ns, energy_j = time.monotonic_ns(), self._read_j()
            now_ns = time.monotonic_ns()
            if energy_j != self._energy_j:
                break
            self._unchanged_ns = begin_ns
            overdue = now_ns > self._due_ns + 2 * self._period_ns
            time.sleep(self._period_ns / 1e10 if overdue else POLL_S)
        self._energy_j = energy_j
        self._changed_ns = self._stamp_ns(now_ns)
        self._due_ns = self._changed_ns + self._period_ns
        self._changes.append((self._changed_ns, energy_j))

    def _stamp_ns(self, now_ns: int) -> int:
        """Return the time of the change just seen: when it was due, clamped to between the two readings around it."""
        periods = max(1, (now_ns - self._changed_ns) // self._period_ns)
        return min(max(self._changed_ns + periods * self._period_ns, self._unchanged_ns), now_ns)


class Gpm:
    """Yields performance counters (Hopper and newer) for the time since the last reading, in percent.

    Five times per second, it yields `gpm_sm_occupancy_percent` (of the maximum number of warps),
    `gpm_sm_utilization_percent`, `gpm_tensor_percent` and, by number format, `gpm_hmma_tensor_percent` and
    `gpm_imma_tensor_percent`, `gpm_dram_bandwidth_percent` and `gpm_graphics_utilization_percent`.
    """

    name = "gpm"

    def __init__(self, device: str | Path = "cuda") -> None:
        self._device = check(str(device))

    def unavailable(self) -> str | None:
        """Return None after one reading of every available counter, else why no counter is available."""
        try:
            self._gpu = gpu = _Gpu(self._device)
        except NotAvailable as error:
            return str(error)
        try:
            if not gpu.nvml.nvmlGpmQueryDeviceSupport(gpu.handle).isSupportedDevice:
                return f"{gpu.uuid} has no GPM counters (Hopper and newer only)"
            self._begin(gpu)
        except gpu.error as error:
            return f"{gpu.uuid} does not report GPM counters: {error}"
        return None

    def _begin(self, gpu: _Gpu) -> None:
        nvml = gpu.nvml
        self._query = nvml.c_nvmlGpmMetricsGet_t(
            version=nvml.NVML_GPM_METRICS_GET_VERSION, numMetrics=len(_GPM_METRICS)
        )
        for metric, number in zip(self._query.metrics, _GPM_METRICS, strict=False):
            metric.metricId = number
        self._older, self._newer = nvml.nvmlGpmSampleAlloc(), nvml.nvmlGpmSampleAlloc()
        nvml.nvmlGpmSampleGet(gpu.handle, self._newer)
        time.sleep(GPM_FIRST_S)
        self._claimed = {name for name, code, _ in self._count() if not code}
        self._due_ns = time.monotonic_ns() + GPM_INTERVAL_NS

    def _count(self) -> list[tuple[str, int, float]]:
        """Return the name, NVML return code and percentage of each counter since the last reading."""
        nvml = self._gpu.nvml
        nvml.nvmlGpmSampleGet(self._gpu.handle, self._older)
        self._older, self._newer = self._newer, self._older
        self._query.sample1, self._query.sample2 = self._older, self._newer
        nvml.nvmlGpmMetricsGet(self._query)
        metrics = self._query.metrics[: len(_GPM_METRICS)]
        return [(_GPM_METRICS[metric.metricId], metric.nvmlReturn, metric.value) for metric in metrics]

    def sample(self) -> Iterator[Sample]:
        """Yield the counters, or nothing if called again too soon; then raise OSError listing those that failed."""
        now_ns = time.monotonic_ns()
        if now_ns < self._due_ns:
            return
        self._due_ns = now_ns + GPM_INTERVAL_NS
        try:
            counts = [count for count in self._count() if count[0] in self._claimed]
        except self._gpu.error as error:
            raise OSError(f"GPM: {error}") from error
        yield from (Sample(now_ns, name, percent, self.name) for name, code, percent in counts if not code)
        failures = [f"{name}: {self._gpu.nvml.NVMLError(code)}" for name, code, _ in counts if code]
        if failures:
            raise OSError("; ".join(failures))
