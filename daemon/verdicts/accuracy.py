"""Top-1 of a variant: the record's field from counts, its text, and whether the drop is small enough."""

from benchd.daemon.records import Accuracy
from benchd.daemon.verdicts import proportions
from benchd.daemon.verdicts.statistics import Interval

NOT_ASKED = "no images with labels were given, or no trained weights"
"""The reason in `missing` if accuracy was not requested."""


def counted(
    *, right: int, gained: int, lost: int, images: int, data: str, data_sha256: str, is_reference: bool = False
) -> Accuracy:
    """Return the accuracy of a variant from its number of correct images and its differences from fp32.

    `gained` counts the images that only the variant gets right, `lost` those that only fp32 gets right. Plain fp32
    itself (`is_reference`) loses nothing, however few the images.
    """
    share, reference_right = proportions.wilson(right, images), right - gained + lost
    drop = Interval(0.0, 0.0) if is_reference else proportions.paired_difference(lost, gained, images)
    return Accuracy(
        images=images,
        right=right,
        top1=right / images,
        low=share.low,
        high=share.high,
        reference_right=reference_right,
        reference_top1=reference_right / images,
        gained=gained,
        lost=lost,
        drop=(lost - gained) / images,
        drop_low=drop.low,
        drop_high=drop.high,
        data=data,
        data_sha256=data_sha256,
    )


def top1(accuracy: Accuracy) -> str:
    """Return the share with its interval, in percent."""
    return f"{100 * accuracy.top1:.1f} [{100 * accuracy.low:.1f}, {100 * accuracy.high:.1f}]"


def drop(accuracy: Accuracy) -> str:
    """Return the drop against fp32 with its interval, in percent."""
    return f"{100 * accuracy.drop:.2f} [{100 * accuracy.drop_low:.2f}, {100 * accuracy.drop_high:.2f}]"


def why_dropped(accuracy: Accuracy | None, limit: float) -> str | None:
    """Return why the drop is not proven below `limit`, else None: the upper end of its interval decides."""
    if accuracy is None:
        return "accuracy was not measured"
    if accuracy.drop_high < limit:
        return None
    reason = f"accuracy drop {drop(accuracy)} %"
    needed = proportions.items_needed(accuracy.lost, accuracy.gained, accuracy.images, limit)
    if needed is None:
        return f"{reason} is not below {100 * limit:.4g} %"
    return (
        f"{reason} on {accuracy.images} images is not proven below {100 * limit:.4g} %: "
        f"that needs about {_round_up(needed)} images at these rates"
    )


def _round_up(count: int) -> int:
    """Return the number rounded up to two significant digits."""
    step = int(10 ** max(0, len(str(count)) - 2))
    return -(-count // step) * step
