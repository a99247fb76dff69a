"""The verdict of the numerical check, from arrays alone: what a variant answers against what float64 answers.

Three things are held against each other, all as shares of the largest exact answer:

    error   of the variant on each image
    noise   of the exact model whose weights and inputs are off by the rounding of the variant's number format
    spread  how far the exact answers to two different images lie apart

The noise says how far a right variant of this network may go, without asking any variant: a smooth network multiplies
rounding by a constant, and one whose neurons fire at a threshold turns it into spikes that come or do not. The spread
keeps the check able to fail: a variant within half of it cannot be answering another image. If the noise alone comes
near the spread, the format cannot carry the network, and nothing can be said of a variant in it.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from benchd.daemon.records import Check

Format = Literal["fp32", "fp16", "bf16"]
Array = NDArray[np.float64]

ROUNDING: dict[Format, float] = {"fp32": 2.0**-22, "fp16": 2.0**-11, "bf16": 2.0**-8}
"""The relative rounding of each format; of float32 four times its own, for the sums that it is made of."""

ERROR_FLOOR: dict[Format, float] = {"fp32": 1e-5, "fp16": 3e-3, "bf16": 1e-2}
ERROR_CAP: dict[Format, float] = {"fp32": 1e-4, "fp16": 2e-2, "bf16": 5e-2}
NOISE_FACTOR = 3.0
"""An image is right within this many times the largest noise, but at least the floor and at most the cap."""

CODES_FLOOR: dict[Format, float] = {"fp32": 1e-4, "fp16": 1e-3, "bf16": 1e-3}
OFF_SHARE, OFF_AT_LEAST, OFF_CAP = 1 / 16, 2, 1 / 4
"""Of a network with thresholds this share of the images may be off in float32, where one spike changes all behind it."""

VOID_SHARE = 1 / 3  # of the spread: noise beyond it hides which image was answered
CODES_CAP = 0.15
RANGE_CAP = 4.0  # of the largest exact answer: no rounding leads so far
CONSTANT = 1e-9  # a spread below this share is none
NOT_FINITE = 1e99  # in place of inf and NaN, which no record holds


@dataclass(frozen=True)
class Observation:
    """What a model answers: outputs by path, each (rows, ...) in float64, and inner codes (images, features) in int8.

    A row is an image, or a whole batch for an output without a batch of its own. `codes` is None where they are hidden.
    """

    outputs: dict[str, Array]
    codes: NDArray[np.int8] | None


@dataclass(frozen=True)
class Truth:
    """What float64 answers, and what it answers with each of several draws of rounding noise."""

    exact: Observation
    noisy: Sequence[Observation]


@dataclass(frozen=True)
class Rule:
    """Which rule holds: the format, whether neurons fire at thresholds, and whether the weights mean something."""

    format: Format
    spiking: bool
    trained: bool


def judge(truth: Truth, observed: Observation, rule: Rule) -> Check:
    """Return the verdict on what a variant answered to the images of `truth`."""
    mismatch = _mismatch(truth.exact, observed)
    if mismatch:
        return _refused(truth.exact, rule, mismatch)
    paths = [_path(name, truth, observed.outputs[name], rule) for name in truth.exact.outputs]
    worst = max(paths, key=lambda path: (path.is_bad, path.errors.max(initial=0.0) / path.limit))
    codes = _Codes.of(truth, observed, rule)
    broken, wrong = _broken(paths), _wrong(paths, codes)
    unclear = _unclear(paths, codes, is_wrong=bool(wrong))
    return Check(
        passed=not (broken or wrong or unclear),
        void=bool(unclear and not broken and not rule.trained),
        rule="codes" if codes else "outputs",
        images=_images(truth.exact),
        max_abs_error=worst.max_abs_error,
        error_share=_finite(worst.errors.max(initial=0.0)),
        mean_error_share=_finite(worst.errors.mean()),
        tolerance=worst.mean_limit if worst.by_mean else worst.limit,
        images_off=worst.off,
        images_off_allowed=worst.allowed_off,
        rounding_share=worst.noise,
        spread_share=worst.spread,
        flipped_share=codes.flipped if codes else None,
        flipped_tolerance=codes.limit if codes else None,
        note=broken or "; ".join(filter(None, [wrong, unclear])),
        **_argmax(truth.exact, observed, 2 * paths[0].limit),
    )


@dataclass(frozen=True)
class _Path:
    """One output: errors by row, and by which limits they are judged."""

    name: str
    errors: Array
    max_abs_error: float
    not_finite: int
    limit: float
    allowed_off: int
    mean_limit: float
    by_mean: bool
    noise: float
    spread: float

    @property
    def off(self) -> int:
        return int((self.errors > self.limit).sum())

    @property
    def is_bad(self) -> bool:
        if self.not_finite:
            return True
        return self.errors.mean() > self.mean_limit if self.by_mean else self.off > self.allowed_off


def _path(name: str, truth: Truth, answers: Array, rule: Rule) -> _Path:
    exact = _rows(truth.exact.outputs[name])
    largest = float(np.abs(exact).max(initial=0.0)) or 1.0
    distances = _distances(exact, _rows(answers))
    noise = np.concatenate([_distances(exact, _rows(noisy.outputs[name])) for noisy in truth.noisy]) / largest
    spread = float(np.median(_distances(exact, np.roll(exact, 1, axis=0)))) / largest
    limit = _limit(float(noise.max(initial=0.0)), spread, rule)
    jumps = rule.spiking or bool((noise > ERROR_CAP[rule.format]).any())
    by_mean = jumps and rule.format != "fp32"
    mean = float(noise.mean())
    return _Path(
        name=name,
        errors=distances / largest,
        max_abs_error=_finite(distances.max(initial=0.0)),
        not_finite=int((~np.isfinite(_rows(answers))).any(axis=1).sum()),
        limit=limit,
        allowed_off=_allowed_off(len(exact), float((noise > limit).mean())) if jumps else 0,
        mean_limit=max(ERROR_FLOOR[rule.format], _of_mean(len(exact)) * mean),
        by_mean=by_mean,
        noise=mean if by_mean else float(np.median(noise)),
        spread=spread,
    )


def _limit(noise: float, spread: float, rule: Rule) -> float:
    """Return by how much one row may be off, as a share of the largest answer."""
    limit = min(ERROR_CAP[rule.format], max(ERROR_FLOOR[rule.format], NOISE_FACTOR * noise))
    return min(limit, spread / 2) if spread > CONSTANT else limit


def _allowed_off(rows: int, noisy_share: float) -> int:
    """Return how many rows of a network with thresholds may be off: the share seen in noise, twice, within its cap."""
    usual = max(OFF_AT_LEAST, int(rows * OFF_SHARE))
    return max(usual, min(int(rows * OFF_CAP), 2 + math.ceil(2 * rows * noisy_share)))


def _of_mean(rows: int) -> float:
    """Return how many times the mean noise a mean over so many rows may be: 1.5 for 64, more for fewer."""
    return 1 + 4 / math.sqrt(rows)


def _unclear(paths: Sequence[_Path], codes: "_Codes | None", *, is_wrong: bool) -> str:
    """Return why no variant of this format can be told from a wrong one, else nothing.

    A mean is compared with noise, so that noise near the spread hides anything. A limit per row is fixed: noise near it
    explains a row that passed it.
    """
    for path in paths:
        bound = VOID_SHARE * path.spread if path.by_mean else path.limit / 2 if is_wrong else math.inf
        if path.noise > bound and path.spread > CONSTANT:
            return (
                f"rounding alone moves {_named(path.name)} by {path.noise:.1e} of the largest, and the answers to two "
                f"images lie {path.spread:.1e} apart"
            )
    if codes and codes.noise > CODES_CAP:
        return f"rounding alone flips {codes.noise:.1e} of the codes"
    return ""


@dataclass(frozen=True)
class _Codes:
    """The neurons' codes: the share that flipped, and what may."""

    flipped: float
    limit: float
    noise: float

    @classmethod
    def of(cls, truth: Truth, observed: Observation, rule: Rule) -> "_Codes | None":
        if truth.exact.codes is None or observed.codes is None:
            return None
        exact = truth.exact.codes
        noise = float(np.mean([(exact != noisy.codes).mean() for noisy in truth.noisy]))
        by_image = (exact != observed.codes).mean(axis=1)
        if rule.format == "fp32":  # a flip early on takes thousands with it: the usual image has none
            allowed = _allowed_off(len(exact), noise)
            flipped, limit = float(np.sort(by_image)[-1 - min(allowed, len(exact) - 1)]), CODES_FLOOR["fp32"]
        else:
            flipped, limit = float(by_image.mean()), min(CODES_CAP, _of_mean(len(exact)) * noise)
            limit = max(limit, CODES_FLOOR[rule.format])
        return cls(flipped, limit, noise)


