"""An int8 variant: made from a user's file, checked against the fp32 one by its classes, and refused if broken."""

import dataclasses

import pytest
from safetensors.torch import load_file
from worker_jobs import build_and_load, changed, job, run_here

from benchd.daemon.errors import Unsupported, UsageError
from benchd.daemon.measuring.user_model import onnx_file
from benchd.daemon.records import Case, Variant
from benchd.daemon.worker.check import checking as check
from benchd.daemon.worker.check import truth
from benchd.daemon.worker.top1 import refuse_calibrated
from benchd.kernels.exact_conv2d import layer, native
from benchd.models import catalog, data, demo
from benchd.models.demo import CHECKPOINTS

onnx = pytest.importorskip("onnx", reason="writes and reads files")
pytest.importorskip("onnxruntime.quantization.shape_inference", reason="quantises")

from int8_made import feeds, net, scaled, swapped  # noqa: E402 - writes ONNX

from benchd.exporters import quantised  # noqa: E402


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    """A float file and its int8 one."""
    folder = tmp_path_factory.mktemp("int8")
    source = net(folder / "float.onnx")
    quantised.quantise(source, folder / "int8.onnx", feeds(32), "cpu", {}, smooth=False)
    return source, folder / "int8.onnx"


def checked(folder, path, reference=None, calibration=None, batch_size=1):
    """Return the check of the file as onnxruntime-int8, and the facts of the files it ran."""
    built, loaded, a_job = opened(folder, path, reference, calibration, batch_size)
    return check.check_and_answers(built, loaded, a_job).check, built.source.used


def opened(folder, path, reference=None, calibration=None, batch_size=1):
    """Return what was built of the file, what was loaded as onnxruntime-int8, and the job."""
    a_job = changed(
        job(folder),
        case=Case(model="own.net", variant=Variant("onnxruntime", "int8"), batch_size=batch_size),
        options={},
        onnx=str(path),
        reference=reference and str(reference),
        calibration=calibration,
        calibration_images=32,
    )
    built, loaded = build_and_load(a_job)
    return built, loaded, a_job


def test_a_users_int8_file_is_checked_against_its_reference(pair, tmp_path):
    source, path = pair
    check_result, _ = checked(tmp_path, path, source)
    assert check_result.verdict == "passed"
    assert check_result.images == 64
    assert check_result.argmax_disagreements <= 3
    assert 1e-4 < check_result.error_share < 0.2
    assert check_result.note == truth.OF_FILE.format(f"{source.name} (--reference)")


def test_int8_is_judged_by_its_mean_error_too_so_that_a_scale_that_leaves_its_classes_is_found(pair, tmp_path):
    built, loaded, a_job = opened(tmp_path, pair[1], pair[0])
    for times, verdict in ((1.0, "passed"), (1.15, "failed"), (0.85, "failed")):
        scaled_answers = dataclasses.replace(loaded, run=lambda *inputs, by=times: by * loaded.run(*inputs))
        check_result = check.check_and_answers(built, scaled_answers, a_job).check
        assert check_result.verdict == verdict, check_result.note
        assert check_result.mean_error_share > check_result.tolerance or verdict == "passed"


def test_without_a_reference_its_check_shows_nothing(pair, tmp_path):
    check_result, _ = checked(tmp_path, pair[1])
    assert check_result.verdict == "void"
    assert "no fp32 reference" in check_result.note
    assert "--reference" in check_result.note


def test_the_products_that_ran_in_integers_are_counted(pair, tmp_path):
    _, loaded, _ = opened(tmp_path, pair[1], pair[0])
    assert loaded.runtime.notes == ["products in int8: 2 QLinearConv"]


def test_a_file_that_onnx_runtime_computes_in_float_is_no_int8_variant(pair, tmp_path):
    quantised.quantise(pair[0], tmp_path / "tensorrt.onnx", feeds(32), "tensorrt", {}, smooth=False)
    with pytest.raises(Unsupported, match=r"^tensorrt\.onnx: CPUExecutionProvider computes none of it in int8: .*bias"):
        opened(tmp_path, tmp_path / "tensorrt.onnx", pair[0])


def test_fewer_images_than_a_batch_calibrate_it(tmp_path):
    source = net(tmp_path / "open.onnx", batch="N")
    check_result, (facts,) = checked(tmp_path, source, calibration="random", batch_size=64)
    assert check_result.verdict == "passed"
    assert facts.quantisation.calibration == "32 random inputs"


def test_a_broken_int8_file_fails(pair, tmp_path):
    source, path = pair
    garbage = scaled(path, tmp_path / "garbage.onnx", times=40)
    assert checked(tmp_path, garbage, source)[0].verdict == "failed"
    exchanged = swapped(path, tmp_path / "exchanged.onnx", tensor="w1_quantized")
    assert checked(tmp_path, exchanged, source)[0].verdict == "failed"


def test_an_int8_file_is_made_from_a_users_float_file(pair, tmp_path):
    check_result, (facts,) = checked(tmp_path, pair[0], calibration="random")
    assert check_result.verdict == "passed"
    assert facts.quantisation.layers == 2
    assert set(facts.quantisation.left_fp32.values()) == {"first layer", "last layer"}
    assert facts.quantisation.calibration == "32 random inputs"


@pytest.mark.skipif(not native.paths(), reason="needs a CPU with AMX, VNNI or a dot product of bytes")
def test_int8_kernels_are_judged_by_their_classes_and_accuracy(tmp_path):
    layer._ran.clear()  # a worker is a process of its own
    a_job = changed(
        job(tmp_path, model="qann_resnet18", variant=Variant.parse("custom-int8"), batch_size=16),
        options=catalog.entry("qann_resnet18").resolve(CHECKPOINTS["qann_resnet18"].options),
        weights=demo.DEMO,
        data=demo.DEMO,
        accuracy="full",
    )
    outcome = run_here(a_job)
    assert (outcome.check.verdict, outcome.check.rule, outcome.check.images) == ("passed", "outputs", 64)
    assert outcome.check.error_share > 1e-3, "float32 would be nearer"
    assert outcome.accuracy.drop <= 0.01
    assert outcome.kernels_ran == f"c, {native.paths()[0]}"


def test_without_calibration_images_nothing_is_made(pair, tmp_path):
    with pytest.raises(Unsupported, match="int8 needs calibration inputs: give --calibration"):
        checked(tmp_path, pair[0])


def test_a_file_says_whether_it_is_quantised_and_takes_a_float_reference_only(pair):
    source, path = pair
    assert (onnx_file(source, []).precision, onnx_file(path, []).precision) == ("fp32", "int8")
    assert onnx_file(path, [], source).reference == str(source)
    with pytest.raises(UsageError, match="give the fp32 file"):
        onnx_file(source, [], source)


def test_no_image_is_both_calibrated_with_and_scored():
    tested = data.open_set("demo", (3, 32, 32))
    learnt = data.open_set("demo", (3, 32, 32), calibrating=True)
    scored = {tuple(image.flatten().tolist()) for image in load_file(demo.IMAGES)["images"]}
    assert scored.isdisjoint(tuple(image.flatten().tolist()) for image in load_file(demo.CALIBRATION)["images"])
    images, _ = learnt.read(range(8))
    refuse_calibrated(tested.read(range(8))[0], set(data.digests(images)), "demo")
    with pytest.raises(UsageError, match="8 of 8 items of demo were also used for calibration"):
        refuse_calibrated(images, set(data.digests(images)), "demo")
