"""The numerical check: each rule at its border, the reference's cache, and models that are wrong on purpose."""

import dataclasses
import functools
import gc
import weakref
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
from PIL import Image
from worker_jobs import TINY, build_and_load, catalogued, changed, job, trained, user_module

from benchd.daemon.records import Variant
from benchd.daemon.worker import workload
from benchd.daemon.worker.check import audit, truth
from benchd.daemon.worker.check import checking as check
from benchd.models import catalog


def checked(a_job, run=None):
    """Build, load and check the job here, without a worker, with `run` in the place of what was loaded."""
    built, loaded = build_and_load(a_job)
    if run:
        loaded = dataclasses.replace(loaded, run=functools.partial(run, loaded.run))
    return check.check_and_answers(built, loaded, a_job).check


@pytest.mark.parametrize("variant", ["eager", "onnxruntime"])
def test_while_it_is_timed_a_variant_does_not_share_its_memory_with_the_reference(tmp_path, variant):
    a_job = job(tmp_path, module=user_module(tmp_path), variant=Variant.parse(variant))
    built, loaded = build_and_load(a_job)
    _, right, _ = check.check_and_answers(built, loaded, a_job)
    plain = weakref.ref(built.plain)
    del built
    gc.collect()
    assert plain() is None or plain() is loaded.module
    assert right.reference().answers().outputs


def onepass(folder, time_steps=2, **fields):
    """Return a job of the trained OnePass."""
    return trained(folder, "snn_onepass", {"time_steps": time_steps}, **fields)


def test_a_module_that_is_right_passes(tmp_path):
    result = checked(job(tmp_path, module=user_module(tmp_path)))
    assert result.passed
    assert (result.rule, result.images, result.tolerance) == ("outputs", 4, 2e-5)
    assert 0 < result.error_share < 1e-6
    assert result.note == "accuracy not measured (--metric)"


def test_other_answers_show_in_the_projections_and_another_way_to_the_same_ones_does_not(tmp_path):
    forwards = {
        "base": "pass",
        "same": "images = (images.double() * 3 / 3).to(images)",
        "other": "images = images * 1.5",
    }
    projections = {}
    for name, forward in forwards.items():
        (folder := tmp_path / name).mkdir()
        result = checked(job(folder, module=user_module(folder, build="torch.manual_seed(0)", forward=forward)))
        assert result.passed, name
        projections[name] = np.array(result.projections)
    assert projections["base"].shape == (4,)
    np.testing.assert_allclose(projections["same"], projections["base"], rtol=1e-9)
    assert np.linalg.norm(projections["other"] - projections["base"]) > 0.1 * np.linalg.norm(projections["base"])


def test_each_output_has_projections_of_its_own(tmp_path):
    both = "return {'scores': self.fc(images.flatten(1)), 'boxes': 1000 * self.fc(images.flatten(1)).unsqueeze(1)}"
    result = checked(job(tmp_path, module=user_module(tmp_path, forward=both)))
    assert result.outputs == ["boxes 1 5", "scores 5"]
    boxes, scores = result.projections[:4], result.projections[4:]
    assert boxes == pytest.approx([1000 * along for along in scores], rel=1e-9)


def test_checks_of_more_images_project_the_same_ones_and_those_of_another_batch_say_so(tmp_path):
    """The first process of a race checks 64 images and the later ones 8; so does int8 beside the others."""
    module = user_module(tmp_path, build="torch.manual_seed(0)")
    few, many = (
        checked(job(tmp_path, module=module, limits=msgspec.structs.replace(TINY, check_images=count)))
        for count in (8, 64)
    )
    assert (few.images, many.images) == (8, 64)
    assert few.projections == pytest.approx(many.projections, rel=1e-9)
    assert few.inputs_sha256 == many.inputs_sha256
    of_four = checked(job(tmp_path, module=module, batch_size=4))
    of_seed = checked(job(tmp_path, module=module, batch_size=4, seed=1))
    assert len({few.inputs_sha256, of_four.inputs_sha256, of_seed.inputs_sha256}) == 3


def test_a_second_process_of_a_run_has_exact_answers_of_its_own_where_something_changed(tmp_path, monkeypatch):
    """A variable is in no hash, and the exact answers of the first process are kept for the run."""
    read = "images = images * float(getattr(os, 'environ')['SCALE'])"
    a_job = job(tmp_path, module=user_module(tmp_path, build="torch.manual_seed(0)", forward=read))
    projections = []
    for scale in ("1", "1", "2"):
        monkeypatch.setenv("SCALE", scale)
        projections.append(checked(a_job).projections)
    assert projections[0] == projections[1]
    assert projections[2] != pytest.approx(projections[0], rel=0.01)


