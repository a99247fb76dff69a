"""Measures the speed without a profiler: a whole step, its separate passes, and the torch profiler's cost."""

import time
from collections.abc import Callable, Sequence
from statistics import median

from torch.profiler import profile

from benchd.daemon.profiling.profile import BenchmarkProfile, Distribution
from benchd.daemon.verdicts import statistics
from benchd.daemon.verdicts.statistics import Interval
from benchd.daemon.worker.measure import no_collection
from benchd.daemon.worker.profiling.torch_profiler import activities, module_ranges
from benchd.daemon.worker.profiling.work import Work

LEAST_S = 1.0  # minimum measured time per figure, in addition to the job's minimum number of runs
BLOCKS = 10


def run(work: Work) -> BenchmarkProfile:
    """Time steps, then the passes, then the step without and with the profiler."""
    for _ in range(work.job.warm_up):
        work.step()
    (steps,) = _by_turns(work, [work.step])
    passes = [work.forward, work.backward] if work.backward else [work.forward]
    forward, *backward = _by_turns(work, passes)
    return BenchmarkProfile(
        step=_distribution(steps),
        throughput_per_s=work.job.case.batch_size * len(steps) / sum(steps) * 1e9,
        forward=_distribution(forward),
        backward=_distribution(backward[0]) if backward else None,
        overhead=_overhead(work),
    )


def _by_turns(work: Work, calls: Sequence[Callable[[], object]]) -> list[list[int]]:
    """Return the nanoseconds of each call's runs; the calls alternate, and each ends when the device is done."""
    values: list[list[int]] = [[] for _ in calls]
    until = time.monotonic() + LEAST_S
    with no_collection():
        while len(values[0]) < work.job.runs or time.monotonic() < until:
            for call, column in zip(calls, values, strict=True):
                column.append(work.timed(call))
    return values


def _distribution(values_ns: Sequence[int]) -> Distribution:
    """Return the median of successive blocks with its interval or, without one, the range of the values."""
    size = max(1, len(values_ns) // BLOCKS)
    medians = [float(median(values_ns[i : i + size])) for i in range(0, len(values_ns) - size + 1, size)]
    # on logarithms, so that the interval of a few noisy blocks cannot extend below zero
    centre_ns, interval = statistics.on_logarithms(medians) if len(medians) > 1 else (medians[0], None)
    interval = interval or Interval(min(values_ns), max(values_ns))
    return Distribution(
        median_ns=centre_ns,
        low_ns=interval.low,
        high_ns=interval.high,
        mean_ns=sum(values_ns) / len(values_ns),
        min_ns=min(values_ns),
        max_ns=max(values_ns),
        runs=len(values_ns),
    )


def _overhead(work: Work) -> float:
    """Return the cost of recording as a share of a step, without starting and reading the profiler.

    All plain steps come first: on a GPU, the profiler's library stays attached and slows later launches. The fastest
    steps are compared, because a neighbour that slows the medians of the two loops slows them by different amounts.
    """
    plain = [work.timed(work.step) for _ in range(work.job.runs)]
    recorded = []
    for _ in range(work.job.runs):
        with (
            module_ranges([work.module, work.loss]),
            profile(activities=activities(work.device.type), record_shapes=True, acc_events=True),
        ):
            recorded.append(work.timed(work.step))
    return min(recorded) / min(plain) - 1
