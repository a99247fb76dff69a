"""The verdict of the numerical check, from arrays alone: a variant's answers against those in float64.

It compares three quantities, all as shares of the largest exact answer:

    error   of the variant on each image
    noise   of the exact model with weights and inputs perturbed by the rounding of the variant's number format
    spread  the distance between the exact answers to two different images

The noise shows how far a correct variant of this network may deviate, without running any variant: a smooth network
multiplies rounding by a constant, and neurons with thresholds turn it into extra or missing spikes. The spread ensures
that the check can fail: a variant within half of it cannot be answering another image. If the noise alone approaches
the spread, the format is too coarse for the network, and no verdict on a variant is possible.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from benchd.daemon.records import COMMONEST_CLASS, Check
from benchd.daemon.worker.structures import OF_BATCH, ONLY, same_sizes

Format = Literal["fp32", "fp16", "bf16", "int8"]
Array = NDArray[np.float64]

ROUNDING: dict[Format, float] = {"fp32": 2.0**-22, "fp16": 2.0**-11, "bf16": 2.0**-8, "int8": 2.0**-8}
"""The relative rounding of each format; for float32 four times its own, because it also rounds sums."""

ERROR_FLOOR: dict[Format, float] = {"fp32": 2e-5, "fp16": 3e-3, "bf16": 1e-2, "int8": 0.5}
ERROR_CAP: dict[Format, float] = {"fp32": 1e-4, "fp16": 2e-2, "bf16": 5e-2, "int8": 0.5}
INT8_AGREEMENT, INT8_CHANCE = 0.98, 0.01
"""An int8 variant is not judged by closeness, only by whether it answers another image, and by its classes: this share
of those of float64, unless chance explains fewer."""

NOISE_FACTOR = 3.0
"""An image passes within this many times the largest noise, but at least the floor and at most the cap."""

CODES_FLOOR: dict[Format, float] = {"fp32": 1e-4, "fp16": 1e-3, "bf16": 1e-3, "int8": 1e-2}
OFF_SHARE, OFF_AT_LEAST, OFF_CAP = 1 / 16, 2, 1 / 4
"""How many images of a network with thresholds may fail in float32: one flipped spike changes all later layers."""

VOID_SHARE = 1 / 3  # of the spread: noise above it hides which image was answered
CODES_CAP = 0.15
RANGE_CAP = 2.0  # of the largest exact answer: the largest error of an answer within the range
CHANNEL_FACTOR = 8.0
"""A channel passes within the cap's share of its own variation, or within this many times its noise."""
FEWEST_ROWS, FEWEST_ROWS_SPIKING = 8, 16  # needed for a typical error
CONSTANT = 1e-9  # a spread below this share is none
SAME_ANSWERS = "float64 gives the same answer to all inputs, so a wrong answer cannot be distinguished from a right one"
NOT_FINITE = 1e99  # replaces inf and NaN, which a record cannot hold


@dataclass(frozen=True)
class Observation:
    """A model's answers: outputs by path, each (rows, ...) in float64, and inner codes (images, features) in int8.

    A row is an image, or a whole batch for an output without a batch dimension. `codes` is None if they are hidden.
    """

    outputs: dict[str, Array]
    codes: NDArray[np.int8] | None


@dataclass(frozen=True)
class Rule:
    """The applicable rule: the format, whether neurons fire at thresholds, and whether the weights are trained."""

    format: Format
    spiking: bool
    trained: bool


@dataclass(frozen=True)
class Bound:
    """The limits of one output; every figure but `jumps` is a share of the largest exact answer, `largest`.

    `spread` is infinite if there is only one row. `jumps` says that rounding can cause a large error, such as an extra
    or missing spike. `limit` applies to a row, and `noisy_off` is the share of noisy rows beyond it.
    """

    largest: float
    spread: float
    noise_mean: float
    noise_median: float
    limit: float
    noisy_off: float
    jumps: bool


@dataclass(frozen=True)
class Bounds:
    """The limits of each output by path, the share of codes that noise flips, and whether noise keeps the shapes.

    `channels` holds the noise in each channel of an output as a share of the channel's largest answer, by path and by
    the axis along which they lie.
    """

    outputs: dict[str, Bound]
    codes: float | None
    stable: bool
    channels: dict[str, dict[int, Array]]

    def of(self, path: str) -> Bound:
        """Return the bound of an output; for one whose shape changes between batches, the widest."""
        name = path.partition(OF_BATCH)[0]
        alike = [bound for other, bound in self.outputs.items() if other.partition(OF_BATCH)[0] == name]
        return self.outputs.get(path) or max(alike, key=lambda bound: bound.limit)


