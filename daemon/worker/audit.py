"""What a timed run may hide: answers that are not those of the check, and answers that were kept."""

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import msgspec
from torch import Tensor

from benchd.daemon.records import VERDICTS, Check
from benchd.daemon.worker import steps
from benchd.daemon.worker.agreement import Bounds, Observation, Rule, judge
from benchd.daemon.worker.backends import Loaded
from benchd.daemon.worker.structures import Answers, Batch, each, gathered, numbers, tensors, values

REPEATED_SHARE = 0.05
FEWEST_PAIRS, MOST_PAIRS = 12, 20
PAIRS_S = 2.0  # no more pairs than fit this, beyond the fewest
LAG = 4
FRESH_BYTES = 32 * 2**20


@dataclass(frozen=True)
class Expected:
    """What the reference answers to some batches of the pool, by the number of the batch, and what limits an answer."""

    outputs: dict[int, Answers]
    batch_size: int
    limits: Bounds
    rule: Rule


def audited(check: Check, expected: Expected, answers: Mapping[int, Batch]) -> Check:
    """Return the check with the verdict on what the timed section answered, by the number of the batch, if it is worse.

    The limits are the check's own, and do not depend on what the variant answered to it.
    """
    if not answers:
        return check
    sizes = [expected.batch_size] * len(answers)
    exact = Observation(gathered([expected.outputs[place] for place in answers], sizes), None)
    found = [{path: numbers(value) for path, value in tensors(answer).items()} for answer in answers.values()]
    audit = judge(exact, Observation(gathered(found, sizes), None), expected.limits, expected.rule)
    check = msgspec.structs.replace(check, audited=sum(sizes))
    if VERDICTS.index(audit.verdict) >= VERDICTS.index(check.verdict):
        return check
    note = f"while it was timed: {audit.note}"
    return msgspec.structs.replace(check, passed=False, void=audit.void, note=note)


def repeated_is_faster(loaded: Loaded, batch: Batch, run_s: float) -> bool:
    """Say whether inputs that nobody has seen are answered over 5 % faster a few runs later: in two trials of many.

    Each run reads an input that was just copied to the same place, so that caches of the CPU favour neither. `run_s` is
    what a run takes.
    """
    return all(_is_faster(loaded, batch, run_s, first_roll) for first_roll in (1, 1 + MOST_PAIRS))


def _is_faster(loaded: Loaded, batch: Batch, run_s: float, first_roll: int) -> bool:
    fitting = min(FRESH_BYTES / sum(one.numel() * one.element_size() for one in values(batch)), PAIRS_S / (4 * run_s))
    count = max(FEWEST_PAIRS, min(MOST_PAIRS, int(fitting)))
    fresh = [each(batch, partial(_rolled, by=first_roll + number)) for number in range(count)]
    read = steps.pinned([each(batch, Tensor.clone) for _ in fresh], loaded.device)
    step = steps.SingleStream(loaded, read)

    def run(number: int) -> int:
        for into, content in zip(values(read[number]), values(fresh[number]), strict=True):
            into.copy_(content)
        return step(number)[0]

    first, again = array("q"), array("q")
    for number in range(count + LAG):
        if number < count:
            first.append(run(number))
        if number >= LAG:
            again.append(run(number - LAG))
    return is_cached(first, again)


def _rolled(value: Tensor, by: int) -> Tensor:
    """Return other inputs of the same numbers."""
    return value.reshape(len(value), -1).roll(by, dims=1).reshape(value.shape)


def is_cached(first: Sequence[int], again: Sequence[int]) -> bool:
    """Say whether nine tenths of the second runs are more than 5 % faster: a busy machine makes it half of them."""
    faster = sum(after < (1 - REPEATED_SHARE) * before for before, after in zip(first, again, strict=True))
    return faster >= 0.9 * len(first)
