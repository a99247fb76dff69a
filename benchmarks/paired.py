"""Times several ways to compute one thing against each other: interleaved in one process, as ratios to the first."""

import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from benchd.daemon.statistics import Interval, mean_interval

VISIT_S = 0.01
REST_S = 0.005
FEWEST_ROUNDS = 5


@dataclass(frozen=True)
class Paired:
    """What one contender took: its median time of a call, and its time over the first one's with a 95 % interval."""

    name: str
    median_ms: float
    ratio: float
    interval: Interval | None
    rounds: int


def race(contenders: Sequence[tuple[str, Callable[[], object]]], device: torch.device, seconds: float) -> list[Paired]:
    """Return one Paired a contender, in their order; the first is what the others are compared with.

    A round visits all of them forth and back (ABC CBA), so that a drift of the machine meets each alike. A visit is as
    many calls as take about ten milliseconds, after one that does not count. Rounds go on for `seconds`, at least five.
    """
    calls = [_calls_a_visit(call, device) for _, call in contenders]
    visits: list[list[float]] = [[] for _ in contenders]
    end = time.perf_counter() + seconds
    while len(visits[0]) < FEWEST_ROUNDS or time.perf_counter() < end:
        for place, spent in enumerate(_round(contenders, calls, device)):
            visits[place].append(spent)
    return [_compared(name, spent, visits[0]) for (name, _), spent in zip(contenders, visits, strict=True)]


def _calls_a_visit(call: Callable[[], object], device: torch.device) -> int:
    """Warm up and return how many calls fill a visit."""
    _visit(call, 1, device)
    once = min(_visit(call, 1, device) for _ in range(3))
    return max(1, math.ceil(VISIT_S / once))


def _round(
    contenders: Sequence[tuple[str, Callable[[], object]]], calls: Sequence[int], device: torch.device
) -> list[float]:
    """Return the seconds of one call of each, from a visit on the way forth and one on the way back."""
    spent = [0.0] * len(contenders)
    order = list(range(len(contenders)))
    for place in [*order, *reversed(order)]:
        spent[place] += _visit(contenders[place][1], calls[place], device) / 2
    return spent


def _visit(call: Callable[[], object], calls: int, device: torch.device) -> float:
    """Return the seconds that one of `calls` calls in a row takes, the device's work included.

    Whose turn was before does not matter: its threads, which spin for a while, have gone to sleep, and what it took of
    the caches is taken back.
    """
    time.sleep(REST_S)
    call()
    _finish(device)
    start = time.perf_counter()
    for _ in range(calls):
        call()
    _finish(device)
    return (time.perf_counter() - start) / calls


def _finish(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _compared(name: str, spent: Sequence[float], first: Sequence[float]) -> Paired:
    logs = [math.log(mine / theirs) for mine, theirs in zip(spent, first, strict=True)]
    interval = mean_interval(logs)
    return Paired(
        name=name,
        median_ms=1e3 * statistics.median(spent),
        ratio=math.exp(statistics.fmean(logs)),
        interval=Interval(math.exp(interval.low), math.exp(interval.high)) if interval else None,
        rounds=len(spent),
    )
