"""What a timed run may hide: answers that are not those of the check, and answers that were kept."""

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from benchd.daemon.records import Check
from benchd.daemon.worker import steps
from benchd.daemon.worker.backends import Loaded

REPEATED_SHARE = 0.05
FEWEST_PAIRS, MOST_PAIRS = 7, 20
PAIRS_S = 2.0  # no more pairs than fit this, beyond the fewest
LAG = 4
FRESH_BYTES = 64 * 2**20


@dataclass(frozen=True)
class Expected:
    """What float64 answers to the first inputs of the pool, (N, ...), and by how much an answer may be off."""

    outputs: NDArray[np.float64]
    allowed: float

    def batches(self, batch_size: int) -> int:
        """Return how many batches of the pool these answers cover."""
        return len(self.outputs) // batch_size


def allowed(check: Check, error_share: float, outputs: NDArray[np.float64]) -> float:
    """Return the check's tolerance as an absolute error of the outputs.

    Where it was on inner codes, which a timed run does not show, it is that of hidden ones: twice plain eager's error.
    """
    if check.rule == "argmax":
        return check.tolerance
    share = error_share * float(np.abs(outputs).max(initial=0.0))
    return (
        max(share, check.max_abs_error, 2 * (check.baseline_max_abs_error or 0.0)) if check.rule == "codes" else share
    )


def audited(check: Check, expected: Expected, answers: Mapping[int, Tensor]) -> Check:
    """Return the check with what the timed section answered, by the number of the batch, taken into it."""
    errors = [_error(expected, place, answer) for place, answer in answers.items()]
    check = msgspec.structs.replace(check, audited=sum(map(len, answers.values())))
    worst = max(errors, default=0.0)
    if not check.passed or worst <= expected.allowed:
        return check
    note = f"an answer of the timed section is off by {worst:.2g}, and {expected.allowed:.2g} is allowed"
    return msgspec.structs.replace(check, passed=False, note=note)


def _error(expected: Expected, place: int, answer: Tensor) -> float:
    values = answer.double().numpy()
    wanted = expected.outputs[place * len(values) : (place + 1) * len(values)]
    with np.errstate(invalid="ignore"):  # inf - inf
        difference: NDArray[Any] = np.abs(values - wanted)
    return float(np.nan_to_num(difference, nan=np.inf).max(initial=0.0))


def repeated_is_faster(loaded: Loaded, batch: Tensor, run_s: float) -> bool:
    """Run inputs that nobody has seen, each once more a few runs later; say whether that is more than 5 % faster.

    First and second runs take turns, so that what else the machine does meets both. The same input twice in a row would
    be faster for a CPU's caches alone. `run_s` is what a run takes.
    """
    fitting = min(FRESH_BYTES / (batch.numel() * batch.element_size()), PAIRS_S / (2 * run_s))
    count = max(FEWEST_PAIRS, min(MOST_PAIRS, int(fitting)))
    rows = batch.flatten(1)
    fresh = [rows.roll(number + 1, dims=1).view_as(batch) for number in range(count)]
    step = steps.SingleStream(loaded, steps.pinned(fresh, loaded.device))
    first, again = array("q"), array("q")
    for number in range(count + LAG):
        if number < count:
            first.append(step(number)[0])
        if number >= LAG:
            again.append(step(number - LAG)[0])
    return is_cached(first, again)


def is_cached(first: Sequence[int], again: Sequence[int]) -> bool:
    """Say whether nine tenths of the second runs are more than 5 % faster: a busy machine makes it half of them."""
    faster = sum(after < (1 - REPEATED_SHARE) * before for before, after in zip(first, again, strict=True))
    return faster >= 0.9 * len(first)
