"""Times several ways to compute one thing against each other: interleaved in one process, as ratios to one of them."""

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
class Paired:
    """What one contender took: its median time of a call, and its time over another's with a 95 % interval.

    Where that other one did not run to the end there is no ratio.
    """

    name: str
    median_ms: float
    ratio: float | None
    interval: Interval | None
    rounds: int


@dataclass(frozen=True)
class Dropped:
    """A contender that raised on its way, and what."""

    name: str
    reason: str


@dataclass
class _Runner:
    """A contender on its way: how many calls a visit has, the seconds of one in each, why it left if it did.

    `call` makes `in_one` of them at once; the calls of a visit are those of `call`.
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
        """Note what it raises: one that runs out of memory costs nobody else's times."""
        try:
            yield
        except Exception as error:  # whatever a runtime raises
            self.reason = in_a_line(error)

    def warm_up(self, limit_s: float) -> None:
        """Find out how many calls fill a visit; who needs more than `limit_s` for the fewest rounds leaves."""
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
        """Return the seconds of a call in each round, from its visit on the way forth and that on the way back."""
        return [(forth + back) / 2 for forth, back in zip(self.visits[::2], self.visits[1::2], strict=True)]


def in_a_line(error: Exception) -> str:
    """Return in a line that a contender failed, and of what."""
    words = (str(error).strip() or "no message").splitlines()[0]
    return f"failed: {type(error).__name__}: {words}"


def race(
    contenders: Sequence[tuple[str, Callable[[], object], int]],
    device: torch.device,
    seconds: float,
    against: str,
    limit_s: float = math.inf,
) -> list[Paired | Dropped]:
    """Return what became of each contender, in their order; ratios are times over those of the one named `against`.

    A contender is a name, a call, and how many times that computes the answer: its time is of one of them.

    A round visits all of them forth and back (ABC CBA), so that a drift of the machine meets each alike, in an order
    drawn anew each time: in a fixed one, noise that lasts would favour someone. A visit is as many calls as take about
    ten milliseconds, after one that does not count. Rounds go on for `seconds`, at least five, and who would need more
    than `limit_s` for these does not race.
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
            if runner.reason is None:  # it may have left on the way forth
                runner.visit()
    first = next((runner.rounds() for runner in running if runner.name == against), None)
    return [_result(runner, first) for runner in runners]


def visit(call: Callable[[], object], calls: int, device: torch.device) -> float:
    """Return the seconds that one of `calls` calls in a row takes, the device's work included.

    Whose turn was before does not matter: its threads, which spin for a while, have gone to sleep, and what it took of
    the caches is taken back.
    """
    time.sleep(REST_S)
    call()
    wait_for(device)
    start = time.perf_counter()
    for _ in range(calls):
        call()
    wait_for(device)
    return (time.perf_counter() - start) / calls


def _result(runner: _Runner, first: Sequence[float] | None) -> Paired | Dropped:
    if runner.reason is not None:
        return Dropped(runner.name, runner.reason)
    spent = runner.rounds()
    ratio, interval = (None, None) if first is None else _compared(spent, first)
    return Paired(runner.name, 1e3 * statistics.median(spent), ratio, interval, len(spent))


def _compared(spent: Sequence[float], first: Sequence[float]) -> tuple[float, Interval | None]:
    logs = [math.log(mine / theirs) for mine, theirs in zip(spent, first, strict=True)]
    interval = mean_interval(logs)
    spread = Interval(math.exp(interval.low), math.exp(interval.high)) if interval else None
    return math.exp(statistics.fmean(logs)), spread
