"""The pipeline from JPEG frames to classes: its stages, its frames, and that its answers are judged."""

import pytest
import torch
from torchvision.transforms import functional
from worker_jobs import LONGER, changed, job, measured, user_module

from benchd.daemon.records import Variant
from benchd.daemon.worker.camera import open_camera
from benchd.daemon.worker.scenarios import pipeline

STAGES = {"decode", "resize", "normalise", "copy", "model", "post"}


def ran(folder, **fields):
    a_job = job(folder, limits=LONGER, module=user_module(folder), scenario="pipeline", **fields)
    return measured(changed(a_job, accuracy="full"))


@pytest.mark.parametrize(("variant", "batch_size"), [("onnxruntime", 1), ("bf16", 3)])
def test_each_stage_is_timed_and_the_answers_are_judged(tmp_path, variant, batch_size):
    outcome = ran(tmp_path, variant=Variant.parse(variant), batch_size=batch_size)
    process = outcome.process
    assert outcome.check.passed
    assert outcome.check.audited > 0
    assert set(process.parts) == STAGES
    assert list(process.raw) == ["total", "decode", "resize", "normalise", "copy", "model", "post"]
    spent_ms = sum(part.mean_ms for part in process.parts.values())
    assert spent_ms == pytest.approx(process.timing.mean_ms, rel=1e-6)
    assert outcome.model.data == "64 JPEG: synthetic frames of 640 x 480, seed 0"
    assert process.throughput_per_s > 0
    assert outcome.missing["accuracy"] == "the images of pipeline have no labels: measure it with single_stream"


def test_other_pixels_than_the_reference_got_fail_the_check(tmp_path, monkeypatch):
    def darker(images, dtype):
        return images * 0.9

    monkeypatch.setattr(pipeline, "cast", darker)
    outcome = ran(tmp_path)
    assert outcome.check.verdict == "failed"
    assert "output_changed" in outcome.flags


def test_the_frames_of_a_folder_are_its_jpeg_files(tmp_path):
    (tmp_path / "data" / "a").mkdir(parents=True)
    for number in range(3):
        frame = torch.full((3, 20, 30), 60 * number, dtype=torch.uint8)
        functional.to_pil_image(frame).save(tmp_path / "data" / "a" / f"{number}.jpg")
    camera = open_camera(f"imagefolder:{tmp_path / 'data'}", (3, 4, 5), None, 64, torch.device("cpu"), 0)
    assert camera.images().shape == (3, 3, 4, 5)
    assert camera.images().mean(dim=(1, 2, 3)).mul(255).tolist() == pytest.approx([0, 60, 120], abs=2)


@pytest.mark.parametrize(
    ("data", "shape", "words"),
    [
        (None, (16, 16), "feeds 3-channel images, but the model takes 16x16"),
        ("cifar10:x", (3, 4, 4), "reads JPEG files"),
        ("imagefolder:{}", (3, 4, 4), "no JPEG files"),
    ],
)
def test_what_is_no_pipeline_says_so(tmp_path, data, shape, words):
    with pytest.raises(Exception, match=words):
        open_camera(data and data.format(tmp_path), shape, None, 4, torch.device("cpu"), 0)


def test_normalised_as_the_model_was_trained():
    camera = open_camera(None, (3, 4, 4), ((0.5, 0.5, 0.5), (0.25, 0.25, 0.25)), 2, torch.device("cpu"), 0)
    plain = open_camera(None, (3, 4, 4), None, 2, torch.device("cpu"), 0)
    assert torch.allclose(camera.images(), (plain.images() - 0.5) / 0.25)