def bounds(
    exact: Observation, noisy: Sequence[Observation], rule: Rule, by_channel: Sequence[Observation] = ()
) -> Bounds:
    """Return the limits for a variant's answers, from the float64 answers without and with rounding noise.

    `by_channel` are the draws of noise for the channels, by default the same.
    """
    by_channel = by_channel or noisy
    stable = not any(_mismatch(exact, one) for one in noisy)
    outputs = {
        name: _bound(values, [one.outputs[name] for one in noisy] if stable else [], rule)
        for name, values in exact.outputs.items()
    }
    channels = {
        name: _channel_noise(values, [one.outputs[name] for one in by_channel] if stable else [], outputs[name], rule)
        for name, values in exact.outputs.items()
    }
    flips = [share for one in noisy if stable and (share := _flipped(exact, one)) is not None]
    return Bounds(outputs, float(np.mean(flips)) if flips else None, stable, channels)


def _bound(exact: Array, noisy: Sequence[Array], rule: Rule) -> Bound:
    rows = _rows(exact)
    finite = _numbers(rows)
    largest = float(np.abs(finite).max(initial=0.0)) or 1.0
    noise = np.concatenate([_distances(rows, _rows(one)) for one in noisy] or [np.zeros(1)]) / largest
    between = _distances(finite, np.roll(finite, 1, axis=0))
    spread = float(np.median(between)) / largest if len(rows) > 1 else math.inf
    cap, floor = ERROR_CAP[rule.format], ERROR_FLOOR[rule.format]
    limit = min(cap, max(floor, NOISE_FACTOR * float(noise.max())))
    limit = min(limit, spread / 2) if spread > CONSTANT else limit
    return Bound(
        largest=largest,
        spread=spread,
        noise_mean=_finite(noise.mean()),
        noise_median=_finite(np.median(noise)),
        limit=limit,
        noisy_off=float((noise > limit).mean()),
        jumps=rule.spiking or bool((noise > cap).any()),
    )


def _channel_noise(exact: Array, noisy: Sequence[Array], bound: Bound, rule: Rule) -> dict[int, Array]:
    """Return the noise in each channel by axis, as a share of the channel's largest answer.

    A channel with accidentally small noise gets that of the median channel.
    """
    shares = {}
    for axis in range(1, exact.ndim if exact.size else 1):  # any but the rows
        largest = _by_channel(_numbers(exact), axis).max(axis=0)
        draws = [_typical(_by_channel(_difference(exact, one), axis), bound, rule) for one in noisy]
        noise = np.max(draws, axis=0) if draws else np.zeros(len(largest))
        found = np.divide(noise, largest, out=np.zeros_like(noise), where=largest > 0)
        usual = float(np.median(found[largest > 0])) if (largest > 0).any() else 0.0
        shares[axis] = np.maximum(found, max(usual, ROUNDING[rule.format]))
    return shares


def _channel_limits(exact: Array, axis: int, noise: Array, rule: Rule) -> Array:
    """Return the allowed error per channel, so that small numbers beside large ones have their own limits.

    In float32 it is at least the rounding of the largest answer, which sums shared by the channels cause.
    """
    exact = _numbers(exact)
    largest = _by_channel(exact, axis).max(axis=0)
    variation = _by_channel(exact - exact.mean(axis=0), axis).max(axis=0) if len(exact) > 1 else largest
    shared = ROUNDING["fp32"] * float(largest.max(initial=0.0)) if rule.format == "fp32" else 0.0
    found: Array = np.maximum(ERROR_CAP[rule.format] * variation, CHANNEL_FACTOR * noise * largest)
    return np.maximum(found, shared)


def _by_channel(values: Array, axis: int) -> Array:
    """Return the largest distance from 0 in each channel of each row (rows, channels)."""
    by_channel = np.moveaxis(np.abs(values), axis, 1)
    found: Array = by_channel.reshape(*by_channel.shape[:2], -1).max(axis=2)
    return found


