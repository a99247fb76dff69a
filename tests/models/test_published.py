"""Published checkpoints, by the names and shapes of their sources, wrapped as they are: which load, and what is said.

Their keys are written out here, so that a rename of ours cannot hide in both places.
"""

import argparse

import pytest
import torch

from benchd.models import weights
from benchd.models.catalog import build
from benchd.models.weights import WeightsError


def norm(name, channels):
    shapes = {f"{name}.{key}": (channels,) for key in ("weight", "bias", "running_mean", "running_var")}
    return shapes | {f"{name}.num_batches_tracked": ()}


def onepass_shapes(*, batch_norm=False):
    shapes = {"conv1.weight": (64, 3, 3, 3), "conv1.bias": (64,), "conv2.weight": (128, 64, 3, 3), "conv2.bias": (128,)}
    shapes |= {"head.1.weight": (256, 8192), "head.1.bias": (256,), "head.3.weight": (10, 256), "head.3.bias": (10,)}
    return shapes | (norm("bn1", 64) | norm("bn2", 128) if batch_norm else {})


def block_shapes(name, before, width):
    shapes = {f"{name}.conv1.weight": (width, before, 3, 3), f"{name}.conv2.weight": (width, width, 3, 3)}
    shapes |= norm(f"{name}.bn1", width) | norm(f"{name}.bn2", width)
    shapes |= {f"{name}.relu1.s": (), f"{name}.relu2.s": ()}
    if before != width:
        shapes |= {f"{name}.downsample.0.weight": (width, before, 1, 1)} | norm(f"{name}.downsample.1", width)
    return shapes


def qann_shapes(width=64, stem=7):
    shapes = {"conv1.weight": (width, 3, stem, stem), "relu.s": ()} | norm("bn1", width)
    for stage in range(4):
        own = width * 2**stage
        shapes |= block_shapes(f"layer{stage + 1}.0", own if stage == 0 else own // 2, own)
        shapes |= block_shapes(f"layer{stage + 1}.1", own, own)
    return shapes | {"fc.weight": (10, 8 * width), "fc.bias": (10,)}


def tensors(shapes):
    """Return a state dict of these shapes: small numbers, and above zero where a scale or a variance must be."""
    draw = torch.Generator().manual_seed(0)
    state = {key: 0.05 * torch.randn(shape, generator=draw) for key, shape in shapes.items()}
    positive = {key: state[key].abs() + 0.1 for key in state if key.endswith((".s", "running_var"))}
    counts = {key: torch.tensor(7) for key in state if key.endswith("num_batches_tracked")}
    return state | positive | counts


def published(path, state):
    """Write what a training script writes: the state dict beside the rest."""
    rest = {
        "optimizer": {"state": {0: {"exp_avg": torch.zeros(2)}}, "param_groups": [{"lr": 0.1, "params": [0]}]},
        "args": argparse.Namespace(lr=0.1, arch="resnet18"),
        "epoch": 299,
        "scaler": {"scale": 65536.0, "growth_factor": 2.0},
    }
    torch.save({"state_dict": {f"module.{key}": tensor for key, tensor in state.items()}, **rest}, path)
    return path


@pytest.mark.parametrize("batch_norm", [False, True])
def test_onepass_of_its_sources_loads(tmp_path, batch_norm):
    state = tensors(onepass_shapes(batch_norm=batch_norm))
    path = published(tmp_path / "best.pth", state)
    own = weights.load("snn_onepass", path, batch_norm=batch_norm).state_dict()
    assert len(own) == len(state) == (18 if batch_norm else 8)
    assert torch.equal(own["fc1.weight"], state["head.1.weight"])
    assert torch.equal(own["fc2.bias"], state["head.3.bias"])
    assert torch.equal(own["conv2.weight"], state["conv2.weight"])


@pytest.mark.parametrize(("model", "shape"), [("qann_resnet18", ()), ("snn_stbif_resnet18", (1,))])
def test_a_qann_of_its_sources_loads(tmp_path, shape, model):
    state = tensors(qann_shapes(width=8))
    scales = {key: tensor.reshape(shape) for key, tensor in state.items() if key.endswith(".s")}
    assert len(scales) == 17
    path = published(tmp_path / "best_QANN.pth", state | scales)
    own = weights.load(model, path, width=8).state_dict()
    assert len(own) == len(state) == 139
    assert own["relu.scale"] == state["relu.s"]
    for block in (f"layer{stage}.{index}" for stage in range(1, 5) for index in range(2)):
        assert own[f"{block}.relu.scale"] == state[f"{block}.relu1.s"]  # behind bn1
        assert own[f"{block}.relu2.scale"] == state[f"{block}.relu2.s"]  # behind the sum
    assert torch.equal(own["layer3.0.downsample.1.running_var"], state["layer3.0.downsample.1.running_var"])


def test_own_names_load_beside_published_ones_and_none_is_lost():
    state = dict(build("snn_onepass").state_dict())
    with pytest.raises(WeightsError, match=r"^Unexpected key\(s\) in state_dict: \"head\.1\.weight\""):
        weights.build("snn_onepass", state | {"head.1.weight": torch.zeros(256, 8192)})


@pytest.mark.parametrize(
    ("shapes", "reason"),
    [
        (qann_shapes(8, stem=3), r"conv1\.weight is \(8, 3, 3, 3\) instead of \(8, 3, 7, 7\): only a 7x7 stem"),
        (qann_shapes(4), r"conv1\.weight is \(4, 3, 7, 7\) instead of \(8, 3, 7, 7\); pass --option width=4$"),
        (qann_shapes(8) | {"fc.weight": (100, 64)}, r"size mismatch for fc\.weight: .*\[100, 64\]"),
        (onepass_shapes(), r"conv1\.weight is \(64, 3, 3, 3\) instead of"),
    ],
    ids=["a stem of 3x3", "a narrow net", "a hundred classes", "another model"],
)
@pytest.mark.parametrize("model", ["qann_resnet18", "snn_stbif_resnet18"])
def test_a_qann_that_differs_is_named_with_both_shapes(tmp_path, model, shapes, reason):
    path = published(tmp_path / "best_QANN.pth", tensors(shapes))
    with pytest.raises(WeightsError, match=rf"best_QANN\.pth does not fit {model}: {reason}"):
        weights.load(model, path, width=8)


@pytest.mark.parametrize("batch_norm", [False, True])
def test_batch_norms_of_onepass_are_asked_for_by_option(tmp_path, batch_norm):
    path = published(tmp_path / "best.pth", tensors(onepass_shapes(batch_norm=batch_norm)))
    words = "batch norms; pass --option batch_norm=" + str(batch_norm).lower()
    with pytest.raises(WeightsError, match=words):
        weights.load("snn_onepass", path, batch_norm=not batch_norm)


def test_a_vim_of_a_closer_stride_is_not_taken_for_a_larger_image(tmp_path):
    state = build("vim_tiny", stride=8, depth=1).state_dict()
    assert state["pos_embed"].shape == (1, 27 * 27 + 1, 192)
    path = published(tmp_path / "vim_t_midclstok_ft_78p3acc.pth", state)
    with pytest.raises(WeightsError, match=r"27x27\+1 .*stride=8, which gives 224 pixels, or --option image_size=432$"):
        weights.load("vim_tiny", path, depth=1)
    assert weights.load("vim_tiny", path, depth=1, stride=8).input_shape == (3, 224, 224)
    assert weights.load("vim_tiny", path, depth=1, image_size=432).input_shape == (3, 432, 432)
