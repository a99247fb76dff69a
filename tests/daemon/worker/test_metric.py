"""A user's metric: what counts as one, every reason to refuse it, and the losses that a limit on it finds."""

import re

import judged_nets
import pytest
import torch
from worker_jobs import changed, job, run_here, trained

from benchd.daemon.errors import UsageError
from benchd.daemon.records import Variant
from benchd.daemon.verdicts import accuracy
from benchd.daemon.worker.metric import PerItem, _drawn, open_metric
from benchd.daemon.worker.structures import ONLY

FILE = judged_nets.__file__


def judged(tmp_path, net, items, metric, variant="eager", **fields):
    """Return the outcome of a net of `judged_nets` with its items and metric."""
    a_job = job(tmp_path, module=f"{FILE}:{net}", variant=Variant.parse(variant), batch_size=3)
    metric_fields = {"samples": f"{FILE}:{items}", "metric": f"{FILE}:{metric}", "accuracy": "full"}
    return run_here(changed(a_job, **(metric_fields | fields)))


@pytest.mark.parametrize(
    ("net", "items", "metric"),
    [
        ("shifted", "boxes", "overlap"),
        ("confused", "boxes", "overlap"),
        ("Segmenter", "masks", "iou"),
        ("Spotter", "keywords", "share_right"),
        ("Regressor", "levels", "rmse:lower"),
    ],
)
def test_a_planted_loss_is_found_by_its_limit_and_none_in_the_same_answers(tmp_path, net, items, metric):
    lost = judged(tmp_path, net, items, metric, "bf16").accuracy
    assert accuracy.why_dropped(lost, 0.02)
    plain = judged(tmp_path, net, items, metric).accuracy
    assert (plain.metric, plain.value, plain.drop_high) == (lost.metric, lost.reference, 0.0)


def test_an_onnx_file_s_answers_are_judged_in_the_form_of_the_module_s(tmp_path):
    result = judged(tmp_path, "shifted", "boxes", "overlap", "onnxruntime").accuracy
    assert (result.value, result.drop_high) == (1.0, 0.0)


@pytest.mark.parametrize("variant", ["eager", "onnxruntime", pytest.param("aoti", marks=pytest.mark.slow)])
def test_a_metric_gets_the_answers_in_the_form_that_the_module_returns(tmp_path, variant):
    outcome = judged(tmp_path, "Structured", "keywords", "in_own_form", variant)
    assert outcome.accuracy, outcome.process.reason
    assert outcome.accuracy.value == 1.0


@pytest.mark.parametrize(
    ("net", "items", "metric"), [("Spotter", "keywords", "spoils_scores"), ("shifted", "boxes", "spoils_boxes")]
)
def test_a_metric_may_change_its_arguments(tmp_path, net, items, metric):
    outcome = judged(tmp_path, net, items, metric)
    assert outcome.accuracy, outcome.process.reason
    assert (outcome.accuracy.value, outcome.accuracy.low) == (1.0, 1.0)


def test_an_object_with_update_and_compute_is_a_metric_and_each_call_begins_anew():
    metric = open_metric(f"{FILE}:MeanError:lower")
    answers, targets = torch.tensor([1.0, 2.0]), torch.tensor([1.0, 4.0])
    assert [metric.of(answers, targets) for _ in range(2)] == [1.0, 1.0]
    assert (metric.name, metric.better) == ("MeanError", "lower")


def test_labels_of_images_are_targets_too(tmp_path):
    a_job = changed(trained(tmp_path, "vim_tiny", batch_size=4), metric=f"{FILE}:share_right", accuracy=8)
    accuracy_ = run_here(a_job).accuracy
    assert (accuracy_.metric, accuracy_.images, accuracy_.value) == ("share_right", 8, 1.0)


def test_an_int8_file_is_not_judged_on_what_it_was_calibrated_with(tmp_path):
    given = judged(tmp_path, "Spotter", "keywords", "share_right", "onnxruntime-int8")
    assert "give --calibration" in given.process.reason


@pytest.mark.parametrize(
    ("items", "metric", "reason"),
    [
        (
            "keywords",
            "raises",
            'raises: judged_nets.py:LINE: in raises: raise ValueError("no boxes"): ValueError: no boxes',
        ),
        ("keywords", "Unready", 'in __init__: raise OSError("no labels.txt"): OSError: no labels.txt'),
        ("unreadable", "share_right", "--inputs judged_nets.py:unreadable: judged_nets.py:LINE: in unreadable: raise"),
        ("keywords", "undefined", "it returned nan for 40 items"),
        ("keywords", "changing", "for the same answers"),
        ("keywords", "several", "it returns map, mar; return one of these numbers"),
        ("untargeted", "share_right", "has no targets: add an array 'targets'"),
    ],
)
def test_a_metric_that_gives_no_number_ends_the_run_before_it_is_timed(tmp_path, items, metric, reason):
    outcome = judged(tmp_path, "Spotter", items, metric)
    assert reason in re.sub(r":\d+:", ":LINE:", outcome.process.reason)
    assert (outcome.flags, outcome.process.timing) == (["usage_error"], None)


@pytest.mark.parametrize(("name", "reason"), [("number", "int is not a function"), ("absent", "has no 'absent'")])
def test_what_is_no_metric_is_refused(name, reason):
    with pytest.raises(UsageError, match=reason):
        open_metric(f"{FILE}:{name}")


@pytest.mark.slow  # forty checks; the planted losses above are found, and unchanged nets kept, in each run
def test_of_forty_variants_that_only_round_otherwise_none_is_refused():
    metric, refused = open_metric(f"{FILE}:share_right"), []
    for seed in range(40):
        draw = torch.Generator().manual_seed(seed)
        scores = torch.randn(400, 3, generator=draw)
        exact, rounded = PerItem({ONLY: scores}), PerItem({ONLY: scores.half().float()})
        targets = PerItem({ONLY: torch.randint(3, (400,), generator=draw)})
        values = [metric.of(answers.taken(range(400)), targets.taken(range(400))) for answers in (rounded, exact)]
        result = accuracy.of_metric(
            metric=metric.name,
            better=metric.better,
            value=values[0],
            reference=values[1],
            drawn=list(_drawn(metric, rounded, exact, targets, 400, lambda percent: None)),
            images=400,
            is_identical=False,
            data="",
            data_sha256="",
        )
        refused += [seed] if accuracy.why_dropped(result, 0.02) else []
    assert refused == []
