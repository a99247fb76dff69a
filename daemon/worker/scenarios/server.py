"""The server: requests arrive as a Poisson process, wait in a bounded queue and are answered, or dropped.

The queue is given the time instead of reading it, and the loop reads a given clock, so that simulations can run the
same code.
"""

import math
import random
import time
from array import array
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain, pairwise
from statistics import median
from threading import Lock
from typing import Any, TypeVar

from benchd.daemon.errors import BenchdError
from benchd.daemon.records import Load, Requests, Trial, Window
from benchd.daemon.verdicts import statistics, timings
from benchd.daemon.verdicts.demand import CONFIRMATIONS, LEAST_SHARE, MOST_TRIALS, RATE_SHARE, TRIAL_SHARE
from benchd.daemon.worker import measure
from benchd.daemon.worker.scenarios import base
from benchd.daemon.worker.scenarios.base import Run, Scenario
from benchd.daemon.worker.steps import Step
from benchd.daemon.worker.streams import Streams

MOST_REQUESTS = 100_000
"""The largest number of requests in one run, unless its percentile needs more."""

BEAT_S = 10.0
CAPACITY_S, CAPACITY_MARGIN = 0.5, 1.1
LEAD_NS = 100_000_000  # time to fill the queue's tables before the first request arrives

T = TypeVar("T")


class Server(Scenario):
    """Requests that arrive at random; every stream answers one at a time."""

    is_paused = True
    is_inference = False

    def silent_s(self, run: Run) -> float:
        """Return about how long the requests take; a search for the highest rate may take several times as long."""
        load, cap_s = run.job.case.load, run.job.limits.rule.cap_s
        if load is None or load.rate_hz is None:
            return cap_s * (MOST_TRIALS * TRIAL_SHARE + 1)
        return request_count(load.rate_hz, cap_s, load.percentile) / load.rate_hz

    def measure(self, run: Run, streams: Streams) -> None:
        """Answer requests and record the latency and outcome of each."""
        job, process, load = run.job, run.outcome.process, run.job.case.load
        if load is None:
            raise ValueError("a server needs a load")
        seed = f"{job.case.seed} {job.raw_name.rpartition('.')[2]}"
        clock = Monotonic(run.stages.go_on)
        count, cap_s = len(streams.steps), job.limits.rule.cap_s
        with measure.no_collection():
            served, trials = serve_load(streams.together, load, cap_s, seed, clock, streams=count)
        process.window = Window(served.start_ns, served.end_ns)
        run.take_peaks()
        run.rest(settle_s=run.idle_s / 2)
        run.stages.leave()
        process.timing = timings.request_timing(served.asked_ns)
        of_streams = base.by_stream(served.of_stream_ns)
        run.record_values({"total": served.latency_ns, "service": served.service_ns, **of_streams})
        process.requests = Requests(
            rate_hz=served.rate_hz,
            asked=served.asked,
            answered=len(served.latency_ns) - len(served.late),
            late=len(served.late),
            dropped=len(served.dropped),
            met=is_met(served, load),
            arrivals_p=served.arrivals_p,
            noticed_ms=median(served.noticed_ns) / 1e6 if served.noticed_ns else None,
            busy_share=sum(served.service_ns) / (count * 1e9 * process.window.seconds),
            trials=trials,
        )


SCENARIO = Server()


class Monotonic:
    """CLOCK_MONOTONIC. Waits and also answers call `beat`, at most every BEAT_S: an overloaded server never waits."""

    def __init__(self, beat: Callable[[], None] = lambda: None) -> None:
        self._beat, self._beaten_s = beat, time.monotonic()

    def now_ns(self) -> int:
        """Return the time in ns."""
        return time.monotonic_ns()

    def wait_until(self, t_ns: int) -> None:
        """Return at this time, or immediately if it has passed."""
        while time.monotonic_ns() < t_ns:
            self.beat()
            time.sleep(min(BEAT_S, max(0, t_ns - time.monotonic_ns()) / 1e9))

    def beat(self) -> None:
        """Report that the run continues, unless that was just reported."""
        if time.monotonic() - self._beaten_s >= BEAT_S:
            self._beaten_s = time.monotonic()
            self._beat()