def _typical(errors: Array, bound: Bound, rule: Rule) -> Array:
    """Return the typical error over the rows (rows, channels): the mean, unless spikes distort a few rows."""
    found: Array = np.median(errors, axis=0) if bound.jumps and rule.format == "fp32" else errors.mean(axis=0)
    return found


def judge(exact: Observation, observed: Observation, limits: Bounds, rule: Rule) -> Check:
    """Return the verdict on a variant's answers; `limits` may cover more images than `exact`."""
    mismatch = _undefined(exact) or _mismatch(exact, observed)
    if mismatch:
        return _refused(exact, limits, rule, mismatch)
    paths = [_Path.of(name, exact, observed, limits, rule) for name in exact.outputs]
    worst = max(paths, key=lambda path: (path.is_bad, bool(path.lost_channel), path.excess))
    codes = _Codes.of(exact, observed, limits, rule)
    classes = _argmax(exact, observed, _tie_share(paths[0].bound, rule))
    broken, wrong = _broken(paths), _wrong(paths, codes) or _disagrees(classes, _images(exact), rule)
    unclear = _unclear(paths, codes, is_wrong=bool(wrong))
    if wrong and rule.format == "int8" and not rule.trained:
        unclear = "the answers of random weights lie too close together to judge int8 by them"
    is_constant = all(path.bound.spread <= CONSTANT for path in paths)
    return Check(
        passed=not (broken or wrong or unclear or is_constant),
        void=bool(unclear and not broken and not rule.trained) or (not (broken or wrong) and is_constant),
        rule="codes" if codes else "outputs",
        images=_images(exact),
        max_abs_error=_finite(worst.errors.max(initial=0.0) * worst.bound.largest),
        error_share=_finite(worst.errors.max(initial=0.0)),
        mean_error_share=worst.mean,
        tolerance=worst.mean_limit if worst.by_mean else worst.bound.limit,
        images_off=worst.off,
        images_off_allowed=worst.allowed_off,
        rounding_share=worst.bound.noise_mean,
        spread_share=worst.bound.spread if math.isfinite(worst.bound.spread) else None,
        flipped_share=codes.flipped if codes else None,
        flipped_tolerance=codes.limit if codes else None,
        note=broken or "; ".join(filter(None, [wrong, unclear, SAME_ANSWERS if is_constant else ""])),
        **classes,
    )


def _tie_share(bound: Bound, rule: Rule) -> float:
    """Return the distance of two classes that is a tie: two allowed errors, or in int8 two of its rounding."""
    return 2 * (ROUNDING["int8"] if rule.format == "int8" else bound.limit)


def _disagrees(classes: Mapping[str, Any], images: int, rule: Rule) -> str:
    """Return why an int8 variant's classes are not float64's, empty if they are or if classes prove nothing."""
    decided = images - classes.get("ties", 0)
    if rule.format != "int8" or classes["argmax_disagreements"] is None or not decided:
        return ""
    agreeing = decided - (classes["argmax_disagreements"] - classes["tie_disagreements"])
    if classes["commonest_class_share"] > COMMONEST_CLASS or _chance(decided - agreeing, decided) >= INT8_CHANCE:
        return ""
    return f"its class is float64's for only {agreeing} of {decided} images"


def _chance(differing: int, images: int) -> float:
    """Return how probable at least so many differences are at INT8_AGREEMENT, from the binomial distribution."""
    p = 1 - INT8_AGREEMENT
    return 1 - math.fsum(math.comb(images, k) * p**k * (1 - p) ** (images - k) for k in range(differing))


