"""Times several ways to compute the same thing, interleaved in one process, as ratios to one of them."""

import math
import random
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch

from benchd.daemon.verdicts.statistics import Interval, mean_interval
from benchd.daemon.worker.steps import wait_for

VISIT_S = 0.01
REST_S = 0.005
FEWEST_ROUNDS = 5


@dataclass(frozen=True)
class PairedTiming:
    """A contender's median time per call, and its time divided by that of the reference with a 95 % interval.

    There is no ratio if the reference did not finish.
    """

    name: str
    median_ms: float
    ratio: float | None
    interval: Interval | None
    rounds: int


@dataclass(frozen=True)
class DroppedContender:
    """A contender that dropped out, and the error that it raised."""

    name: str
    reason: str


@dataclass
class _Runner:
    """A contender during the race: its calls per visit, the seconds per call of each visit, and why it dropped out.

    `call` computes the answer `in_one` times; a visit's calls are calls of `call`.
    """

    name: str
    call: Callable[[], object]
    device: torch.device
    in_one: int
    calls: int = 1
    visits: list[float] = field(default_factory=list)
    reason: str | None = None

    @contextmanager
    def leaves_alone(self) -> Iterator[None]:
        """Store an error raised in the block, so that a contender that runs out of memory does not end the race."""
        try:
            yield
        except Exception as error:  # a runtime may raise anything
            self.reason = in_a_line(error)

    def warm_up(self, limit_s: float) -> None:
        """Determine how many calls fill a visit; drop out if the minimum number of rounds takes more than `limit_s`."""
        with self.leaves_alone():
            first = visit(self.call, 1, self.device)
            once = first if first > limit_s else min(visit(self.call, 1, self.device) for _ in range(3))
            self.calls = max(1, math.ceil(VISIT_S / once))
            if 2 * FEWEST_ROUNDS * (1 + self.calls) * once > limit_s:
                raise TimeoutError(f"a call takes {once:.3g} s, too long to race in {limit_s:g} s")

    def visit(self) -> None:
        """Take its turn."""
        with self.leaves_alone():
            self.visits.append(visit(self.call, self.calls, self.device) / self.in_one)

    def rounds(self) -> list[float]:
        """Return the seconds per call in each round, the mean of its two visits."""
        return [(forth + back) / 2 for forth, back in zip(self.visits[::2], self.visits[1::2], strict=True)]


def in_a_line(error: Exception) -> str:
    """Return one line that says that a contender failed, and why."""
    words = (str(error).strip() or "no message").splitlines()[0]
    return f"failed: {type(error).__name__}: {words}"


def race(
    contenders: Sequence[tuple[str, Callable[[], object], int]],
    device: torch.device,
    seconds: float,
    against: str,
    limit_s: float = math.inf,
) -> list[PairedTiming | DroppedContender]:
    """Return each contender's result, in their order; ratios are times divided by those of the one named `against`.

    A contender is a name, a call, and how many times that call computes the answer; times are for one answer.

    A round visits all of them forwards and backwards (ABC CBA), so that the machine's drift affects all equally, in a
    new random order each time, because in a fixed order lasting noise would favour some. A visit makes as many calls as
    take about ten milliseconds, after one that is not counted. There are at least five rounds, continuing for
    `seconds`; a contender that would need more than `limit_s` for five does not race.
    """
    runners = [_Runner(name, call, device, calls) for name, call, calls in contenders]
    for runner in runners:
        runner.warm_up(limit_s)
    end = time.perf_counter() + seconds
    while running := [runner for runner in runners if runner.reason is None]:
        if len(running[0].visits) >= 2 * FEWEST_ROUNDS and time.perf_counter() >= end:
            break
        order = random.sample(running, len(running))
        for runner in [*order, *reversed(order)]:
            if runner.reason is None:  # it may have dropped out in the first half of the round
                runner.visit()
    first = next((runner.rounds() for runner in running if runner.name == against), None)
    return [_result(runner, first) for runner in runners]


def visit(call: Callable[[], object], calls: int, device: torch.device) -> float:
    """Return the seconds per call of `calls` calls in a row, including the device's work.

    The previous contender has no influence: its threads, which spin for a while, have gone to sleep, and the first call
    refills the caches.
    """
    time.sleep(REST_S)
    call()
    wait_for(device)
    start = time.perf_counter()
    for _ in range(calls):
        call()
    wait_for(device)
    return (time.perf_counter() - start) / calls


def _result(runner: _Runner, first: Sequence[float] | None) -> PairedTiming | DroppedContender:
    if runner.reason is not None:
        return DroppedContender(runner.name, runner.reason)
    spent = runner.rounds()
    ratio, interval = (None, None) if first is None else _compared(spent, first)
    return PairedTiming(runner.name, 1e3 * statistics.median(spent), ratio, interval, len(spent))


def _compared(spent: Sequence[float], first: Sequence[float]) -> tuple[float, Interval | None]:
    logs = [math.log(mine / theirs) for mine, theirs in zip(spent, first, strict=True)]
    interval = mean_interval(logs)
    spread = Interval(math.exp(interval.low), math.exp(interval.high)) if interval else None
    return math.exp(statistics.fmean(logs)), spread