def arrivals(rate_hz: float, count: int, seed: str) -> "array[int]":
    """Return the times in ns of `count` arrivals of a Poisson process that starts at time 0."""
    draw, elapsed_s, arrivals_ns = random.Random(seed), 0.0, array("q")  # noqa: S311 - no secrets
    for _ in range(count):
        elapsed_s += draw.expovariate(rate_hz)
        arrivals_ns.append(round(1e9 * elapsed_s))
    return arrivals_ns


class Queue:
    """A bounded queue in front of one or several streams; requests are numbered in the order of their arrival.

    At most `bound` requests wait while every stream answers another. `asked` is the number of arrivals; `noticed_ns`
    contains the delay of each request for which an idle stream waited. With `most_late`, requests stop once more than
    that many are late or dropped, because the verdict is then known.
    """

    def __init__(
        self,
        arrived_ns: Sequence[int],
        bound: int,
        *,
        streams: int = 1,
        deadline_ns: float | None = None,
        most_late: int | None = None,
    ) -> None:
        self._arrived_ns, self._bound, self._idle = arrived_ns, bound, streams
        self._deadline_ns, self._most_late = deadline_ns, most_late
        self._waiting: deque[int] = deque()
        self._end = len(arrived_ns)
        self.asked = 0
        self.noticed_ns = array("q")
        self.dropped: list[int] = []
        self.late: list[int] = []
        self.started_ns = array("q", bytes(8 * len(arrived_ns)))
        self.ended_ns = array("q", bytes(8 * len(arrived_ns)))

    @property
    def next_ns(self) -> int | None:
        """Return when the next request arrives, None after the last one."""
        return self._arrived_ns[self.asked] if self.asked < self._end else None

    def start(self, now_ns: int) -> int | None:
        """Return the request that an idle stream begins to answer, None if none is waiting."""
        self._admit(now_ns, is_awaited=self._idle > 0 and not self._waiting)
        if not self._waiting:
            return None
        request = self._waiting.popleft()
        self._idle -= 1
        self.started_ns[request] = now_ns
        return request

    def finish(self, request: int, now_ns: int) -> None:
        """Record the answer to a request; raise BenchdError if that was not started or has already been answered."""
        self._admit(now_ns, is_awaited=False)
        if not self.started_ns[request] or self.ended_ns[request]:
            raise BenchdError(f"request {request} was counted twice")
        self.ended_ns[request] = now_ns
        self._idle += 1
        if self._deadline_ns is not None and now_ns - self._arrived_ns[request] > self._deadline_ns:
            self._missed(self.late, request)

    def close(self) -> None:
        """Stop admitting requests; those that are waiting will still be answered."""
        self._end = self.asked

    def _admit(self, now_ns: int, *, is_awaited: bool) -> None:
        """Admit the requests that have arrived by now; an idle stream may have been waiting for them."""
        while (arrived_ns := self.next_ns) is not None and arrived_ns <= now_ns:
            request = self.asked
            self.asked += 1
            if is_awaited:
                self.noticed_ns.append(now_ns - arrived_ns)
            if len(self._waiting) < self._bound + self._idle:
                self._waiting.append(request)
            else:
                self._missed(self.dropped, request)

    def _missed(self, kind: list[int], request: int) -> None:
        kind.append(request)
        if self._most_late is not None and len(self.late) + len(self.dropped) > self._most_late:
            self.close()


