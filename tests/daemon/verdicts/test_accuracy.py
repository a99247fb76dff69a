"""Top-1 in a record and in words, and when a drop is small enough."""

import pytest
from records_made import accuracy as counted

from benchd.daemon.verdicts import accuracy


def test_the_counts_give_shares_intervals_and_the_drop():
    found = counted(right=340, gained=2, lost=6, images=360)
    assert (found.top1, found.reference_right) == (pytest.approx(340 / 360), 344)
    assert found.low < found.top1 < found.high
    assert found.drop == pytest.approx(found.reference_top1 - found.top1)
    assert found.drop_low < 0 < found.drop < found.drop_high
    assert accuracy.top1(found) == "94.4 [91.6, 96.4]"
    assert accuracy.drop(found) == "1.11 [-0.54, 3.10]"


@pytest.mark.parametrize(
    ("found", "limit", "reason"),
    [
        (counted(images=1000), 0.01, None),
        (None, 0.01, "accuracy was not measured"),
        (
            counted(images=100),
            0.01,
            "accuracy drop 0.00 [-3.70, 3.70] % on 100 images is not proven below 1 %: "
            "that needs about 390 images at these rates",
        ),
        (counted(lost=30, images=100), 0.01, "accuracy drop 30.00 [21.89, 39.58] % is not below 1 %"),
        (counted(gained=30, images=100), 0.01, None),
    ],
)
def test_the_upper_end_of_the_drop_decides(found, limit, reason):
    assert accuracy.why_dropped(found, limit) == reason


def test_plain_fp32_drops_nothing_on_however_few_images():
    itself = accuracy.counted(right=1, gained=0, lost=0, images=2, data="", data_sha256="", is_reference=True)
    assert (itself.drop_low, itself.drop_high) == (0.0, 0.0)
    assert accuracy.why_dropped(itself, 0.001) is None
