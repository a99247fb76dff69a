"""Metrics of torchmetrics as `--metric`, on nets that are wrong in one way each: `make test-hub`."""

import judged_nets
import packages
import pytest
from worker_jobs import changed, job, run_here

packages.installed("BENCHD_HUB", "test-hub", *packages.HUB)

from benchd.daemon.records import Variant  # noqa: E402
from benchd.daemon.verdicts import accuracy  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")  # of the package
LINES = """
import torch
from torchmetrics import JaccardIndex, MeanSquaredError
from torchmetrics.classification import MulticlassAccuracy
from torchmetrics.detection import MeanAveragePrecision


class Map(MeanAveragePrecision):
    def update(self, answers, targets):
        super().update([{**each, "scores": torch.ones(len(each["labels"]))} for each in answers], targets)

    def compute(self):
        return super().compute()["map"]


def iou():
    return JaccardIndex(task="binary")


def top1():
    return MulticlassAccuracy(num_classes=3, average="micro")


def rmse():
    return MeanSquaredError(squared=False)
"""


@pytest.mark.parametrize(
    ("net", "items", "metric"),
    [
        ("shifted", "boxes", "Map"),
        ("confused", "boxes", "Map"),
        ("Segmenter", "masks", "iou"),
        ("Spotter", "keywords", "top1"),
        ("Regressor", "levels", "rmse:lower"),
    ],
)
def test_a_planted_loss_is_found_and_none_in_the_same_answers(tmp_path, net, items, metric):
    (tmp_path / "judge.py").write_text(LINES)
    place = judged_nets.__file__
    a_job = job(tmp_path, module=f"{place}:{net}", batch_size=3)
    metric_fields = {"samples": f"{place}:{items}", "metric": f"{tmp_path}/judge.py:{metric}", "accuracy": "full"}
    outcomes = {
        name: run_here(changed(a_job, variant=Variant.parse(name), **metric_fields)) for name in ("bf16", "eager")
    }
    lost, plain = outcomes["bf16"].accuracy, outcomes["eager"].accuracy
    assert plain, outcomes["eager"].process.reason
    assert accuracy.why_dropped(lost, 0.02)
    assert (lost.reference, plain.drop_high) == (plain.value, 0.0)
    assert not accuracy.why_dropped(plain, 0.02)
