"""The numerical check: each rule at its border, the reference's cache, and models that are wrong on purpose."""

from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
from PIL import Image
from worker_jobs import job, own_module

from benchd.daemon.errors import UnfitModel
from benchd.daemon.records import Variant
from benchd.daemon.worker import backends, check, subject
from benchd.daemon.worker.check import Observation

CPU = torch.device("cpu")


def checked(a_job):
    """Build, load and check the job here, without a worker."""
    built = subject.build(a_job)
    loaded = backends.load(a_job.case.variant, built.source, CPU, built.images[: a_job.case.batch_size])
    return check.check(built, loaded, a_job)


def onepass(folder, **fields):
    options = fields.pop("options", {"time_steps": 2})
    a_job = job(folder, model="snn_onepass", **fields)
    defaults = {"decay": 0.95, "threshold": 1.0, "reset": "zero", "encoding": "repeat", "p_scale": 1.0}
    return msgspec.structs.replace(a_job, options=defaults | {"batch_norm": False} | options)


def test_a_module_that_is_right_passes(tmp_path):
    result = checked(job(tmp_path, module=own_module(tmp_path)))
    assert result.passed
    assert (result.rule, result.images, result.tolerance) == ("outputs", 4, 1e-4)
    assert 0 < result.error_share < 1e-6
    assert result.note == "agreement on random weights, accuracy unknown"


