"""Judges the numerical check from arrays alone: a variant's answers compared with those in float64.

Three quantities are compared, all as shares of the largest exact answer:

    error   of the variant on each image
    noise   of the exact model with weights, inputs and each operation's result rounded to the variant's number format
    spread  the distance between the exact answers to two different images

The noise shows how far a correct variant of this network may deviate, without running any variant: a smooth network
multiplies rounding by a constant, and neurons with thresholds turn it into extra or missing spikes. The spread ensures
that the check can fail: a variant that is off by less than half of it cannot be answering a different image. If the
noise alone approaches the spread, the format is too coarse for the network, and no verdict on a variant is possible.

Integers, such as classes, masks and the neurons' codes, are either equal or not: their error is the share that differs.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from benchd.daemon.records import COMMONEST_CLASS, Check
from benchd.daemon.shipping.manifest import JUMPING_SHARE
from benchd.daemon.verdicts.recommend import MIN_AGREEMENT
from benchd.daemon.worker.structures import OF_BATCH, ONLY, same_sizes

Format = Literal["fp32", "fp16", "bf16", "int8"]
Array = NDArray[Any]

HOLDS: dict[Format, tuple[int, float]] = {
    "fp32": (22, 2.0**-149),
    "fp16": (11, 2.0**-24),
    "bf16": (8, 2.0**-133),
    "int8": (8, 2.0**-149),
}
"""Each format's bits of precision and smallest step; two fewer for float32, because sums are rounded too."""

ERROR_CAP: dict[Format, float] = {"fp32": 1e-4, "fp16": 5e-2, "bf16": 2e-1, "int8": 0.5}
"""The largest permitted error of an image: larger noise is caused by jumps, not by rounding in a smooth network.

For integers, float32's value is the share that may differ, in every format.
"""

# always allowed in float32, where sums of thousands of numbers are rounded more often than in the noise
ERROR_FLOOR = 2e-5
FACTOR, CHANNEL_FACTOR = 1.5, 8.0
"""Correct variants reach 1.3 times an image's largest noise, 1.2 times the mean noise and 2 times a channel's noise.

A channel's noise comes from few draws, so one channel in a thousand has little noise by chance.
"""

FEW = 3  # number of integers that may differ in half precision, even if they did not in the noise
RANGE_CAP = 2.0  # multiple of the largest exact answer: the largest error that is possible within the range of answers
FEWEST_ROWS = 8  # needed for a typical error; twice as many if spikes may distort a few
# minimum probability of this many differing classes in an int8 variant that is just good enough to ship
INT8_CHANCE = 0.01
SMALL_SHARE = 0.1  # share of answers: it is reported if more than this are below the allowed error
CONSTANT = 2.0 ** -HOLDS["fp32"][0]  # a smaller spread counts as none, because float32 cannot represent it
CODES = "the neurons' codes"
SAME_ANSWERS = "float64 gives the same answer to all inputs, so a wrong answer cannot be distinguished from a right one"
NOT_FINITE = 1e99  # replaces inf and NaN, which a record cannot contain


@dataclass(frozen=True)
class Observation:
    """A model's answers: outputs by path, each (rows, ...) in float64 or int64, and inner codes (images, features).

    A row is an image, or a whole batch for an output without a batch dimension. `codes` is None if they are hidden.
    """

    outputs: dict[str, Array]
    codes: NDArray[np.int8] | None

    @property
    def judged(self) -> dict[str, Array]:
        """Return the outputs together with the codes."""
        return self.outputs | ({} if self.codes is None else {CODES: self.codes})


@dataclass(frozen=True)
class Rule:
    """The rule that applies: the format, whether neurons fire at thresholds, and whether the weights are trained."""

    format: Format
    spiking: bool
    trained: bool


@dataclass(frozen=True)
class Bound:
    """The limits of one output; all figures except the last two are shares of the largest exact answer, `largest`.

    `spread` is infinite if there is only one row. `limit` applies to a row, and `noisy_off` is the share of noisy rows
    that exceed it. `jumps` is set if rounding can cause a large error, such as an extra or missing spike, and `whole`
    if the answers are integers, for which the figures are the shares that differ.
    """

    largest: float
    spread: float
    noise_mean: float
    noise_sd: float
    limit: float
    noisy_off: float
    jumps: bool
    whole: bool