def test_as_many_images_of_a_folder_are_checked_as_asked_for(tmp_path):
    images = tmp_path / "images" / "one"
    images.mkdir(parents=True)
    for number in range(300):
        Image.new("RGB", (4, 4), (number % 256, number // 256, 0)).save(images / f"{number}.png")
    a_job = job(tmp_path, module=user_module(tmp_path))
    limits = msgspec.structs.replace(a_job.limits, check_images=300)
    a_job = changed(a_job, limits=limits, data=f"imagefolder:{images.parent}")
    assert len(workload.build(a_job).images) == 300


def test_a_slow_module_is_checked_on_fewer_inputs_which_its_note_says(tmp_path, monkeypatch):
    monkeypatch.setattr(truth, "SLOW_CHECK_S", 0.0)

    def of(images, **fields):
        return checked(job(tmp_path, limits=msgspec.structs.replace(TINY, check_images=images), **fields))

    few = of(64, module=user_module(tmp_path))
    assert (few.verdict, few.images) == ("passed", truth.FEWEST_IMAGES)
    assert few.note == (
        "accuracy not measured (--metric); checked on 8 of 64 inputs, because more would take over a minute: "
        "a fault in few inputs may go unseen"
    )
    requested = of(65, module=user_module(tmp_path))
    assert (requested.images, requested.note) == (65, "accuracy not measured (--metric)")
    assert of(64).images == 64  # a model of ours


@pytest.mark.parametrize(("error", "passed"), [(1e-5, True), (4e-5, False)])
def test_a_module_that_is_wrong_in_float32_fails_beyond_the_tolerance(tmp_path, error, passed):
    wrong = f"if images.dtype != torch.float64: return self.fc(images.flatten(1)) * (1 + {error})"
    result = checked(job(tmp_path, module=user_module(tmp_path, forward=wrong)))
    assert result.passed is passed
    assert result.error_share == pytest.approx(error, rel=0.05)


def test_a_right_spiking_net_is_judged_by_its_codes_on_whole_batches(tmp_path):
    result = checked(onepass(tmp_path, variant=Variant(precision="amp"), batch_size=3))
    assert result.passed
    assert result.rule == "codes"
    assert result.images == 66  # whole batches of 3 that hold 64
    assert result.flipped_share <= result.flipped_tolerance


@pytest.mark.parametrize("encoding", ["repeat", "rate"])
def test_the_neurons_codes_are_compared_image_by_image(tmp_path, encoding):
    options = {"time_steps": 2, "encoding": encoding, "p_scale": 3.0}
    a_job = catalogued(tmp_path, "snn_onepass", options)
    built, loaded = build_and_load(a_job)
    one_by_one = check.observe(loaded, built.plain, built.images[:4], 1, seed=0)
    all_at_once = check.observe(loaded, built.plain, built.images[:4], 4, seed=0)
    features = 2 * (64 * 16 * 16 + 128 * 8 * 8)  # counts of spikes, pooled
    assert one_by_one.codes.shape == all_at_once.codes.shape == (4, features)
    assert (one_by_one.codes == all_at_once.codes).mean() > 0.999
    assert 0 < one_by_one.codes.mean() < 4


def one_not_a_number(run, *inputs):
    outputs = run(*inputs).clone()
    outputs[1] = torch.nan
    return outputs


@pytest.fixture(scope="module")
def shared(tmp_path_factory):
    """Return a folder in which references are kept from test to test."""
    return tmp_path_factory.mktemp("shared")


def last_is_garbage(run, *inputs):
    """Answer the last image of a batch as if it were another, as a kernel does whose last block is never written."""
    outputs = run(*inputs).clone()
    outputs[-1] = outputs[-1].roll(1)
    return outputs


@pytest.mark.parametrize(
    ("variant", "batch_size"),
    [
        pytest.param("bf16", 16, marks=pytest.mark.slow),
        ("custom", 32),
        pytest.param("onnxruntime", 32, marks=pytest.mark.slow),
        pytest.param("custom", 64, marks=pytest.mark.slow),
    ],
)
def test_one_place_of_the_batch_that_is_always_off_fails(shared, variant, batch_size):
    check_result = checked(onepass(shared, variant=Variant.parse(variant), batch_size=batch_size), run=last_is_garbage)
    assert check_result.verdict == "failed"
    assert (
        variant == "bf16"
        or f"the answer at position {batch_size - 1} of the batch is off for most of 12 images" in check_result.note
    )


def some_are_garbage(run, *inputs):
    """Answer about two images in sixty as others, wherever they stand in the batch."""
    outputs = run(*inputs).clone()
    for place, image in enumerate(inputs[0]):
        if int(16 * image.sum().item()) % 47 == 0:
            outputs[place] = outputs[place].roll(1)
    return outputs


def test_images_that_are_off_and_that_no_rounding_moves_fail(shared):
    check_result = checked(onepass(shared, variant=Variant.parse("custom"), batch_size=8), run=some_are_garbage)
    assert 0 < check_result.images_off <= check_result.images_off_allowed
    assert check_result.verdict == "failed"
    assert "but its float64 answer does not move that far in 16 draws of 4 times its rounding" in check_result.note


def as_own_file(folder):
    """Return a job of the trained net's exported file as a user's own, which does not tell that it has thresholds."""
    base_job = onepass(folder, 4, variant=Variant.parse("onnxruntime"))
    build_and_load(base_job)
    (file,) = Path(base_job.artifacts).rglob("*.onnx")
    limits = msgspec.structs.replace(base_job.limits, check_images=32)
    own = job(folder, model="own.net", variant=base_job.case.variant, limits=limits)
    return changed(own, onnx=str(file), options={})


def rounded_otherwise(run, images):
    """Answer as a right variant whose rounding differs: each image is off by at most two units in its last place."""
    draw = torch.Generator().manual_seed(int(1000 * images.sum().item()))
    return run(images * (1 + 2.0**-22 * torch.randint(-1, 2, images.shape, generator=draw)))


def test_a_file_of_a_spiking_net_is_judged_as_a_network_with_thresholds(tmp_path):
    a_job = as_own_file(tmp_path)
    check_result = checked(a_job, run=rounded_otherwise)
    assert (check_result.verdict, check_result.reference) == ("passed", "float32")
    assert check_result.note == truth.OF_FILE.format("the file itself")
    assert check_result.images_off <= check_result.images_off_allowed > 0
    assert checked(a_job, run=last_is_garbage).verdict == "failed"


NEAR = """
        hidden = self.fc(images.flatten(1))
        return hidden + (hidden[:, :1] > {threshold!r})"""


@pytest.mark.parametrize(("wrong", "passed"), [(0.0, True), (1e-3, False)])
def test_an_unseen_input_at_a_threshold_is_excused_and_a_wrong_answer_to_it_is_not(tmp_path, wrong, passed):
    unseen = check._images(built := workload.build(job(tmp_path, module=user_module(tmp_path))), 1, 4)[5:6]
    edge = built.reference()(unseen.double())[0, 0].item()
    a_job = job(tmp_path, module=user_module(tmp_path, forward=NEAR.format(threshold=edge)))
    built, loaded = build_and_load(a_job)
    checked_answers = check.check_and_answers(built, loaded, a_job)
    assert checked_answers.check.verdict == "passed"

    def across(images):
        """Answer the input at the threshold as from its other side."""
        outputs = loaded.run(images)
        is_near = (outputs[:, :1] % 1 - edge % 1).abs() < 1e-5
        return torch.where(is_near, outputs - 1 if outputs[0, 0] > edge + 0.5 else outputs + 1, outputs) + wrong

    answering = dataclasses.replace(loaded, run=across)
    audited = audit.audited_fresh(checked_answers.check, checked_answers.expected, answering)
    assert audited.passed is passed, audited.note


def test_a_deep_spiking_net_of_random_weights_is_void_in_half_precision(shared):
    a_job = job(shared, model="qann_resnet18", variant=Variant(precision="bf16"), batch_size=8)
    a_job = changed(a_job, options=catalog.entry("qann_resnet18").resolve({"width": 16}))
    assert checked(a_job).verdict == "void"
    assert checked(a_job, run=one_not_a_number).verdict == "failed"


def test_the_reference_is_kept_and_a_damaged_one_is_made_again(tmp_path):
    a_job = job(tmp_path, module=user_module(tmp_path))
    first = checked(a_job)
    before = {path: path.read_bytes() for path in references(a_job)}
    assert len(before) == 2  # the exact answers, and what rounding does to them
    for path, content in before.items():
        path.write_bytes(content[: len(content) // 2])
    assert checked(a_job) == first
    assert [len(path.read_bytes()) for path in before] == [len(content) for content in before.values()]


def references(a_job):
    return list(Path(a_job.cache, "references").glob("*/model.npz"))