def _wrong(paths: Sequence[_Path], codes: _Codes | None) -> str:
    """Return in words which limit is passed, else nothing."""
    for path in paths:
        rows, mean = len(path.errors), path.errors.mean()
        if path.is_bad and path.by_mean:
            return f"{_named(path.name)} is off by {mean:.1e} of the largest on the mean, and {path.mean_limit:.1e} is allowed"
        if path.is_bad:
            but = f"; {path.allowed_off} may be" if path.allowed_off else ""
            return (
                f"{_named(path.name)} is off by more than {path.limit:.1e} of the largest for {path.off} of {rows}{but}"
            )
    if codes and codes.flipped > codes.limit:
        return f"{codes.flipped:.1e} of the codes flipped, and {codes.limit:.1e} is allowed"
    return ""


def _broken(paths: Sequence[_Path]) -> str:
    """Return what no rounding explains: values that are not finite, or far outside the range of the answers."""
    for path in paths:
        if path.not_finite:
            return f"{_named(path.name)} is not finite for {path.not_finite} of {len(path.errors)}"
        if np.median(path.errors) > RANGE_CAP:
            return f"{_named(path.name)} is off by {_finite(np.median(path.errors)):.1e} times the largest"
    return ""


def _mismatch(exact: Observation, observed: Observation) -> str:
    """Return how the structure of the answers differs, else nothing."""
    if list(exact.outputs) != list(observed.outputs):
        return f"it answers {_list(observed.outputs)}, and float64 answers {_list(exact.outputs)}"
    for name, values in exact.outputs.items():
        if values.shape != observed.outputs[name].shape:
            return f"{_named(name)} has the shape {observed.outputs[name].shape}, and in float64 {values.shape}"
    if exact.codes is not None and observed.codes is not None and exact.codes.shape != observed.codes.shape:
        return f"its neurons give {observed.codes.shape[1]} codes per image, and in float64 {exact.codes.shape[1]}"
    return ""