@dataclass(frozen=True)
class Bounds:
    """The limits of each output and of the codes, by name, and whether shapes are unaffected by noise.

    `channels` contains (2, channels) arrays by name and channel axis: the noise in each channel of an output, as a
    share of the channel's largest answer, and that answer.
    """

    outputs: dict[str, Bound]
    stable: bool
    channels: dict[str, dict[int, Array]]

    def of(self, path: str) -> Bound:
        """Return the bound of an output; if its shape changes between batches, they share one."""
        return self.outputs[_name(path)]


Draw = tuple[Observation, Observation]
"""The exact answers to some images, and the answers with rounding noise."""


def bounds(exact: Observation, draws: Iterable[Draw], rule: Rule) -> Bounds:
    """Return the limits for a variant's answers, based on the float64 answers and draws of rounding noise.

    No more draws are requested after one that changes a shape, from which limits cannot be computed.
    """
    alike, stable = list[Draw](), True
    for draw in draws:
        stable = not _mismatch(*draw)
        if not stable:
            break
        alike.append(draw)
    outputs, channels = {}, {}
    for name in dict.fromkeys(map(_name, exact.judged)):
        values, pairs = _alike(exact, name), list[tuple[Array, Array]]()
        for draw in alike if stable else []:
            pairs += zip(*(_alike(drawn, name) for drawn in draw), strict=True)
        outputs[name] = _bound(values, pairs, rule)
        has_channels = len(values) == 1 and name != CODES
        channels[name] = _channel_noise(values[0], pairs, outputs[name], rule) if has_channels else {}
    return Bounds(outputs, stable, channels)


def _name(path: str) -> str:
    return path.partition(OF_BATCH)[0]


def _alike(observation: Observation, name: str) -> list[Array]:
    return [values for path, values in observation.judged.items() if _name(path) == name]


def _bound(exact: Sequence[Array], pairs: Sequence[tuple[Array, Array]], rule: Rule) -> Bound:
    whole, finite = is_whole(exact[0]), _numbers(_rows(exact[0]))
    largest = 1.0 if whole else max(float(np.abs(_numbers(part)).max(initial=0.0)) for part in exact) or 1.0
    noise = (
        np.concatenate([_distances(_rows(expected), _rows(noisy)) for expected, noisy in pairs] or [np.zeros(1)])
        / largest
    )
    between = _distances(finite, np.roll(finite, 1, axis=0))
    spread = float(between.mean()) / largest if len(exact) == 1 and len(finite) > 1 else math.inf
    most = min(ERROR_CAP[rule.format], spread / 2 if spread > CONSTANT else math.inf)
    least, reached = ERROR_FLOOR if rule.format == "fp32" else 0.0, FACTOR * float(noise.max())
    limit = ERROR_CAP["fp32"] if whole else min(most, max(least, reached))
    return Bound(
        largest=largest,
        spread=spread,
        noise_mean=_finite(noise.mean()),
        noise_sd=_finite(noise.std()) if noise.max() < NOT_FINITE else NOT_FINITE,
        limit=limit,
        noisy_off=float((noise > limit).mean()),
        jumps=whole or rule.spiking or reached > most,
        whole=whole,
    )


def _channel_noise(exact: Array, pairs: Sequence[tuple[Array, Array]], bound: Bound, rule: Rule) -> dict[int, Array]:
    """Return the noise in each channel by axis, as a share of the channel's largest answer, and that answer.

    A channel whose noise is small by chance gets the noise of the median channel; with few integers, most channels show
    none.
    """
    shares = {}
    for axis in range(1, exact.ndim if exact.size else 1):  # every axis except the rows
        largest = _largest(exact, axis)
        draws = [_typical(_difference(*pair), axis, bound, rule) for pair in pairs]
        noise = np.max(draws, axis=0) if draws else np.zeros(len(largest))
        share = np.divide(noise, largest, out=np.zeros_like(noise), where=largest > 0)
        usual = float((np.mean if bound.whole else np.median)(share[largest > 0])) if (largest > 0).any() else 0.0
        shares[axis] = np.stack([np.maximum(share, usual), largest])
    return shares