@dataclass(frozen=True)
class ServerRun:
    """A run of a server: the times, in ns, of each answered request; latency counts from its arrival.

    `asked_ns` contains the latency of every request, infinite if it was dropped. `arrived_ns` is for all requests;
    `late` and `dropped` list request numbers. `noticed_ns` contains the delays with which idle streams woke up for
    requests.
    """

    rate_hz: float
    latency_ns: "array[int]"
    asked_ns: Sequence[float]
    of_stream_ns: "Sequence[array[int]]"
    service_ns: "array[int]"
    arrived_ns: Sequence[int]
    noticed_ns: "array[int]"
    start_ns: int
    end_ns: int
    late: Sequence[int]
    dropped: Sequence[int]

    @property
    def asked(self) -> int:
        """Return how many requests arrived."""
        return len(self.arrived_ns)

    @property
    def misses(self) -> int:
        """Return how many requests missed the deadline."""
        return len(self.late) + len(self.dropped)

    @property
    def arrivals_p(self) -> float:
        """Return the p-value of a Kolmogorov-Smirnov test of the arrivals' gaps against those of a Poisson process."""
        gaps_ns = [after - before for before, after in pairwise([self.start_ns, *self.arrived_ns])]
        return statistics.exponential_p(gaps_ns, 1e9 / self.rate_hz)


Together = Callable[[Callable[[Step], T]], list[T]]
"""Runs a function on all streams at once, with each stream's step."""


def serve_load(
    together: "Together[Any]", load: Load, cap_s: float, seed: str, clock: Monotonic, *, streams: int = 1
) -> tuple[ServerRun, list[Trial]]:
    """Serve at the load's rate, or at the highest that meets its deadline, which is found first; also return trials.

    `cap_s` is the length of a run, unless the percentile needs a longer one, and ten times the length of a trial.
    Trials decide with 99 % confidence; a rate that the final run does not confirm is lowered by 2, 4, 8 and 16 %. If no
    trial met the deadline, the final run ends as soon as it is known to fail.
    """

    def served(rate_hz: float, seconds: float, *, is_trial: bool, is_hopeless: bool = False) -> ServerRun:
        count = request_count(rate_hz, seconds, load.percentile)
        most_late = statistics.most_misses(count, load.percentile) if is_trial else None
        if is_hopeless:  # at a 64th of the capacity, a complete run would take half an hour
            most_late = statistics.failing_misses(count, load.percentile) - 1
        # a final run draws new arrivals, because those of a trial were selected by its success
        drawn = f"{seed} {rate_hz} {'trial' if is_trial else 'final'}"
        return serve(together, load, rate_hz, count, drawn, clock, streams=streams, most_late=most_late)

    if load.rate_hz is not None:
        return served(load.rate_hz, cap_s, is_trial=False), []
    rate_hz, trials = highest_rate(
        lambda rate_hz: is_met(served(rate_hz, TRIAL_SHARE * cap_s, is_trial=True), load) is True,
        CAPACITY_MARGIN * capacity_hz(together),
    )
    is_hopeless = rate_hz is None
    rate_hz = rate_hz or trials[-1].rate_hz
    for failed in range(CONFIRMATIONS):
        final = served(rate_hz, cap_s, is_trial=False, is_hopeless=is_hopeless)
        trials.append(Trial(rate_hz, is_met(final, load) is True))
        if trials[-1].met or is_hopeless:
            break
        rate_hz *= 1 - RATE_SHARE * 2**failed
    return final, trials


def is_met(served: ServerRun, load: Load) -> bool | None:
    """Return whether the deadline is met at the load's percentile; None without a deadline or if it is unknown."""
    met = statistics.deadline_is_met(served.misses, served.asked, load.percentile)
    return None if load.deadline_ms is None else met


def capacity_hz(together: "Together[Any]") -> float:
    """Return how many requests per second are answered by back-to-back runs on all streams."""

    def rate_hz(step: Step) -> float:
        start, runs = time.monotonic(), 0
        while runs < 2 or time.monotonic() - start < CAPACITY_S:
            step(runs)
            runs += 1
        return runs / (time.monotonic() - start)

    rates_hz: list[float] = together(rate_hz)
    return sum(rates_hz)


