"""Wake-up: one run after each of several idle gaps."""

import time
from array import array

from benchd.daemon.worker.scenarios import base
from benchd.daemon.worker.scenarios.base import Run, Scenario
from benchd.daemon.worker.steps import Step
from benchd.daemon.worker.streams import Streams

GAPS_MS = (1000, 100, 10, 0)
"""The statistics are those of the first gap."""

GAP_ROUNDS = 30


class WakeUp(Scenario):
    """Runs rounds over all gaps, each gap as a part."""

    is_paused = True
    is_inference = False

    def measure(self, run: Run, streams: Streams) -> None:
        """Time the runs and record them."""
        start_ns = time.monotonic_ns()
        base.end_paused(run, start_ns, wake_up(streams.steps[0], run.job.limits.rule.cap_s))


SCENARIO = WakeUp()


def wake_up(step: Step, cap_s: float) -> "dict[str, array[int]]":
    """Run once after each idle gap, in 30 rounds over all gaps, or fewer if `cap_s` is over; return ns by gap."""
    values: dict[str, array[int]] = {f"gap_{gap_ms}_ms": array("q") for gap_ms in GAPS_MS}
    end, done = time.monotonic() + cap_s, 0
    while done < GAP_ROUNDS and (not done or time.monotonic() < end):
        for gap_ms, column in zip(GAPS_MS, values.values(), strict=True):
            time.sleep(gap_ms / 1e3)
            column.append(step(done)[0])
        done += 1
    return values