def _channel_limits(exact: Array, axis: int, noise: Array, rule: Rule) -> Array:
    """Return the allowed error of each channel, so that small numbers among large ones have separate limits.

    In float32, it is at least ERROR_FLOOR times the channel's variation between rows.
    """
    share, largest = noise
    limits: Array = CHANNEL_FACTOR * share * np.maximum(largest, _largest(exact, axis))
    if is_whole(exact):
        numbers = exact.size / exact.shape[axis]
        limits += (FEW + 2 * np.sqrt(limits * numbers)) / numbers
    elif rule.format == "fp32":
        limits = np.maximum(limits, ERROR_FLOOR * _largest(_numbers(exact) - _numbers(exact).mean(axis=0), axis))
    return limits


def _largest(exact: Array, axis: int) -> Array:
    """Return the largest answer in each channel, 1 for integers."""
    if is_whole(exact):
        return np.ones(exact.shape[axis])
    largest: Array = np.abs(_numbers(exact)).max(axis=tuple(other for other in range(exact.ndim) if other != axis))
    return largest


def _typical(difference: Array, axis: int, bound: Bound, rule: Rule) -> Array:
    """Return the mean error of each channel; with spikes in float32, the median over the rows."""
    by_channel = np.moveaxis(np.abs(difference), axis, 1)
    errors = by_channel.reshape(*by_channel.shape[:2], -1).mean(axis=2)
    typical: Array = np.median(errors, axis=0) if bound.jumps and rule.format == "fp32" else errors.mean(axis=0)
    return typical


def judge(exact: Observation, observed: Observation, limits: Bounds, rule: Rule) -> Check:
    """Return the verdict on a variant's answers; `limits` may be based on more images than `exact`."""
    mismatch = _undefined(exact) or _mismatch(exact, observed)
    if mismatch:
        return _refused(exact, limits, rule, mismatch)
    paths = [_Path.of(name, exact, observed, limits, rule) for name in exact.outputs]
    worst = max(paths, key=lambda path: (path.is_bad, bool(path.lost_channel), path.excess))
    # int8 is judged by classes
    has_codes = CODES in exact.judged.keys() & observed.judged.keys() and rule.format != "int8"
    codes = _Path.of(CODES, exact, observed, limits, rule) if has_codes else None
    every = [*paths, *([codes] if codes else [])]
    classes = _argmax(exact, observed, _tie_share(paths[0].bound, rule))
    broken, wrong = _broken(paths), _wrong(every) or _disagrees(classes, _images(exact), rule)
    unclear = _unclear(paths)
    if wrong and rule.format == "int8" and not rule.trained:
        unclear = "with random weights, the answers are too close together to judge int8"
    is_constant = all(path.bound.spread <= CONSTANT for path in paths)
    notes = [wrong, unclear, SAME_ANSWERS if is_constant else "", *(path.small for path in paths)]
    return Check(
        passed=not (broken or wrong or unclear or is_constant),
        void=bool(unclear and not broken and not rule.trained) or (not (broken or wrong) and is_constant),
        rule="codes" if codes else "outputs",
        images=_images(exact),
        max_abs_error=_finite(worst.errors.max(initial=0.0) * worst.bound.largest),
        error_share=_finite(worst.errors.max(initial=0.0)),
        mean_error_share=worst.mean,
        tolerance=worst.limit,
        images_off=worst.off,
        images_off_allowed=worst.allowed_off,
        rounding_share=worst.bound.noise_mean,
        spread_share=worst.bound.spread if math.isfinite(worst.bound.spread) else None,
        flipped_share=codes.mean if codes else None,
        flipped_tolerance=codes.limit if codes else None,
        note=broken or "; ".join(filter(None, notes)),
        **classes,
    )


def _tie_share(bound: Bound, rule: Rule) -> float:
    """Return the distance between two classes that counts as a tie: two allowed errors or, in int8, two roundings."""
    return 2 * (2.0 ** -HOLDS["int8"][0] if rule.format == "int8" else bound.limit)


def _disagrees(classes: Mapping[str, Any], images: int, rule: Rule) -> str:
    """Return how an int8 variant's classes differ from float64's; empty if they do not or if classes prove nothing."""
    decided = images - classes.get("ties", 0)
    if rule.format != "int8" or classes["argmax_disagreements"] is None or not decided:
        return ""
    agreeing = decided - (classes["argmax_disagreements"] - classes["tie_disagreements"])
    if classes["commonest_class_share"] > COMMONEST_CLASS or _chance(decided - agreeing, decided) >= INT8_CHANCE:
        return ""
    return f"its class matches float64's for only {agreeing} of {decided} images"


