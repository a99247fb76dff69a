"""A neighbour's loop: frames at a fixed rate alongside another process, until SIGTERM."""

import math
import select
import signal
from array import array
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from benchd.daemon.machine.signals import on_signals
from benchd.daemon.worker.scenarios.periodic import frames
from benchd.daemon.worker.steps import Step

IsOver = Callable[[float], bool]


@contextmanager
def until_sigterm() -> Iterator[IsOver]:
    """Yield a function that waits up to that many seconds for SIGTERM and returns whether it has arrived.

    A handler that sets an Event may wait for a lock that is held by the interrupted code; a byte on a socket needs no
    lock.
    """
    with on_signals([signal.SIGTERM], lambda *_: None) as (ended, _):
        yield lambda seconds: bool(select.select([ended], [], [], seconds)[0])


def accompany(step: Step, rate_hz: float, is_over: IsOver) -> "dict[str, array[int]]":
    """Run frames at a rate until `is_over`; return each frame's release time and its latency since then, in ns."""
    released_ns, latency_ns = array("q"), array("q")
    for release_ns, taken_ns in frames(step, 1e9 / rate_hz, math.inf, is_over):
        released_ns.append(release_ns)
        latency_ns.append(taken_ns)
    return {"released": released_ns, "latency": latency_ns}
