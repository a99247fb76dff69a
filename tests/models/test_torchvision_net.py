"""torchvision's models by name: shapes, weights from a file, its preprocessing, and what is not measured."""

import re
from functools import cache

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import save_file
from simulations import slow
from torchvision import models

from benchd.models import catalog, data, random_weights, weights


@cache
def built(name, **options):
    torch.manual_seed(0)
    return catalog.build(f"torchvision:{name}", **options)


@pytest.mark.parametrize(
    ("name", "size", "shapes"),
    [
        ("mobilenet_v3_small", 64, [(2, 1000)]),
        ("vit_b_16", 32, [(2, 1000)]),
        ("lraspp_mobilenet_v3_large", 64, [(2, 21, 64, 64)]),
        ("ssdlite320_mobilenet_v3_large", 128, [(2, 522, 4), (2, 522, 91)]),
        ("r3d_18", 32, [(2, 400)]),
    ],
)
def test_a_random_net_answers_and_its_answer_depends_on_the_image(name, size, shapes):
    net = built(name, image_size=size)
    assert net.input_shape[-2:] == (size, size)
    with torch.inference_mode():
        answer = net(torch.randn(2, *net.input_shape))
    outputs = list(answer.values()) if isinstance(answer, dict) else [answer]
    assert sorted(map(tuple, map(torch.Tensor.size, outputs))) == sorted(shapes)
    for output in outputs:
        assert 1e-3 < output.abs().max() < 1e3
        assert (output[0] - output[1]).abs().max() > 1e-2 * output.abs().max()


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("mobilenet_v3_small", {"num_classes": 7}),
        ("googlenet", {"num_classes": 5, "aux_logits": True, "init_weights": False}),
        ("ssdlite320_mobilenet_v3_large", {"num_classes": 3, "weights_backbone": None}),
        ("mnasnet0_5", {"num_classes": 7}),
    ],
)
def test_a_checkpoint_loads_strictly_with_its_own_number_of_classes(tmp_path, name, arguments, monkeypatch):
    torch.manual_seed(1)
    trained = models.get_model(name, weights=None, **arguments)
    save_file(trained.state_dict(), tmp_path / "net.safetensors")
    monkeypatch.setattr(random_weights, "settle", lambda *_: pytest.fail("these weights are not random"))
    loaded = weights.load(f"torchvision:{name}", tmp_path / "net.safetensors")
    assert all(torch.equal(value, trained.state_dict()[key]) for key, value in loaded.state_dict().items())
    assert not loaded.training


def older(key):
    """Return the name that torchvision's first releases had for this one."""
    key = re.sub(r"(denselayer\d+\.\w+)([12])\.", r"\1.\2.", key)
    key = re.sub(r"mlp\.([03])\.", lambda match: f"mlp.linear_{1 + int(match[1]) // 3}.", key)
    key = re.sub(r"((?:inner|layer)_blocks\.\d)\.0\.", r"\1.", key)
    return re.sub(r"(_head\.conv)\.(\d)\.0\.", lambda match: f"{match[1]}.{2 * int(match[2])}.", key)


@pytest.mark.parametrize(
    ("name", "arguments", "renamed"),
    [
        ("densenet121", {}, 580),
        slow("vit_b_16", {"image_size": 32}, 48),
        ("retinanet_resnet50_fpn", {"weights_backbone": None}, 28),
    ],
)
def test_a_checkpoint_under_the_names_of_an_older_torchvision_loads(tmp_path, name, arguments, renamed):
    with torch.device("meta"):
        shapes = models.get_model(name, weights=None, **arguments).state_dict()
    # older than batch norm's count
    own = {key: torch.rand(shapes[key].shape) for key in shapes if not key.endswith("num_batches_tracked")}
    assert len({older(key) for key in own} - own.keys()) == renamed
    torch.save({older(key): value for key, value in own.items()}, tmp_path / "net.pth")
    options = {option: value for option, value in arguments.items() if option == "image_size"}
    loaded = weights.load(f"torchvision:{name}", tmp_path / "net.pth", **options).state_dict()
    assert loaded.keys() == shapes.keys()
    assert all(torch.equal(value, own.get(key, torch.tensor(0))) for key, value in loaded.items())


@pytest.mark.parametrize("name", ["resnet34", "mnasnet0_5"])
def test_a_checkpoint_of_another_net_is_refused_by_its_keys(tmp_path, name):
    save_file(models.resnet18(weights=None).state_dict(), tmp_path / "net.safetensors")
    missing = rf"net.safetensors does not fit torchvision:{name}: (Missing key|\d+ missing)"
    with pytest.raises(weights.WeightsError, match=missing):
        weights.load(f"torchvision:{name}", tmp_path / "net.safetensors")


def test_images_are_prepared_as_the_newest_weights_ask_for(tmp_path):
    picture = Image.fromarray(np.random.default_rng(0).integers(0, 256, (300, 400, 3), dtype=np.uint8))
    preset = models.EfficientNet_B1_Weights.DEFAULT.transforms()  # 255 to 240, where ImageNet's usual is 256 to 224
    own = built("efficientnet_b1")
    assert own.input_shape == (3, 240, 240)
    assert torch.equal(own.preprocess(picture), preset(picture))
    smaller = built("efficientnet_b1", image_size=120).preprocess(picture)
    assert smaller.shape == (3, 120, 120)
    half = models.EfficientNet_B1_Weights.DEFAULT.transforms(crop_size=120, resize_size=128)
    assert torch.equal(smaller, half(picture))


def test_the_preprocessing_says_what_it_is():
    words = data.described(built("mobilenet_v3_small", image_size=64).preprocess)
    assert words.startswith("Compose( ImageClassification( crop_size=[64, 64] resize_size=[73] mean=[0.485, ")


def test_segmentation_and_detection_take_the_whole_image():
    picture = Image.new("RGB", (400, 300), (255, 0, 0))
    for name, size in (("lraspp_mobilenet_v3_large", 64), ("ssdlite320_mobilenet_v3_large", 128)):
        net = built(name, image_size=size)
        prepared = net.preprocess(picture)
        assert prepared.shape == net.input_shape
        assert prepared.flatten(1).std(1).max() < 1e-5
    assert prepared[:, 0, 0].tolist() == pytest.approx([1.0, -1.0, -1.0]), "ssdlite's mean and deviation are 0.5"