def _chance(differing: int, images: int) -> float:
    """Return the probability of at least this many differences at MIN_AGREEMENT, by the binomial distribution."""
    p = 1 - MIN_AGREEMENT
    return 1 - math.fsum(math.comb(images, k) * p**k * (1 - p) ** (images - k) for k in range(differing))


@dataclass(frozen=True)
class _Path:
    """One output compared with its bound: errors by row, as shares of the largest exact answer.

    `lost_channel` describes a channel that exceeds its own limit, if there is one, and `small` says if many answers are
    below the allowed error. In float32, means are not judged, and `mean_limit` is infinite.
    """

    name: str
    errors: Array
    not_finite: int
    bound: Bound
    by_mean: bool
    mean_limit: float
    lost_channel: str
    small: str

    @classmethod
    def of(cls, name: str, exact: Observation, observed: Observation, limits: Bounds, rule: Rule) -> "_Path":
        bound, right, values = limits.of(name), exact.judged[name], observed.judged[name]
        errors, answers = _shares(_rows(right), _rows(values), bound), _rows(values)
        not_finite = int((~np.isfinite(answers) & (answers != _rows(right))).any(axis=1).sum())
        channels = [] if not_finite else _channels(name, right, limits, rule)
        lost = _lost_channel(name, right, values, channels, bound, rule)
        is_by_mean = by_mean(bound, rule)
        few = FEW / max(1, right.size) if bound.whole else 0.0
        mean_limit = math.inf if rule.format == "fp32" else _of_mean(bound, len(right)) + few
        small = "" if is_by_mean else _small(name, right, channels, bound)
        return cls(name, errors, not_finite, bound, is_by_mean, mean_limit, lost, small)

    @property
    def mean(self) -> float:
        return _finite(self.errors.mean())

    @property
    def limit(self) -> float:
        """Return the limit of a row, or of the mean."""
        return self.mean_limit if self.by_mean else self.bound.limit

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
        error = self.mean if self.by_mean else _finite(self.errors.max(initial=0.0))
        return error / self.limit if self.limit else math.inf if error else 0.0

    @property
    def is_bad(self) -> bool:
        return self.not_finite > 0 or self.off > self.allowed_off or self.mean > self.mean_limit


def by_mean(bound: Bound, rule: Rule) -> bool:
    """Return whether the mean over the rows is judged, because rounding may shift single rows by any distance."""
    return rule.format == "int8" or (bound.jumps and rule.format != "fp32")


def _channels(name: str, exact: Array, limits: Bounds, rule: Rule) -> list[tuple[int, Array]]:
    """Return the axes whose channels are judged, each with its limits.

    A small number of rows has no typical error: the noise was drawn for other rows, and one row with a flipped spike
    dominates.
    """
    bound = limits.of(name)
    fewest = math.inf if by_mean(bound, rule) and not bound.whole else FEWEST_ROWS * (2 if bound.jumps else 1)
    by_axis = limits.channels[_name(name)] if len(exact) >= fewest else {}
    return [
        (axis, _channel_limits(exact, axis, noise, rule))
        for axis, noise in by_axis.items()
        if exact.shape[axis] == noise.shape[1]  # otherwise the shape differs between batches
    ]


def _lost_channel(
    name: str, exact: Array, observed: Array, channels: Sequence[tuple[int, Array]], bound: Bound, rule: Rule
) -> str:
    """Return a description of the channel that exceeds its limit, empty if none does."""
    for axis, most in channels:
        errors = _typical(_difference(exact, observed), axis, bound, rule)
        channel = int(np.argmax(errors - most))
        if errors[channel] > most[channel]:
            return (
                f"{_named(name)} is off by {errors[channel]:.1e} on average in channel {channel} of axis {axis} "
                f"({most[channel]:.1e} allowed)"
            )
    return ""


def _small(name: str, exact: Array, channels: Sequence[tuple[int, Array]], bound: Bound) -> str:
    """Return how many answers are smaller than their allowed error, empty if few are."""
    most: Any = bound.limit * bound.largest
    for axis, allowed in channels:
        most = np.minimum(most, np.expand_dims(allowed, [other for other in range(exact.ndim) if other != axis]))
    share = float(((np.abs(exact) < most) & (exact != 0)).mean()) if exact.size else 0.0
    of = "the answers" if name == ONLY else f"the answers {name}"
    return f"{share:.0%} of {of} are smaller than the allowed error" if share > SMALL_SHARE else ""


