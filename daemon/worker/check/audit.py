"""Audits a timed run: finds wrong answers that the check did not see, and cached answers."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import msgspec
import numpy as np
import torch

from benchd.daemon.records import VERDICTS, Check
from benchd.daemon.worker import steps
from benchd.daemon.worker.backends import LoadedModel
from benchd.daemon.worker.check import agreement, truth
from benchd.daemon.worker.check.agreement import Bounds, Observation, Rule, judge
from benchd.daemon.worker.check.truth import Reference, Truth
from benchd.daemon.worker.structures import Answers, Batch, answered, gathered, rolled, values

REPEATED_SHARE = 0.05
TRIALS, PAIRS = 6, 8  # other programs alone pass at most a share of 0.16 of the trials, and never six in a row
LONGEST_NS = 2**60
TIMED = "while it was timed"


@dataclass(frozen=True)
class ExpectedAnswers:
    """A variant's expected answers during timing and right after, and their limits.

    `outputs` contains the reference's answers to batches of the pool by batch number, `own` the variant's answers to
    them in the check. `fresh` are inputs that the variant has not seen (the last images of `reference`), and
    `fresh_outputs` the reference's answers to each batch of them. `reference` is rebuilt on demand, so that no second
    model is in memory during a timed run.
    """

    outputs: dict[int, Answers]
    own: dict[int, Answers]
    fresh: Batch
    fresh_outputs: list[Answers]
    batch_size: int
    limits: Bounds
    rule: Rule
    reference: Callable[[], Reference]


def audited(check: Check, expected: ExpectedAnswers, answers: Sequence[tuple[int, Batch]], when: str = TIMED) -> Check:
    """Return the check with the verdict on answers given outside the check, if that is worse.

    `answers` come with their batch number. For a network with thresholds, the newest answer to each batch is compared
    with the reference, and every answer with the variant's own in the check: no run may produce different spikes.
    """
    check = msgspec.structs.replace(check, audited=check.audited + expected.batch_size * len(answers))
    answered_runs = [(place, answered(answer)) for place, answer in answers]
    jumps = any(bound.jumps for bound in expected.limits.outputs.values())
    for judged in [dict(answered_runs)] if jumps else _rounds(answered_runs):
        check = _worse(check, expected, [expected.outputs[place] for place in judged], list(judged.values()), when)
    for number, (place, answer) in enumerate(answered_runs if jumps and check.verdict == "passed" else []):
        changed = agreement.changed(expected.own[place], answer, expected.limits)
        if changed:
            note = f"{when}: {changed}, in audited run {number + 1} of {len(answered_runs)}"
            return msgspec.structs.replace(check, passed=False, note=note)
    return check


def _rounds(answers: Sequence[tuple[int, Answers]]) -> list[dict[int, Answers]]:
    """Return the answers in rounds with each batch once, because repeated rows would look like too little variation."""
    rounds: list[dict[int, Answers]] = []
    for place, answer in answers:
        free = next((candidate for candidate in rounds if place not in candidate), None)
        if free is None:
            rounds.append(free := {})
        free[place] = answer
    return rounds


def audited_fresh(check: Check, expected: ExpectedAnswers, loaded: LoadedModel) -> Check:
    """Return the check with the verdict on the variant's answers to unseen inputs, if that is worse."""
    batches = steps.batches(expected.fresh, expected.batch_size, loaded)
    answers = [answered(loaded.run(batch.to(loaded.device)).cpu()) for batch in batches]
    if not _judged(expected, expected.fresh_outputs, answers).passed:
        expected = _near_thresholds(expected, answers)
    return _worse(check, expected, expected.fresh_outputs, answers, "on inputs that it saw for the first time")


def _near_thresholds(expected: ExpectedAnswers, answers: list[Answers]) -> ExpectedAnswers:
    """Return the expectation with the limits of a network with thresholds, if the unseen inputs show that it is one."""
    with torch.inference_mode(mode=False):  # weights created in inference mode cannot be shared outside it
        reference = expected.reference()
    right = Truth(reference, expected.rule, reference.answers(), expected.limits)
    sides = _sides(expected, expected.fresh_outputs, answers)
    off = np.zeros((len(reference.images), 2), np.bool_)
    off[-len(expected.fresh) :] = agreement.off(*sides, expected.limits, expected.rule)
    with_jumps = truth.with_thresholds(right, off)
    return replace(expected, limits=with_jumps.limits, rule=with_jumps.rule)


def _worse(check: Check, expected: ExpectedAnswers, exact: list[Answers], answers: list[Answers], when: str) -> Check:
    """Judge these answers by the check's limits; return the check, with the new verdict if that is worse."""
    if not answers:
        return check
    judged = _judged(expected, exact, answers)
    if VERDICTS.index(judged.verdict) >= VERDICTS.index(check.verdict):
        return check
    return msgspec.structs.replace(check, passed=False, void=judged.void, note=f"{when}: {judged.note}")


def _judged(expected: ExpectedAnswers, exact: list[Answers], answers: list[Answers]) -> Check:
    return judge(*_sides(expected, exact, answers), expected.limits, expected.rule)


def _sides(expected: ExpectedAnswers, exact: list[Answers], answers: list[Answers]) -> tuple[Observation, Observation]:
    sizes = [expected.batch_size] * len(answers)
    return Observation(gathered(exact, sizes), None), Observation(gathered(answers, sizes), None)


def repeated_is_faster(loaded: LoadedModel, pool: Sequence[Batch], beat: Callable[[], None]) -> bool:
    """Return whether timed inputs are answered over 5 % faster than unseen ones in all trials; call `beat` before each.

    An unseen input is a permutation of a timed one. Each is written to memory right before it is read, so that CPU
    caches do not favour either.
    """
    return all(_is_faster(loaded, pool, trial * PAIRS, beat) for trial in range(TRIALS))


def _is_faster(loaded: LoadedModel, pool: Sequence[Batch], first: int, beat: Callable[[], None]) -> bool:
    unseen: list[int] = []
    seen: list[int] = []
    for number in range(first, first + PAIRS):
        timed = pool[number % len(pool)]
        # one new batch at a time: there may not be enough memory for eight large ones
        pair = [timed, *steps.pinned([rolled(timed, 2 + number)], loaded.device)]
        step = steps.SingleInference(loaded, pair)
        for place in (0, 1) if number % 2 else (1, 0):
            beat()
            for value in values(pair[place]):
                value.copy_(value.clone())
            (unseen if place else seen).extend(step(place))
        if not may_be_cached(unseen, seen):
            return False
    return True


def may_be_cached(unseen: Sequence[int], seen: Sequence[int]) -> bool:
    """Return whether `is_cached` may still be true for the PAIRS pairs that start with these times."""
    missing = PAIRS - len(seen)
    return is_cached([*unseen, *[LONGEST_NS] * missing], [*seen, *[0] * missing])


def is_cached(unseen: Sequence[int], seen: Sequence[int]) -> bool:
    """Return whether the median for seen inputs is over 5 % below the lower quartile for unseen ones.

    This also detects a cache that does not always hit, and other programs rarely look like one in every trial.
    """
    return bool(np.median(seen) < (1 - REPEATED_SHARE) * np.quantile(unseen, 0.25))
