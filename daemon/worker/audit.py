"""What a timed run may hide: answers that are not those of the check, and answers that were kept."""

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec
import numpy as np

from benchd.daemon.records import VERDICTS, Check
from benchd.daemon.worker import agreement, steps
from benchd.daemon.worker.agreement import Bounds, Observation, Rule, judge
from benchd.daemon.worker.backends import Loaded
from benchd.daemon.worker.structures import Answers, Batch, answered, gathered, rolled, values

REPEATED_SHARE = 0.05
TRIALS, PAIRS = 6, 8  # other load alone passes 0.16 of the trials at most, six in a row never
TIMED = "while it was timed"


@dataclass(frozen=True)
class Expected:
    """What a variant has to answer when it is timed and right after, and what limits its answers.

    `outputs` holds what the reference answers to batches of the pool by the number of the batch, `own` what the variant
    answered to them in the check. `fresh` are inputs that the variant has not met, and `fresh_outputs` the reference's
    answers to each batch of them.
    """

    outputs: dict[int, Answers]
    own: dict[int, Answers]
    fresh: Batch
    fresh_outputs: list[Answers]
    batch_size: int
    limits: Bounds
    rule: Rule


def audited(check: Check, expected: Expected, answers: Sequence[tuple[int, Batch]], when: str = TIMED) -> Check:
    """Return the check with the verdict on what was answered outside of it, if it is worse.

    `answers` come with the number of their batch. A network with thresholds is held against the reference in the newest
    to each batch, and in every one against what it answered in the check itself: no run may end in other spikes.
    """
    check = msgspec.structs.replace(check, audited=check.audited + expected.batch_size * len(answers))
    found = [(place, answered(answer)) for place, answer in answers]
    jumps = any(bound.jumps for bound in expected.limits.outputs.values())
    for judged in [dict(found)] if jumps else _rounds(found):
        check = _worse(check, expected, [expected.outputs[place] for place in judged], list(judged.values()), when)
    for number, (place, answer) in enumerate(found if jumps and check.verdict == "passed" else []):
        changed = agreement.changed(expected.own[place], answer, expected.limits)
        if changed:
            note = f"{when}: {changed}, in run {number + 1} of {len(found)} that were audited"
            return msgspec.structs.replace(check, passed=False, note=note)
    return check


def _rounds(answers: Sequence[tuple[int, Answers]]) -> list[dict[int, Answers]]:
    """Return the answers in rounds that hold each batch once: the same rows again would look like little variation."""
    rounds: list[dict[int, Answers]] = []
    for place, answer in answers:
        free = next((held for held in rounds if place not in held), None)
        if free is None:
            rounds.append(free := {})
        free[place] = answer
    return rounds


def audited_fresh(check: Check, expected: Expected, loaded: Loaded) -> Check:
    """Return the check with the verdict on what the variant answers to inputs that it has not met, if it is worse."""
    batches = steps.batches(expected.fresh, expected.batch_size, loaded)
    answers = [answered(loaded.run(batch.to(loaded.device)).cpu()) for batch in batches]
    return _worse(check, expected, expected.fresh_outputs, answers, "on inputs that it met for the first time")


def _worse(check: Check, expected: Expected, exact: list[Answers], answers: list[Answers], when: str) -> Check:
    """Return the check with the verdict on these answers, if it is worse; the limits are the check's own."""
    if not answers:
        return check
    sizes = [expected.batch_size] * len(answers)
    right, given = (Observation(gathered(side, sizes), None) for side in (exact, answers))
    found = judge(right, given, expected.limits, expected.rule)
    if VERDICTS.index(found.verdict) >= VERDICTS.index(check.verdict):
        return check
    return msgspec.structs.replace(check, passed=False, void=found.void, note=f"{when}: {found.note}")


def repeated_is_faster(loaded: Loaded, pool: Sequence[Batch]) -> bool:
    """Say whether inputs that were timed are answered over 5 % faster than those that nobody has seen: in every trial.

    An unseen input holds the numbers of a timed one in other places. Each is written to its place right before it is
    read, so that caches of the CPU favour neither.
    """
    return all(_is_faster(loaded, pool, trial * PAIRS) for trial in range(TRIALS))


def _is_faster(loaded: Loaded, pool: Sequence[Batch], first: int) -> bool:
    timed = [pool[number % len(pool)] for number in range(first, first + PAIRS)]
    fresh = steps.pinned((rolled(batch, 2 + first + number) for number, batch in enumerate(timed)), loaded.device)
    inputs = [*timed, *fresh]
    step = steps.SingleStream(loaded, inputs)

    def run(number: int) -> int:
        for value in values(inputs[number]):
            value.copy_(value.clone())
        return step(number)[0]

    times = [0] * (2 * PAIRS)
    for number in range(PAIRS):
        places = (number, PAIRS + number)
        for place in places if number % 2 else places[::-1]:
            times[place] = run(place)
    return is_cached(times[PAIRS:], times[:PAIRS])


def is_cached(unseen: Sequence[int], seen: Sequence[int]) -> bool:
    """Say whether the median on seen inputs is over 5 % below the lower quartile on unseen ones.

    That finds a cache that only mostly answers too, and other load rarely looks like it in every trial.
    """
    return bool(np.median(seen) < (1 - REPEATED_SHARE) * np.quantile(unseen, 0.25))