def _allowed_off(rows: int, noisy_off: float) -> int:
    """Return how many rows of a network with thresholds may be off: 2 plus twice as many as with noise, up to a cap."""
    return min(max(2, int(rows * JUMPING_SHARE)), 2 + math.ceil(2 * rows * noisy_off))


def _of_mean(bound: Bound, rows: int) -> float:
    """Return the limit of the mean error over these rows: the noise's mean error plus four standard errors."""
    return FACTOR * bound.noise_mean + 4 * bound.noise_sd / math.sqrt(rows)


def _unclear(paths: Sequence[_Path]) -> str:
    """Return why correct and wrong variants cannot be distinguished in this format, empty if they can.

    Outputs that jump are compared with the noise, so noise close to the spread would hide any error.
    """
    for path in paths:
        noise, spread = path.bound.noise_mean, path.bound.spread
        if path.bound.jumps and noise > spread / (2 * FACTOR) and spread > CONSTANT:
            return (
                f"rounding alone changes {_named(path.name)} by {noise:.1e} of its largest value, but the answers "
                f"to two inputs differ by only {spread:.1e}"
            )
    return ""


def _wrong(paths: Sequence[_Path]) -> str:
    """Return a description of the exceeded limit, empty if none is exceeded."""
    for path in paths:
        of = "of its numbers" if path.bound.whole else "of the largest answer"
        if path.mean > path.mean_limit:
            return f"{_named(path.name)} is off by {path.mean:.1e} {of} on average ({path.mean_limit:.1e} allowed)"
        if path.is_bad:
            but = f" ({path.allowed_off} allowed)" if path.allowed_off else ""
            rows = f"{path.off} of {len(path.errors)}{but}"
            return f"{_named(path.name)} is off by more than {path.bound.limit:.1e} {of} for {rows}"
        if path.lost_channel:
            return path.lost_channel
    return ""


def _broken(paths: Sequence[_Path]) -> str:
    """Return errors that rounding cannot explain: values that are not finite, or are far outside the answers' range."""
    for path in paths:
        if path.not_finite:
            return f"{_named(path.name)} is not finite for {path.not_finite} of {len(path.errors)}"
        if np.median(path.errors) > RANGE_CAP:
            return f"{_named(path.name)} is off by {_finite(np.median(path.errors)):.1e} times the largest answer"
    return ""


def _undefined(exact: Observation) -> str:
    """Return why there is nothing to compare with, if even float64's answers are not numbers.

    An infinity counts as a number, because a model may mask with -inf.
    """
    for name, values in exact.outputs.items():
        rows = _rows(values)
        count = int((np.isnan(rows).any(axis=1) | (np.isinf(rows).all(axis=1) & (rows.shape[1] > 0))).sum())
        if count:
            whose = f"{count} of {len(values)}"
            return f"{_named(name)} is not finite in float64 itself for {whose}: give different inputs or weights"
    return ""


def _mismatch(exact: Observation, observed: Observation) -> str:
    """Return how the answers' shapes differ, empty if they do not."""
    for name in dict.fromkeys([*exact.outputs, *observed.outputs]):
        sides = [side.outputs.get(name) for side in (exact, observed)]
        wanted, given = ("nothing" if side is None else "x".join(map(str, side.shape)) for side in sides)
        if wanted != given:
            return f"{_named(name)} is {given}, but {wanted} in float64"
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
    """Return for each image (images, 2) whether its outputs are off (or misshapen), and whether its codes are."""
    are_off = np.zeros((_images(exact), 2), np.bool_)
    if _mismatch(exact, observed):
        return ~are_off
    are_off[:, 0] = excess(exact, observed, limits, rule) > 1
    flipped = _flipped(exact, observed)
    if flipped is not None:
        are_off[:, 1] = flipped > ERROR_CAP["fp32"]
    return are_off


def excess(exact: Observation, observed: Observation, limits: Bounds, rule: Rule) -> Array:
    """Return each image's error as a multiple of the limit (images,), for its worst output.

    In half precision, most images of a network with thresholds exceed the limit, so it is replaced by the share of the
    spread that makes a check void. An output without a batch dimension reveals nothing about single images.
    """
    images = _images(exact)
    most_off = np.zeros(images)
    for name, values in exact.outputs.items():
        bound = limits.of(name)
        most = bound.limit if rule.format == "fp32" else max(bound.limit, bound.spread / (2 * FACTOR))
        if len(values) == images:
            errors = _shares(_rows(values), _rows(observed.outputs[name]), bound)
            most_off = np.maximum(most_off, errors / most)
    return most_off