def _refused(exact: Observation, rule: Rule, reason: str) -> Check:
    return Check(
        passed=False,
        rule="codes" if rule.spiking else "outputs",
        images=_images(exact),
        max_abs_error=NOT_FINITE,
        error_share=NOT_FINITE,
        tolerance=ERROR_CAP[rule.format],
        argmax_disagreements=None,
        note=reason,
    )


def _argmax(exact: Observation, observed: Observation, tie_share: float) -> dict[str, Any]:
    """Return how often the class is float64's, of scores (images, classes): with and without the ties.

    A tie is an image whose two best classes lie closer than `tie_share` of the largest answer: two errors in the limit.
    """
    scores, others = next(iter(exact.outputs.values())), next(iter(observed.outputs.values()))
    if scores.ndim != 2 or scores.shape[1] < 2:
        return {"argmax_disagreements": None}
    best = np.sort(scores, axis=1)[:, -2:]
    ties = best[:, 1] - best[:, 0] < tie_share * np.abs(scores).max(initial=0.0)
    classes, theirs = scores.argmax(axis=1), np.nan_to_num(others, nan=-np.inf).argmax(axis=1)
    differs = classes != theirs
    return {
        "argmax_disagreements": int(differs.sum()),
        "ties": int(ties.sum()),
        "tie_disagreements": int((differs & ties).sum()),
        "commonest_class_share": float(np.bincount(classes).max() / len(classes)),
    }


def _rows(values: Array) -> Array:
    return values.reshape(len(values), -1)


def _distances(one: Array, other: Array) -> Array:
    """Return the largest distance in each row, inf where it is not known."""
    with np.errstate(invalid="ignore", over="ignore"):  # inf - inf
        found: Array = np.nan_to_num(np.abs(one - other), nan=np.inf).max(axis=1, initial=0.0)
    return found


def _finite(value: float) -> float:
    return float(min(value, NOT_FINITE))


def _images(exact: Observation) -> int:
    return max((len(values) for values in exact.outputs.values()), default=0)


def _named(path: str) -> str:
    return f"output {path}" if path else "the output"


def _list(paths: dict[str, Array]) -> str:
    return ", ".join(map(_named, paths)) or "nothing"
