"""Accuracy as top-1 or a user's metric: its record field, its text, and the judgement of a drop from fp32."""

from collections.abc import Iterable, Sequence
from typing import Literal

from benchd.daemon.records import Accuracy, Record
from benchd.daemon.verdicts import proportions
from benchd.daemon.verdicts.statistics import Interval

RULE_OF_THREE = 3.0
"""If no event occurs in n trials, the event rate is at most 3/n with 95 % confidence."""

NOT_ASKED = "no images with labels were given, or no trained weights"
"""The reason in `missing` if accuracy was not requested."""


def counted(
    *, right: int, gained: int, lost: int, images: int, data: str, data_sha256: str, is_reference: bool = False
) -> Accuracy:
    """Return the accuracy of a variant from its number of correct images and its differences from fp32.

    `gained` counts the images that only the variant gets right, `lost` those that only fp32 gets right. The drop of
    plain fp32 itself (`is_reference`) is exactly 0, however few images there are.
    """
    share, reference_right = proportions.wilson(right, images), right - gained + lost
    drop = Interval(0.0, 0.0) if is_reference else proportions.paired_difference(lost, gained, images)
    return Accuracy(
        images=images,
        right=right,
        value=right / images,
        low=share.low,
        high=share.high,
        reference_right=reference_right,
        reference=reference_right / images,
        gained=gained,
        lost=lost,
        drop=(lost - gained) / images,
        drop_low=drop.low,
        drop_high=drop.high,
        data=data,
        data_sha256=data_sha256,
    )


def of_metric(
    *,
    metric: str,
    better: Literal["higher", "lower"],
    value: float,
    reference: float,
    drawn: Sequence[tuple[float, float]],
    images: int,
    is_identical: bool,
    data: str,
    data_sha256: str,
) -> Accuracy:
    """Return the accuracy by a user's metric; `drawn` contains the variant's and fp32's values for each resample.

    The intervals are percentile intervals. The drop of identical answers (`is_identical`) is exactly 0. If differing
    answers leave every resample unchanged, the drop is bounded by 3 of `images` items, as for a share, scaled by the
    larger value.
    """
    sign = 1.0 if better == "higher" else -1.0
    import numpy as np  # noqa: PLC0415 - reading records, which the base can, needs none

    values, references = np.array(drawn).T
    drops, drop = sign * (references - values), sign * (reference - value)
    (low, high), (drop_low, drop_high) = (np.percentile(draws, (2.5, 97.5)) for draws in (values, drops))
    if is_identical:
        drop_low = drop_high = 0.0
    elif not drops.any():
        drop_high = RULE_OF_THREE / images * max(abs(value), abs(reference))
        drop_low = -drop_high
    return Accuracy(
        metric=metric,
        better=better,
        images=images,
        value=value,
        low=min(float(low), value),
        high=max(float(high), value),
        reference=reference,
        drop=drop,
        drop_low=min(float(drop_low), drop),
        drop_high=max(float(drop_high), drop),
        draws=len(drawn),
        data=data,
        data_sha256=data_sha256,
    )


def figure(accuracy: Accuracy) -> str:
    """Return the value with its interval, as text; a share is in percent."""
    if accuracy.is_share:
        return f"{100 * accuracy.value:.1f} [{100 * accuracy.low:.1f}, {100 * accuracy.high:.1f}] %"
    return f"{accuracy.value:.4g} [{accuracy.low:.4g}, {accuracy.high:.4g}]"


def heading(records: Iterable[Record]) -> str:
    """Return the names of the records' metrics; shares are marked with their unit."""
    judged = [record.accuracy for record in records if record.accuracy]
    return ", ".join(
        dict.fromkeys(f"{accuracy.metric} %" if accuracy.is_share else accuracy.metric for accuracy in judged)
    )


def drop(accuracy: Accuracy) -> str:
    """Return the drop from fp32 with its interval, as text; the drop of a share is in percentage points."""
    if accuracy.is_share:
        return f"{100 * accuracy.drop:.2f} [{100 * accuracy.drop_low:.2f}, {100 * accuracy.drop_high:.2f}] %"
    return f"{accuracy.drop + 0.0:.3g} [{accuracy.drop_low:.3g}, {accuracy.drop_high:.3g}]"


def why_dropped(accuracy: Accuracy | None, limit: float) -> str | None:
    """Return why the upper end of the drop's interval is not below `limit`, or None if it is.

    The limit is a share: of all images for top-1, otherwise of plain fp32's value.
    """
    if accuracy is None:
        return "accuracy was not measured"
    most = limit if accuracy.is_share else limit * abs(accuracy.reference)
    if accuracy.drop_high < most or accuracy.drop_high <= 0.0:  # no loss is within a limit of 0 too
        return None
    if accuracy.lost is None or accuracy.gained is None:
        return (
            f"{accuracy.metric} drop {drop(accuracy)} on {accuracy.images} items is not proven to be below "
            f"{100 * limit:.4g} % of {accuracy.reference:.4g}{'' if most else ', which any loss exceeds'}"
        )
    reason = f"accuracy drop {drop(accuracy)}"
    needed = proportions.items_needed(accuracy.lost, accuracy.gained, accuracy.images, limit)
    if needed is None:
        return f"{reason} is not below {100 * limit:.4g} %"
    return (
        f"{reason} on {accuracy.images} images is not proven to be below {100 * limit:.4g} %: "
        f"that needs about {_round_up(needed)} images at these rates"
    )


def _round_up(count: int) -> int:
    step = int(10 ** max(0, len(str(count)) - 2))
    return -(-count // step) * step