def row_cap(number_format: Format, *, jumps: bool) -> float:
    """Return the maximum of `row_limit`; two answers differ by at most twice the largest, and half of that is 1."""
    return ERROR_CAP[number_format] if number_format == "fp32" or not jumps else 1.0


def row_limit(bound: Bound, rule: Rule) -> float:
    """Return the limit of one row, even for an output that is judged by its mean.

    In half precision, most rows of a network with thresholds exceed the bound's own limit, but few exceed the mean of
    the noise by this multiple of its deviation. Half the spread still distinguishes the answers to different images.
    """
    if bound.whole:
        return 0.0
    if rule.format == "fp32" or not bound.jumps or not math.isfinite(bound.spread):
        return bound.limit
    return min(bound.noise_mean + FACTOR * bound.noise_sd, bound.spread / 2)


def changed(before: Mapping[str, Array], after: Mapping[str, Array], limits: Bounds) -> str:
    """Return how the answer to the same batch changed by more than its limit; empty if it did not."""
    for name in dict.fromkeys([*before, *after]):
        if name not in before or name not in after or not same_sizes(before[name], after[name]):
            return f"{_named(name)} has a different shape than in the check"
        bound = limits.of(name)
        distance = float(_distances(before[name].reshape(1, -1), after[name].reshape(1, -1))[0]) / bound.largest
        if distance > bound.limit:
            by = f"{_finite(distance):.1e} of its largest value"
            return f"{_named(name)} is off by {by} from the answer to the same inputs"
    return ""


def _argmax(exact: Observation, observed: Observation, tie_share: float) -> dict[str, Any]:
    """Return how often the class differs from float64's, for scores (images, classes), with and without ties.

    A tie is an image whose two best classes differ by less than `tie_share` of the largest answer: two allowed errors.
    """
    scores, others = next(iter(exact.outputs.values())), next(iter(observed.outputs.values()))
    if is_whole(scores) or scores.ndim != 2 or scores.shape[1] < 2:
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
    """Return the share of differing codes per image, None if either side's codes are hidden."""
    if exact.codes is None or observed.codes is None:
        return None
    shares: Array = np.not_equal(exact.codes, observed.codes).mean(axis=1)
    return shares


def _rows(values: Array) -> Array:
    return values.reshape(len(values), -1)


def is_whole(exact: Array) -> bool:
    """Return whether these answers are integers or booleans, which are either equal or not."""
    return exact.dtype.kind != "f"


def _distances(exact: Array, other: Array) -> Array:
    """Return the largest distance in each row, `NOT_FINITE` if a value is not finite and the other one differs.

    For integers, the share that differs is returned.
    """
    distances = np.abs(_difference(exact, other))
    largest = distances.mean(axis=1) if is_whole(exact) and exact.size else distances.max(axis=1, initial=0.0)
    finite: Array = np.nan_to_num(largest, nan=NOT_FINITE, posinf=NOT_FINITE)
    return finite


def _difference(exact: Array, other: Array) -> Array:
    """Return `other` minus `exact`, or 1 for an integer that differs; equal infinities do not."""
    if is_whole(exact):
        return np.not_equal(exact, other).astype(float)
    with np.errstate(invalid="ignore", over="ignore"):  # inf - inf
        difference: Array = np.where(exact == other, 0.0, other - exact)
    return difference


def _numbers(values: Array) -> Array:
    """Return the values with 0 in place of those that are not finite."""
    finite: Array = values if is_whole(values) else np.where(np.isfinite(values), values, 0.0)
    return finite


def _shares(exact: Array, answers: Array, bound: Bound) -> Array:
    """Return each row's error as a share of the largest exact answer, or of the row's own largest value if larger."""
    own = 0.0 if bound.whole else np.abs(_numbers(exact)).max(axis=1, initial=0.0)
    shares: Array = _distances(exact, answers) / np.maximum(bound.largest, own)
    return shares


def _finite(value: float) -> float:
    return float(min(value, NOT_FINITE))


def _images(exact: Observation) -> int:
    return max((len(values) for values in exact.outputs.values()), default=0)


def _named(path: str) -> str:
    return "the output" if path == ONLY else f"the output {path}"