@dataclass(frozen=True)
class _Path:
    """One output against its bound: errors by row, as shares of the largest exact answer.

    `lost_channel` names a channel beyond its own limit, if there is one.
    """

    name: str
    errors: Array
    not_finite: int
    bound: Bound
    by_mean: bool
    lost_channel: str

    @classmethod
    def of(cls, name: str, exact: Observation, observed: Observation, limits: Bounds, rule: Rule) -> "_Path":
        bound, answers = limits.of(name), _rows(observed.outputs[name])
        errors = _shares(_rows(exact.outputs[name]), answers, bound)
        unlike = answers != _rows(exact.outputs[name])
        not_finite = int((~np.isfinite(answers) & unlike).any(axis=1).sum())
        lost = "" if not_finite else _lost_channel(name, exact.outputs[name], observed.outputs[name], limits, rule)
        by_mean = rule.format == "int8" or (bound.jumps and rule.format != "fp32")
        return cls(name, errors, not_finite, bound, by_mean, lost)

    @property
    def mean(self) -> float:
        return _finite(self.errors.mean())

    @property
    def mean_limit(self) -> float:
        """The mean over 64 rows may be 1.5 times that of the noise, and more over fewer rows."""
        return max(self.bound.limit / 2, _of_mean(len(self.errors)) * self.bound.noise_mean)

    @property
    def off(self) -> int:
        return int((self.errors > self.bound.limit).sum())

    @property
    def allowed_off(self) -> int:
        if self.by_mean:
            return len(self.errors)
        return _allowed_off(len(self.errors), self.bound.noisy_off) if self.bound.jumps else 0

    @property
    def excess(self) -> float:
        return self.mean / self.mean_limit if self.by_mean else _finite(self.errors.max(initial=0.0)) / self.bound.limit

    @property
    def is_bad(self) -> bool:
        return self.not_finite > 0 or (self.excess > 1 if self.by_mean else self.off > self.allowed_off)


def _lost_channel(name: str, exact: Array, observed: Array, limits: Bounds, rule: Rule) -> str:
    """Return a description of the channel that exceeds its limit, empty if none does.

    Few rows have no typical error: the noise was drawn for other rows, and one row with a flipped spike dominates.
    """
    if len(exact) < (FEWEST_ROWS_SPIKING if limits.of(name).jumps else FEWEST_ROWS):
        return ""
    for axis, noise in limits.channels.get(name, {}).items():
        if exact.shape[axis] != len(noise):  # the shape differs between batches
            continue
        most = _channel_limits(exact, axis, noise, rule)
        errors = _typical(_by_channel(_difference(exact, observed), axis), limits.of(name), rule)
        channel = int(np.argmax(errors - most))
        if errors[channel] > most[channel]:
            return (
                f"{_named(name)} is off by {errors[channel]:.1e} on average in channel {channel} of axis {axis} "
                f"({most[channel]:.1e} allowed)"
            )
    return ""


def _allowed_off(rows: int, noisy_off: float) -> int:
    """Return how many rows of a network with thresholds may be off: twice the share seen in noise, within its cap."""
    usual = max(OFF_AT_LEAST, int(rows * OFF_SHARE))
    return max(usual, min(int(rows * OFF_CAP), 2 + math.ceil(2 * rows * noisy_off)))


def _of_mean(rows: int) -> float:
    return 1 + 4 / math.sqrt(rows)


def _unclear(paths: Sequence[_Path], codes: "_Codes | None", *, is_wrong: bool) -> str:
    """Return why correct and wrong variants cannot be distinguished in this format, empty if they can.

    A mean is compared with noise, so noise near the spread hides any error. A limit per row is fixed: noise near it
    explains a row that exceeds it.
    """
    for path in paths:
        bound = path.bound
        noise = bound.noise_mean if path.by_mean else bound.noise_median
        most = VOID_SHARE * bound.spread if path.by_mean else bound.limit / 2 if is_wrong else math.inf
        if noise > most and bound.spread > CONSTANT:
            return (
                f"rounding alone changes {_named(path.name)} by {noise:.1e} of the largest, and the answers to two "
                f"inputs differ by only {bound.spread:.1e}"
            )
    if codes and codes.noise > CODES_CAP:
        return f"rounding alone flips {codes.noise:.1e} of the codes"
    return ""


@dataclass(frozen=True)
class _Codes:
    """The neurons' codes: the flipped share and its limit."""

    flipped: float
    limit: float
    noise: float

    @classmethod
    def of(cls, exact: Observation, observed: Observation, limits: Bounds, rule: Rule) -> "_Codes | None":
        by_image = _flipped(exact, observed)
        if by_image is None or limits.codes is None or rule.format == "int8":  # which is judged by its classes
            return None
        if rule.format == "fp32":  # an early flip causes thousands more, so most images have none
            allowed = min(_allowed_off(len(by_image), limits.codes), len(by_image) - 1)
            return cls(float(np.sort(by_image)[-1 - allowed]), CODES_FLOOR["fp32"], limits.codes)
        most = min(CODES_CAP, _of_mean(len(by_image)) * limits.codes)
        return cls(float(by_image.mean()), max(CODES_FLOOR[rule.format], most), limits.codes)


