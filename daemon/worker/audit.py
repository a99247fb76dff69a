"""What a timed run may hide: answers that are not those of the check, and answers that were kept."""

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from benchd.daemon.records import Check
from benchd.daemon.worker import steps
from benchd.daemon.worker.backends import Loaded
from benchd.daemon.worker.structures import ONLY, Answers, Batch, each, numbers, tensors, values

REPEATED_SHARE = 0.05
FEWEST_PAIRS, MOST_PAIRS = 7, 20
PAIRS_S = 2.0  # no more pairs than fit this, beyond the fewest
LAG = 4
FRESH_BYTES = 64 * 2**20


@dataclass(frozen=True)
class Expected:
    """What the reference answers to the first batches of the pool, by path, and by how much an answer may be off."""

    outputs: list[Answers]
    allowed: dict[str, float]


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


def audited(check: Check, expected: Expected, answers: Mapping[int, Batch], batch_size: int) -> Check:
    """Return the check with what the timed section answered, by the number of the batch, taken into it."""
    check = msgspec.structs.replace(check, audited=batch_size * len(answers))
    wrong = [words for place, answer in answers.items() if (words := _wrong(expected, place, answer))]
    return msgspec.structs.replace(check, passed=False, note=wrong[0]) if check.passed and wrong else check


def _wrong(expected: Expected, place: int, answer: Batch) -> str:
    """Return what is wrong with the answer to a batch, nothing if it is right."""
    found = {path: numbers(value) for path, value in tensors(answer).items()}
    for path, wanted in expected.outputs[place].items():
        if path not in found or found[path].size != wanted.size:
            return f"an answer of the timed section has another form than in the check ({path})"
        error, allowed = _error(found[path], wanted.reshape(found[path].shape)), expected.allowed[path]
        if error > allowed:
            which = "" if path == ONLY else f" ({path})"
            return f"an answer of the timed section is off by {error:.2g}{which}, and {allowed:.2g} is allowed"
    return ""


def _error(values: NDArray[np.float64], wanted: NDArray[np.float64]) -> float:
    with np.errstate(invalid="ignore"):  # inf - inf
        difference: NDArray[Any] = np.abs(values - wanted)
    return float(np.nan_to_num(difference, nan=np.inf).max(initial=0.0))


def repeated_is_faster(loaded: Loaded, batch: Batch, run_s: float) -> bool:
    """Run inputs that nobody has seen, each once more a few runs later; say whether that is more than 5 % faster.

    First and second runs take turns, so that what else the machine does meets both. The same input twice in a row would
    be faster for a CPU's caches alone. `run_s` is what a run takes.
    """
    fitting = min(FRESH_BYTES / sum(one.numel() * one.element_size() for one in values(batch)), PAIRS_S / (2 * run_s))
    count = max(FEWEST_PAIRS, min(MOST_PAIRS, int(fitting)))
    fresh = [each(batch, partial(_rolled, by=number + 1)) for number in range(count)]
    step = steps.SingleStream(loaded, steps.pinned(fresh, loaded.device))
    first, again = array("q"), array("q")
    for number in range(count + LAG):
        if number < count:
            first.append(step(number)[0])
        if number >= LAG:
            again.append(step(number - LAG)[0])
    return is_cached(first, again)


def _rolled(value: Tensor, by: int) -> Tensor:
    """Return other inputs of the same numbers."""
    return value.reshape(len(value), -1).roll(by, dims=1).reshape(value.shape)


def is_cached(first: Sequence[int], again: Sequence[int]) -> bool:
    """Say whether nine tenths of the second runs are more than 5 % faster: a busy machine makes it half of them."""
    faster = sum(after < (1 - REPEATED_SHARE) * before for before, after in zip(first, again, strict=True))
    return faster >= 0.9 * len(first)
