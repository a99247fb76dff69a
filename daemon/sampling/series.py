"""Stores the sampler process's samples by series, and cuts them to a window."""

from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from itertools import pairwise

from benchd.daemon.records import Sample, SamplerReport, Summary, Window
from benchd.daemon.sampling.sources.protocol import Batch, PowerSource
from benchd.daemon.verdicts.statistics import percentile


class Samples:
    """The samples of the named samplers, read every `period_s`; each takes 16 bytes."""

    def __init__(self, names: Sequence[str], period_s: float) -> None:
        self._names = list(names)
        self._period_s = period_s
        self._series: dict[tuple[str, str, str], _Series] = {}
        self._ticks_ns = array("q")
        self._cpu: list[tuple[int, float]] = []  # (when, CPU time of the sampler process so far)
        self._failures: list[tuple[Window, dict[str, str]]] = []
        self.power: list[PowerSource] = []

    def add(self, batch: Batch) -> None:
        """Add a batch; batches must be added in order of time."""
        for sample in batch.samples:
            key = (sample.metric, sample.rail, sample.source)
            self._series.setdefault(key, _Series()).add(sample)
        if batch.failures:
            begin_ns = self._cpu[-1][0] if self._cpu else batch.t_ns
            self._failures.append((Window(begin_ns, batch.t_ns), batch.failures))
        self._ticks_ns.extend(batch.ticks_ns)
        self.power = batch.power or self.power
        self._cpu.append((batch.t_ns, batch.cpu_s))

    def fail(self, span: Window, failures: dict[str, str]) -> None:
        """Record failures during `span`, by source."""
        self._failures.append((span, failures))

    def begin_process(self) -> None:
        """Expect batches from a new process, whose CPU time starts at 0."""
        self._cpu.clear()

    def last_tick_ns(self) -> int | None:
        """Return when the last reading began."""
        return self._ticks_ns[-1] if self._ticks_ns else None

    def drop_before(self, t_ns: int) -> None:
        """Drop older samples."""
        for series in self._series.values():
            series.drop_before(t_ns)
        self._series = {key: series for key, series in self._series.items() if series.times_ns}
        del self._ticks_ns[: bisect_left(self._ticks_ns, t_ns)]
        # The last entry before `t_ns` stays, because CPU time is interpolated between two entries.
        del self._cpu[: max(0, bisect_left(self._cpu, (t_ns, 0.0)) - 1)]
        self._failures = [entry for entry in self._failures if entry[0].end_ns >= t_ns]

    def latest(self) -> list[Sample]:
        """Return the last sample of each series."""
        return [
            Sample(series.times_ns[-1], metric, series.last, source, rail)
            for (metric, rail, source), series in self._series.items()
        ]

    def cut(self, window: Window) -> tuple[dict[str, Summary], SamplerReport]:
        """Return summaries of the samples in the window, by `metric` or `metric@rail`, and a report on the sampling.

        If two samplers yield the same metric for the same rail, the one listed first is used.
        """
        summaries: dict[str, Summary] = {}
        for (metric, rail, source), series in sorted(self._series.items(), key=self._place):
            summary = series.summary(window, source)
            if summary:
                summaries.setdefault(f"{metric}@{rail}" if rail else metric, summary)
        return summaries, self._report(window)

    def _place(self, entry: "tuple[tuple[str, str, str], _Series]") -> int:
        (_, _, source), _ = entry
        return self._names.index(source)

    def raw(self, window: Window) -> list[Sample]:
        """Return the samples of the window, series by series."""
        return [
            Sample(t_ns, metric, value, source, rail)
            for (metric, rail, source), series in self._series.items()
            for t_ns, value in series.points(window)
        ]

    def _report(self, window: Window) -> SamplerReport:
        failures: dict[str, str] = {}
        for span, reasons in self._failures:
            if span.start_ns <= window.end_ns and span.end_ns >= window.start_ns:
                failures = reasons | failures
        return SamplerReport(
            sources=self._names,
            cpu_s=self._cpu_s(window.end_ns) - self._cpu_s(window.start_ns),
            period_s=self._period_s,
            period_p99_error=self._period_error(window),
            samples=sum(len(series.within(window)) for series in self._series.values()),
            failures=failures,
        )

    def _cpu_s(self, t_ns: int) -> float:
        """Return the sampler's CPU time at `t_ns`, interpolated between the batches around it."""
        if not self._cpu:
            return 0.0
        after = bisect_left(self._cpu, (t_ns, 0.0))
        if after in (0, len(self._cpu)):
            return self._cpu[min(after, len(self._cpu) - 1)][1]
        (t0, cpu0), (t1, cpu1) = self._cpu[after - 1 : after + 1]
        return cpu0 + (cpu1 - cpu0) * (t_ns - t0) / (t1 - t0)

    def _period_error(self, window: Window) -> float | None:
        """Return the 99th percentile of the reading intervals' deviation from the period, as a share of the period."""
        ticks, period_ns = self._ticks_ns[_inside(self._ticks_ns, window)], self._period_s * 1e9
        errors = sorted(abs(late - early - period_ns) / period_ns for early, late in pairwise(ticks))
        return percentile(errors, 99) if errors else None


class _Series:
    """The samples of one metric, rail and source, in order of time."""

    def __init__(self) -> None:
        self.times_ns = array("q")
        self._values = array("d")

    @property
    def last(self) -> float:
        return self._values[-1]

    def add(self, sample: Sample) -> None:
        self.times_ns.append(sample.t_ns)
        self._values.append(sample.value)

    def drop_before(self, t_ns: int) -> None:
        first = bisect_left(self.times_ns, t_ns)
        del self.times_ns[:first], self._values[:first]

    def within(self, window: Window) -> "array[float]":
        return self._values[_inside(self.times_ns, window)]

    def points(self, window: Window) -> Iterator[tuple[int, float]]:
        return zip(self.times_ns[_inside(self.times_ns, window)], self.within(window), strict=True)

    def summary(self, window: Window, source: str) -> Summary | None:
        values = self.within(window)
        if not values:
            return None
        return Summary(min(values), sum(values) / len(values), max(values), len(values), source)


def _inside(times_ns: "array[int]", window: Window) -> slice:
    return slice(bisect_left(times_ns, window.start_ns), bisect_right(times_ns, window.end_ns))