def test_as_many_images_of_a_folder_are_checked_as_asked_for(tmp_path):
    images = tmp_path / "images" / "one"
    images.mkdir(parents=True)
    for number in range(300):
        Image.new("RGB", (4, 4), (number % 256, number // 256, 0)).save(images / f"{number}.png")
    a_job = job(tmp_path, module=own_module(tmp_path))
    limits = msgspec.structs.replace(a_job.limits, check_images=300)
    a_job = msgspec.structs.replace(a_job, limits=limits, data=f"imagefolder:{images.parent}")
    assert len(subject.build(a_job).images) == 300


@pytest.mark.parametrize(("error", "passed"), [(5e-5, True), (2e-4, False)])
def test_a_module_that_is_wrong_in_float32_fails_beyond_the_tolerance(tmp_path, error, passed):
    wrong = f"if images.dtype != torch.float64: return self.fc(images.flatten(1)) * (1 + {error})"
    result = checked(job(tmp_path, module=own_module(tmp_path, forward=wrong)))
    assert result.passed is passed
    assert result.error_share == pytest.approx(error, rel=0.05)


def test_an_overflow_fails_and_stays_a_finite_number(tmp_path):
    wrong = "if images.dtype != torch.float64: return self.fc(images.flatten(1)) / 0"
    result = checked(job(tmp_path, module=own_module(tmp_path, forward=wrong)))
    assert not result.passed
    assert np.isfinite(result.max_abs_error)
    assert np.isfinite(result.error_share)


@pytest.mark.parametrize("where", ["if images.dtype == torch.float64:", "if True:"])
def test_nothing_is_held_against_a_reference_that_is_not_finite(tmp_path, where):
    wrong = f"{where} return self.fc(images.flatten(1)) / 0"
    with pytest.raises(UnfitModel, match="the model's answer is NaN or infinite in float64"):
        checked(job(tmp_path, module=own_module(tmp_path, forward=wrong)))


@pytest.mark.parametrize("precision", ["fp32", "fp16", "bf16", "amp"])
def test_every_precision_of_a_spiking_net_is_its_own_baseline_in_eager(tmp_path, precision):
    result = checked(onepass(tmp_path, variant=Variant(precision=precision), batch_size=3))
    assert result.passed
    assert result.rule == "codes"
    assert result.images == 66  # whole batches of 3 that hold 64
    assert result.flipped_share == result.baseline_flipped_share
    assert result.flipped_share < 0.05


@pytest.mark.parametrize("encoding", ["repeat", "rate"])
def test_the_neurons_codes_are_compared_image_by_image(tmp_path, encoding):
    a_job = onepass(tmp_path, options={"time_steps": 2, "encoding": encoding, "p_scale": 3.0})
    built = subject.build(a_job)
    loaded = backends.load(Variant(), built.source, CPU, built.images[:1])
    one_by_one = check.observe(loaded, built.plain, built.images[:4], 1, seed=0)
    all_at_once = check.observe(loaded, built.plain, built.images[:4], 4, seed=0)
    features = 2 * (64 * 16 * 16 + 128 * 8 * 8)  # counts of spikes, pooled
    assert one_by_one.codes.shape == all_at_once.codes.shape == (4, features)
    assert (one_by_one.codes == all_at_once.codes).mean() > 0.999
    assert 0 < one_by_one.codes.mean() < 4


def observation(outputs, codes=None):
    return Observation({"output": np.asarray(outputs, float)}, None if codes is None else np.asarray(codes, np.int8))


def judged(tmp_path, reference, observed, baseline, precision="fp32"):
    a_job = onepass(tmp_path, variant=Variant("compile", precision))
    loaded = backends.Loaded(torch.nn.Identity(), torch.float32, CPU, None)
    return check._judge_codes(reference, observed, baseline, a_job, loaded)


def codes(flips, of=10**6):
    row = np.zeros((1, of), np.int8)
    row[0, :flips] = 1
    return row


@pytest.mark.parametrize(
    ("flips", "eagers", "precision", "passed"),
    [
        (1, 0, "fp32", True),
        (2, 0, "fp32", False),
        (20, 10, "fp32", True),
        (21, 10, "fp32", False),
        (1000, 0, "fp16", True),
        (1001, 0, "fp16", False),
        (10000, 0, "bf16", True),
        (10001, 0, "bf16", False),
    ],
)
def test_flipped_codes_are_held_against_eager_and_the_floor_of_the_precision(
    tmp_path, flips, eagers, precision, passed
):
    truth, ours, plain = (observation([[1.0, 0.0]], codes(count)) for count in (0, flips, eagers))
    result = judged(tmp_path, truth, ours, plain, precision)
    assert (result.passed, result.rule) == (passed, "codes")
    assert result.flipped_share == pytest.approx(flips / 10**6)


@pytest.mark.parametrize(("wrong", "eagers", "passed"), [(1, 0, True), (2, 0, False), (3, 2, True), (4, 2, False)])
def test_one_image_more_than_eager_may_disagree(tmp_path, wrong, eagers, passed):
    def outputs(count):
        return [[0.0, 1.0]] * count + [[1.0, 0.0]] * (8 - count)

    truth = observation(outputs(0), codes(0))
    ours, plain = (observation(outputs(count), codes(0)) for count in (wrong, eagers))
    result = judged(tmp_path, truth, ours, plain)
    assert (result.passed, result.argmax_disagreements) == (passed, wrong)


@pytest.mark.parametrize(("error", "passed"), [(1.9e-3, True), (2.1e-3, False)])
def test_where_codes_are_hidden_twice_eager_s_error_is_allowed(tmp_path, error, passed):
    truth, ours, plain = (
        observation([[1.0 + e, 0.0]], code) for e, code in ((0, codes(0)), (error, None), (1e-3, None))
    )
    result = judged(tmp_path, truth, ours, plain)
    assert (result.passed, result.rule, result.flipped_share) == (passed, "argmax", None)


def test_the_reference_is_kept_and_a_damaged_one_is_made_again(tmp_path):
    a_job = job(tmp_path, module=own_module(tmp_path))
    first = checked(a_job)
    (kept,) = Path(a_job.cache, "references").iterdir()
    before = kept.read_bytes()
    kept.write_bytes(before[: len(before) // 2])
    assert checked(a_job) == first
    assert len(kept.read_bytes()) == len(before)


def test_other_weights_have_another_reference(tmp_path):
    a_job = job(tmp_path, module=own_module(tmp_path))
    checked(a_job)
    checked(msgspec.structs.replace(a_job, case=msgspec.structs.replace(a_job.case, seed=1)))
    assert len(list(Path(a_job.cache, "references").iterdir())) == 2