def _wrong(paths: Sequence[_Path], codes: _Codes | None) -> str:
    """Return a description of the exceeded limit, empty if none is."""
    for path in paths:
        if path.is_bad and path.by_mean:
            allowed = f"({path.mean_limit:.1e} allowed)"
            return f"{_named(path.name)} is off by {path.mean:.1e} of the largest on average {allowed}"
        if path.is_bad:
            but = f" ({path.allowed_off} allowed)" if path.allowed_off else ""
            rows = f"{path.off} of {len(path.errors)}{but}"
            return f"{_named(path.name)} is off by more than {path.bound.limit:.1e} of the largest for {rows}"
        if path.lost_channel:
            return path.lost_channel
    if codes and codes.flipped > codes.limit:
        return f"{codes.flipped:.1e} of the codes flipped ({codes.limit:.1e} allowed)"
    return ""


def _broken(paths: Sequence[_Path]) -> str:
    """Return errors that rounding cannot explain: values that are not finite, or far outside the answers' range."""
    for path in paths:
        if path.not_finite:
            return f"{_named(path.name)} is not finite for {path.not_finite} of {len(path.errors)}"
        if np.median(path.errors) > RANGE_CAP:
            return f"{_named(path.name)} is off by {_finite(np.median(path.errors)):.1e} times the largest"
    return ""


def _undefined(exact: Observation) -> str:
    """Return why there is nothing to compare with, if float64 itself gives answers that are not numbers.

    An infinity counts as a number: a model may mask with -inf.
    """
    for name, values in exact.outputs.items():
        rows = _rows(values)
        count = int((np.isnan(rows).any(axis=1) | (np.isinf(rows).all(axis=1) & (rows.shape[1] > 0))).sum())
        if count:
            whose = f"{count} of {len(values)}"
            return f"{_named(name)} is not finite in float64 itself for {whose}: give other inputs or weights"
    return ""


def _mismatch(exact: Observation, observed: Observation) -> str:
    """Return how the answers' shapes differ, empty if they do not."""
    for name in dict.fromkeys([*exact.outputs, *observed.outputs]):
        sides = [one.outputs.get(name) for one in (exact, observed)]
        wanted, found = ("nothing" if one is None else "x".join(map(str, one.shape)) for one in sides)
        if wanted != found:
            return f"{_named(name)} is {found}, but {wanted} in float64"
    if exact.codes is not None and observed.codes is not None and exact.codes.shape != observed.codes.shape:
        return f"its neurons give {observed.codes.shape[1]} codes per image, but {exact.codes.shape[1]} in float64"
    return ""


def _refused(exact: Observation, limits: Bounds, rule: Rule, reason: str) -> Check:
    return Check(
        passed=False,
        void=not limits.stable and not rule.trained,
        rule="codes" if rule.spiking else "outputs",
        images=_images(exact),
        max_abs_error=NOT_FINITE,
        error_share=NOT_FINITE,
        tolerance=ERROR_CAP[rule.format],
        argmax_disagreements=None,
        note=reason,
    )


def off(exact: Observation, observed: Observation, limits: Bounds, rule: Rule) -> NDArray[np.bool_]:
    """Return per image (images, 2) whether its outputs are off, as of another shape, and whether its codes are."""
    found = np.zeros((_images(exact), 2), np.bool_)
    if _mismatch(exact, observed):
        return ~found
    found[:, 0] = excess(exact, observed, limits, rule) > 1
    flipped = _flipped(exact, observed)
    if flipped is not None:
        found[:, 1] = flipped > CODES_FLOOR["fp32"]
    return found


def excess(exact: Observation, observed: Observation, limits: Bounds, rule: Rule) -> Array:
    """Return each image's error as a multiple of the limit (images,), for its worst output.

    In half precision most images of a network with thresholds exceed the limit, so the share of the spread that makes
    a check void replaces it. An output without a batch dimension says nothing about single images.
    """
    images = _images(exact)
    found = np.zeros(images)
    for name, values in exact.outputs.items():
        bound = limits.of(name)
        most = bound.limit if rule.format == "fp32" else max(bound.limit, VOID_SHARE * bound.spread)
        if len(values) == images:
            errors = _shares(_rows(values), _rows(observed.outputs[name]), bound)
            found = np.maximum(found, errors / most)
    return found