def serve(
    together: "Together[Any]",
    load: Load,
    rate_hz: float,
    count: int,
    seed: str,
    clock: Monotonic,
    *,
    streams: int = 1,
    most_late: int | None = None,
) -> ServerRun:
    """Send `count` requests at a rate and answer them on all streams; raise BenchdError if one is lost or repeated."""
    drawn = arrivals(rate_hz, count, seed)
    start_ns = clock.now_ns() + LEAD_NS
    arrived_ns = array("q", (start_ns + after_ns for after_ns in drawn))
    deadline_ns = None if load.deadline_ms is None else 1e6 * load.deadline_ms
    queue = Queue(arrived_ns, load.queue, streams=streams, deadline_ns=deadline_ns, most_late=most_late)
    # the idle stream that waits for the next arrival has locked `turn`, for which the others queue
    turn, state = Lock(), Lock()

    def answer(step: Step) -> list[int]:
        answered = []
        try:
            while (request := _next(queue, clock, turn, state)) is not None:
                step(request)
                with state:
                    queue.finish(request, clock.now_ns())
                    clock.beat()
                answered.append(request)
        finally:  # so that the other streams also end after an error
            with state:
                queue.close()
        return answered

    return _served(queue, rate_hz, arrived_ns, start_ns, together(answer))


def _next(queue: Queue, clock: Monotonic, turn: Lock, state: Lock) -> int | None:
    """Wait for the request that this stream answers next; return None after the last one."""
    with turn:
        while True:
            with state:
                request, next_ns = queue.start(clock.now_ns()), queue.next_ns
            if request is not None or next_ns is None:
                return request
            clock.wait_until(next_ns)


def _served(
    queue: Queue, rate_hz: float, arrived_ns: Sequence[int], start_ns: int, by_stream: Sequence[Sequence[int]]
) -> ServerRun:
    """Return the times of each request; raise BenchdError unless each was answered by one stream, or dropped."""
    answered = sorted(chain.from_iterable(by_stream))
    if sorted([*answered, *queue.dropped]) != list(range(queue.asked)):
        raise BenchdError(f"{len(answered)} of {queue.asked} requests were answered, {len(queue.dropped)} dropped")
    latency_ns = {request: queue.ended_ns[request] - arrived_ns[request] for request in answered}
    return ServerRun(
        rate_hz=rate_hz,
        latency_ns=array("q", latency_ns.values()),
        asked_ns=[latency_ns.get(request, math.inf) for request in range(queue.asked)],
        of_stream_ns=[array("q", (latency_ns[request] for request in its)) for its in by_stream],
        service_ns=array("q", (queue.ended_ns[request] - queue.started_ns[request] for request in answered)),
        arrived_ns=arrived_ns[: queue.asked],
        noticed_ns=queue.noticed_ns,
        start_ns=start_ns,
        end_ns=max(queue.ended_ns),
        late=queue.late,
        dropped=queue.dropped,
    )


def request_count(rate_hz: float, seconds: float, percentile: float) -> int:
    """Return the number of requests in a run of `seconds`, or the minimum number for the percentile."""
    least = statistics.minimum_samples(percentile)
    return max(least, min(int(rate_hz * seconds), MOST_REQUESTS))


def highest_rate(meets: Callable[[float], bool], most_hz: float) -> tuple[float | None, list[Trial]]:
    """Bisect for the highest rate below `most_hz` that meets the deadline; return it, or None, and the trials.

    The search ends when the rate is known to within RATE_SHARE, or with None below LEAST_SHARE of `most_hz`.
    """
    low_hz, high_hz = 0.0, most_hz
    trials: list[Trial] = []
    while high_hz - low_hz > RATE_SHARE * high_hz and high_hz > LEAST_SHARE * most_hz:
        rate_hz = (low_hz + high_hz) / 2
        trials.append(Trial(rate_hz, meets(rate_hz)))
        low_hz, high_hz = (rate_hz, high_hz) if trials[-1].met else (low_hz, rate_hz)
    return low_hz or None, trials
