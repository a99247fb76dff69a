"""Top-1 in a record and in words, and when a drop is small enough."""

import pytest
from records_made import accuracy as counted

from benchd.daemon.verdicts import accuracy


def test_the_counts_give_shares_intervals_and_the_drop():
    result = counted(right=340, gained=2, lost=6, images=360)
    assert (result.value, result.reference_right) == (pytest.approx(340 / 360), 344)
    assert result.low < result.value < result.high
    assert result.drop == pytest.approx(result.reference - result.value)
    assert result.drop_low < 0 < result.drop < result.drop_high
    assert accuracy.figure(result) == "94.4 [91.6, 96.4] %"
    assert accuracy.drop(result) == "1.11 [-0.54, 3.10] %"


@pytest.mark.parametrize(
    ("found", "limit", "reason"),
    [
        (counted(images=1000), 0.01, None),
        (None, 0.01, "accuracy was not measured"),
        (
            counted(images=100),
            0.01,
            "accuracy drop 0.00 [-3.70, 3.70] % on 100 images is not proven to be below 1 %: "
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


def metric(drawn, **fields):
    parts = {"metric": "iou", "better": "higher", "value": 0.5, "reference": 0.6, "images": 100, "is_identical": False}
    return accuracy.of_metric(drawn=drawn, data="", data_sha256="", **(parts | fields))


def test_a_metric_drops_towards_what_is_worse_with_the_interval_of_its_draws():
    drawn = [(0.5 + place / 1000, 0.6) for place in range(-20, 21)]
    worse = metric(drawn)
    assert (worse.drop, worse.drop_low, worse.drop_high) == pytest.approx((0.1, 0.081, 0.119))
    assert metric(drawn, better="lower").drop == pytest.approx(-0.1)
    assert accuracy.figure(worse) == "0.5 [0.481, 0.519]"
    assert accuracy.drop(worse) == "0.1 [0.081, 0.119]"


def test_a_limit_of_a_metric_is_a_share_of_plain_fp32_s_figure():
    drawn = [(0.5, 0.6)] * 3
    assert accuracy.why_dropped(metric(drawn), 0.2) is None
    reason = "iou drop 0.1 [0.1, 0.1] on 100 items is not proven to be below 10 % of 0.6"
    assert accuracy.why_dropped(metric(drawn), 0.1) == reason


def test_a_share_of_nothing_is_kept_by_no_loss_alone():
    fields = {"metric": "errors", "better": "lower", "reference": 0.0}
    assert accuracy.why_dropped(metric([(0.0, 0.0)] * 3, value=0.0, **fields), 0.01) is None
    worse = accuracy.why_dropped(metric([(0.1, 0.0)] * 3, value=0.1, **fields), 0.01)
    assert worse.endswith("is not proven to be below 1 % of 0, which any loss exceeds")


def test_answers_that_change_no_draw_may_lose_three_items_and_identical_ones_none():
    same = {"value": 0.6, "drawn": [(0.6, 0.6)] * 3}
    assert metric(**same).drop_high == pytest.approx(0.6 * 3 / 100)
    assert metric(**same, is_identical=True).drop_high == 0.0
