"""Models of other libraries by name, through the real `bench-once`, `benchd compare --live` and `benchd profile`."""

import json
import sys

import numpy as np
import pytest
import timm_stub
import torch
from PIL import Image
from records_made import written
from torchvision import models

from benchd.models import libraries


@pytest.fixture
def measured(once, tmp_path):
    """Return a function that runs bench-once with tiny limits and returns how it ended and its records."""
    return lambda *arguments: (once(*arguments), written(tmp_path))


RANDOM = "agreement on random weights, accuracy unknown"


@pytest.mark.slow
def test_a_detector_is_compiled_and_exported_without_its_suppression(measured):
    arguments = ("--models", "torchvision:ssdlite320_mobilenet_v3_large", "--option", "image_size=128")
    done, results = measured(*arguments, "--variants", "eager,compile,onnxruntime")
    assert done.returncode == 0, done.stdout + done.stderr
    assert [record.check.passed for record in results] == [True] * 3
    assert "decoding and suppression, as in --module, are neither timed nor checked" in " ".join(done.stdout.split())


def test_a_fine_tuned_checkpoint_is_run_on_images_as_its_library_prepares_them(measured, tmp_path):
    (tmp_path / "images" / "class0").mkdir(parents=True)
    noise = np.random.default_rng(0).integers(0, 256, (2, 60, 80, 3), dtype=np.uint8)
    for number, picture in enumerate(noise):
        Image.fromarray(picture).save(tmp_path / "images" / "class0" / f"{number}.png")
    torch.manual_seed(3)
    torch.save(models.mobilenet_v3_small(weights=None, num_classes=7).state_dict(), tmp_path / "net.pth")
    arguments = ("--models", "torchvision:mobilenet_v3_small", "--variants", "eager", "--option", "image_size=64")
    done, (record,) = measured(*arguments, "--weights", "net.pth", "--data", "imagefolder:images")
    assert done.returncode == 0, done.stdout + done.stderr
    assert (record.model.weights, record.check.note) == ("net.pth", "")
    assert (record.floor.matrix_flops > 0, record.floor.uncounted) == (True, [])
    assert record.case_id == "torchvision_mobilenet_v3_small,eager,b1,image_size=64"
    assert "images of imagefolder:images" in record.model.data
    seven = sum(p.numel() for p in models.mobilenet_v3_small(weights=None, num_classes=7).parameters())
    assert record.model.parameters == seven


@pytest.fixture
def _timm(here, tmp_path, monkeypatch):
    folder = timm_stub.written(tmp_path)
    monkeypatch.syspath_prepend(folder)
    monkeypatch.setenv("PYTHONPATH", str(folder))
    yield
    libraries._registered.cache_clear()
    for name in [name for name in sys.modules if name.partition(".")[0] == "timm"]:
        del sys.modules[name]
    sys.modules.pop("benchd.models.timm_net", None)


@pytest.mark.usefixtures("_timm")
def test_timm_s_models_run_where_it_is_installed(measured):
    done, (record,) = measured("--models", "timm:tiny_vit.a1_in1k", "--variants", "eager")
    assert done.returncode == 0, done.stdout + done.stderr
    assert (record.case_id, record.model.input_shape) == ("timm_tiny_vit.a1_in1k,eager,b1", [3, 24, 24])


@pytest.mark.slow
def test_a_net_that_answers_in_a_dict_is_exported_for_any_batch_and_its_file_is_measured(here, measured):
    pytest.importorskip("onnxruntime", reason="runs the files")
    net = ("torchvision:lraspp_mobilenet_v3_large", "--option", "image_size=32")
    done = here("benchd", "export", *net, "--batch-sizes", "dynamic", "--output", "files", "--json")
    assert done.returncode == 0, done.stderr
    (file,) = json.loads(done.stdout)
    assert (file["metadata"]["facts"]["batch"], file["metadata"]["measured"]["input_shape"][0]) == ("dynamic", "batch")
    done, (record,) = measured("--models", *net, "--variants", "onnxruntime", "--artifacts", "files")
    assert done.returncode == 0, done.stdout + done.stderr
    assert (record.case.model, record.model.input_shape) == (net[0], [3, 32, 32])
    assert (record.check.passed, record.check.note, record.artifacts[0].key) == (True, RANDOM, file["key"])