def row_cap(number_format: Format, *, jumps: bool) -> float:
    """Return the most that `row_limit` can be; no two answers differ by more than twice the largest, and half is 1."""
    return ERROR_CAP[number_format] if number_format == "fp32" or not jumps else 1.0


def row_limit(bound: Bound, rule: Rule) -> float:
    """Return the limit of one row, also for an output that is judged by its mean.

    In half precision most rows of a network with thresholds exceed the bound's own limit, but few exceed what the mean
    of a few may be. Half the spread still tells one image's answer from another's.
    """
    if rule.format == "fp32" or not bound.jumps or not math.isfinite(bound.spread):
        return bound.limit
    return max(bound.limit, min(_of_mean(FEWEST_ROWS) * bound.noise_mean, bound.spread / 2))


def changed(before: Mapping[str, Array], after: Mapping[str, Array], limits: Bounds) -> str:
    """Return how the answer to the same batch changed by more than its limit, empty if it did not."""
    for name in dict.fromkeys([*before, *after]):
        if name not in before or name not in after or not same_sizes(before[name], after[name]):
            return f"{_named(name)} has a different shape than in the check"
        bound = limits.of(name)
        distance = float(_distances(before[name].reshape(1, -1), after[name].reshape(1, -1))[0]) / bound.largest
        if distance > bound.limit:
            return f"{_named(name)} is off by {_finite(distance):.1e} of the largest from the answer to the same inputs"
    return ""


def _argmax(exact: Observation, observed: Observation, tie_share: float) -> dict[str, Any]:
    """Return how often the class equals float64's, for scores (images, classes), with and without ties.

    A tie is an image whose two best classes differ by less than `tie_share` of the largest answer: two allowed errors.
    """
    scores, others = next(iter(exact.outputs.values())), next(iter(observed.outputs.values()))
    if scores.ndim != 2 or scores.shape[1] < 2:
        return {"argmax_disagreements": None}
    best = np.sort(scores, axis=1)[:, -2:]
    ties = _difference(best[:, 0], best[:, 1]) < tie_share * np.abs(_numbers(scores)).max(initial=0.0)
    classes, theirs = scores.argmax(axis=1), np.nan_to_num(others, nan=-np.inf).argmax(axis=1)
    differs = classes != theirs
    return {
        "argmax_disagreements": int(differs.sum()),
        "ties": int(ties.sum()),
        "tie_disagreements": int((differs & ties).sum()),
        "commonest_class_share": float(np.bincount(classes).max() / len(classes)),
    }


def _flipped(exact: Observation, observed: Observation) -> Array | None:
    """Return the share of differing codes per image, None if either side hides them."""
    if exact.codes is None or observed.codes is None:
        return None
    shares: Array = np.not_equal(exact.codes, observed.codes).mean(axis=1)
    return shares


def _rows(values: Array) -> Array:
    return values.reshape(len(values), -1)


def _distances(one: Array, other: Array) -> Array:
    """Return the largest distance in each row, `NOT_FINITE` if a value is not finite and the other one differs."""
    largest = np.abs(_difference(one, other)).max(axis=1, initial=0.0)
    found: Array = np.nan_to_num(largest, nan=NOT_FINITE, posinf=NOT_FINITE)
    return found


def _difference(one: Array, other: Array) -> Array:
    """Return how much larger the other is; two infinities of the same sign do not differ."""
    with np.errstate(invalid="ignore", over="ignore"):  # inf - inf
        found: Array = np.where(one == other, 0.0, other - one)
    return found


def _numbers(values: Array) -> Array:
    """Return the values with 0 for those that are not finite."""
    found: Array = np.where(np.isfinite(values), values, 0.0)
    return found


def _shares(exact: Array, answers: Array, bound: Bound) -> Array:
    """Return the error of each row as a share of the largest exact answer, or of its own if that is larger."""
    found: Array = _distances(exact, answers) / np.maximum(
        bound.largest, np.abs(_numbers(exact)).max(axis=1, initial=0.0)
    )
    return found


def _finite(value: float) -> float:
    return float(min(value, NOT_FINITE))


def _images(exact: Observation) -> int:
    return max((len(values) for values in exact.outputs.values()), default=0)


def _named(path: str) -> str:
    return "the output" if path == ONLY else f"the output {path}"
