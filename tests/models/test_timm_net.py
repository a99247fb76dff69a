"""timm's models by name, on a package of its layout and signatures."""

import sys

import pytest
import timm_stub
import torch
from PIL import Image
from safetensors.torch import save_file

from benchd.models import catalog, libraries, weights


@pytest.fixture(autouse=True)
def _timm(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(timm_stub.written(tmp_path))
    libraries._registered.cache_clear()
    yield
    libraries._registered.cache_clear()
    for name in [name for name in sys.modules if name.partition(".")[0] == "timm"]:
        del sys.modules[name]
    sys.modules.pop("benchd.models.timm_net", None)


@pytest.mark.parametrize("name", ["timm:tiny_conv", "timm:tiny_vit", "timm:tiny_vit.a1_in1k"])
@pytest.mark.parametrize("size", [0, 48])
def test_a_net_reads_images_of_its_own_size_or_the_given_one(name, size):
    net = catalog.build(name, image_size=size)
    assert net.input_shape == (3, size or 24, size or 24)
    with torch.inference_mode():
        scores = net(torch.randn(2, *net.input_shape))
    assert scores.shape == (2, 10)
    assert (scores[0] - scores[1]).abs().max() > 1e-2 * scores.abs().max()
    red = net.preprocess(Image.new("RGB", (100, 80), (255, 0, 0)))
    assert red.shape == net.input_shape
    assert red[:, 0, 0].tolist() == pytest.approx([1.0, -2 / 3, -3 / 7])


def test_a_checkpoint_brings_its_number_of_classes(tmp_path):
    state = catalog.build("timm:tiny_conv").state_dict()
    state |= {"fc.weight": torch.randn(3, 8), "fc.bias": torch.randn(3)}
    save_file(state, tmp_path / "net.safetensors")
    loaded = weights.load("timm:tiny_conv", tmp_path / "net.safetensors")
    assert torch.equal(loaded.fc.weight, state["fc.weight"])
