"""Weights from real files: every wrapping, damaged files, files that would run code, and what does not fit."""

import argparse
import fractions
import math
import pickle
import re

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from benchd.daemon.errors import UsageError
from benchd.kernels.dispatch import Unavailable
from benchd.models import weights
from benchd.models.vim import Vim
from benchd.models.weights import WeightsError

TRAINED, AVERAGES = ("model", "state_dict", "model_state_dict"), ("model_ema", "state_dict_ema")


@pytest.fixture(scope="module")
def state():
    torch.manual_seed(4)
    return Vim(192, 6, num_classes=3, image_size=48).state_dict()


@pytest.fixture
def tensors():
    return {"a.weight": torch.arange(6.0).reshape(2, 3), "b": torch.tensor([1, 2])}


def same(first, second):
    return first.keys() == second.keys() and all(torch.equal(first[key], second[key]) for key in first)


def test_every_wrapping_gives_the_same_tensors_and_the_model_comes_before_its_average(tmp_path, tensors):
    distributed = {f"module.{key}": tensor for key, tensor in tensors.items()}
    other = {key: tensor + 1 for key, tensor in tensors.items()}
    contents = [tensors, distributed, {"model": tensors, "args": argparse.Namespace(lr=0.1, epochs=[1, 2])}]
    contents += [{name: each, "epoch": 3} for name in (*TRAINED, *AVERAGES) for each in (tensors, distributed)]
    contents += [{average: other, trained: tensors} for average in AVERAGES for trained in TRAINED]
    for content in contents:
        torch.save(content, tmp_path / "w.pth")
        assert same(weights.read(tmp_path / "w.pth"), tensors), content
    save_file(tensors, tmp_path / "w.safetensors")
    assert same(weights.read(str(tmp_path / "w.safetensors")), tensors)
    torch.save({"model": dict(nn.Linear(2, 3).named_parameters())}, tmp_path / "w.pth")
    assert weights.read(tmp_path / "w.pth").keys() == {"weight", "bias"}


class RunsCode:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return (open, (str(self.path), "w"))


def test_a_file_that_would_run_code_is_refused_and_does_not_run(tmp_path, tensors):
    path, touched = tmp_path / "w.pth", RunsCode(tmp_path / "touched")
    only = "and only tensors are loaded"
    for zipped in (True, False):
        torch.save({"model": tensors, "args": touched}, path, _use_new_zipfile_serialization=zipped)
        with pytest.raises(WeightsError, match=rf"w\.pth: it contains (_io|io|builtins)\.open, {only}"):
            weights.read(path)
    torch.save({"model": tensors, "ratio": fractions.Fraction(1, 3)}, path)
    with pytest.raises(WeightsError, match=rf"w\.pth: it contains fractions\.Fraction, {only}"):
        weights.read(path)
    for protocol in (0, 2, 4):
        path.write_bytes(pickle.dumps({"a": touched}, protocol=protocol))
        with pytest.raises(WeightsError, match=r"w\.pth: ") as caught:
            weights.read(path)
        assert "weights_only" not in str(caught.value), "that would run it"
    assert not (tmp_path / "touched").exists()


@pytest.mark.parametrize("suffix", ["pth", "safetensors"])
def test_missing_truncated_and_other_files_are_named(tmp_path, tensors, suffix):
    path = tmp_path / f"w.{suffix}"
    with pytest.raises(WeightsError, match="no such file"):
        weights.read(path)
    _ = save_file(tensors, path) if suffix == "safetensors" else torch.save(tensors, path)
    whole = path.read_bytes()
    for share in (0.0, 0.1, 0.6, 0.99):
        path.write_bytes(whole[: int(share * len(whole))])
        with pytest.raises(WeightsError, match=rf"w\.{suffix}: "):
            weights.read(path)
    path.write_text("not weights at all, only some text that is longer than a header")
    with pytest.raises(WeightsError, match=rf"w\.{suffix}: not a complete") as caught:
        weights.read(path)
    assert "weights_only" not in str(caught.value)


@pytest.mark.parametrize(
    ("content", "cause"),
    [
        ([1, 2], "contains a list, not a state dict"),
        ({"epoch": 3, "lr": 0.1}, "epoch, lr instead of tensors"),
        ({"model": {}}, "nothing instead of tensors"),
        ({0: torch.zeros(2)}, "0 instead of tensors"),
    ],
    ids=["list", "numbers", "empty", "numbered"],
)
def test_files_without_a_state_dict_are_named(tmp_path, content, cause):
    torch.save(content, tmp_path / "w.pth")
    with pytest.raises(WeightsError, match=rf"w\.pth: .*{cause}"):
        weights.read(tmp_path / "w.pth")


def test_a_file_of_the_other_format_says_how_to_name_it(tmp_path, tensors):
    torch.save(tensors, tmp_path / "w.safetensors")
    with pytest.raises(WeightsError, match=r"this is a torch file; rename it to end in \.pth$"):
        weights.read(tmp_path / "w.safetensors")
    save_file(tensors, tmp_path / "w.pth")
    with pytest.raises(WeightsError, match=r"this is a safetensors file; rename it to end in \.safetensors$"):
        weights.read(tmp_path / "w.pth")


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")
def test_a_saved_program_is_told_from_a_damaged_file(tmp_path):
    torch.jit.script(nn.Linear(2, 3)).save(tmp_path / "w.pt")
    torch.export.save(torch.export.export(nn.Linear(2, 3), (torch.zeros(1, 2),)), tmp_path / "w.pt2")
    for name in ("w.pt", "w.pt2"):
        with pytest.raises(WeightsError, match=r"a saved program .* save its state_dict\(\) with torch\.save$"):
            weights.read(tmp_path / name)


@pytest.mark.parametrize(
    ("weight", "words"),
    [
        (torch.full((3, 2), math.nan), "1 with NaN in them: weight$"),
        (torch.ones(3, 2, dtype=torch.int64), "1 of a different number type: weight int64$"),
        (torch.ones(3, 2, dtype=torch.complex64), "1 of a different number type: weight complex64$"),
    ],
    ids=["nan", "int64", "complex64"],
)
def test_numbers_that_are_no_weights_are_refused_by_name(weight, words):
    module = nn.Linear(2, 3)
    with pytest.raises(WeightsError, match=words):
        weights.apply(module, {"weight": weight, "bias": torch.zeros(3)})
    weights.apply(module, {"weight": torch.ones(3, 2, dtype=torch.bfloat16), "bias": torch.zeros(3)})


def test_a_vim_takes_its_classes_from_the_file(tmp_path, state):
    torch.save({"model": state, "args": argparse.Namespace()}, tmp_path / "w.pth")
    model = weights.load("vim_tiny", tmp_path / "w.pth", depth=6, image_size=48)
    assert same(model.state_dict(), state)
    assert model.input_shape == (3, 48, 48)
    assert not model.training
    with torch.no_grad():
        assert model(torch.zeros(1, 3, 48, 48)).shape == (1, 3)


def test_what_does_not_fit_is_listed_with_shapes(tmp_path, state):
    wrong = {key: tensor for key, tensor in state.items() if not key.endswith("A_b_log")}
    wrong |= {"layers.0.mixer.A_log_b": torch.zeros(1), "norm_f.weight": torch.zeros(7)}
    torch.save(wrong, tmp_path / "w.pth")
    with pytest.raises(WeightsError) as caught:
        weights.load("vim_tiny", tmp_path / "w.pth", depth=6, image_size=48)
    message = str(caught.value)
    assert message.startswith(f"{tmp_path / 'w.pth'} does not fit vim_tiny: Missing key(s)")
    assert all(name in message for name in ("layers.4.mixer.A_b_log", "layers.0.mixer.A_log_b"))
    assert re.search(r"size mismatch for norm_f\.weight: .*\[7\].*\[192\]", message)


@pytest.mark.parametrize("key", ["head.weight", "pos_embed"])
@pytest.mark.parametrize("shape", [None, (4,), (0,), (1, 1, 192)], ids=str)
def test_a_damaged_geometry_is_a_weights_error(tmp_path, state, key, shape):
    wrong = {name: tensor for name, tensor in state.items() if name != key}
    if shape is not None:
        wrong[key] = torch.zeros(shape)
    torch.save(wrong, tmp_path / "w.pth")
    with pytest.raises(WeightsError, match=key):
        weights.load("vim_tiny", tmp_path / "w.pth", depth=6, image_size=48)


def test_numbers_of_any_precision_are_taken():
    module = nn.Linear(2, 3)
    weights.apply(module, {"weight": torch.ones(3, 2), "bias": torch.ones(3, dtype=torch.float64)})
    assert module.bias.dtype == torch.float32
    assert module.weight.sum() == 6


class Turned(nn.Linear):
    """Its first version held the weight the other way round."""

    _version = 2

    def _load_from_state_dict(self, state_dict, prefix, local_metadata, *rest):
        if local_metadata.get("version", 1) < 2:
            state_dict[f"{prefix}weight"] = state_dict[f"{prefix}weight"].t()
        super()._load_from_state_dict(state_dict, prefix, local_metadata, *rest)


@pytest.mark.parametrize("wrapped", [lambda module: module, nn.DataParallel], ids=["plain", "module."])
@pytest.mark.parametrize(("version", "turns"), [(1, True), (2, False), (None, False)])
def test_a_module_upgrades_a_state_of_its_older_version_and_no_other(tmp_path, version, turns, wrapped):
    module = nn.Sequential(Turned(3, 3))
    weight = module[0].weight.detach().clone()
    state = wrapped(module).state_dict()
    state._metadata[next(name for name in state._metadata if name.endswith("0"))] = {"version": version}
    torch.save(dict(state) if version is None else state, tmp_path / "w.pth")
    other = nn.Sequential(Turned(3, 3))
    weights.apply(other, weights.read(tmp_path / "w.pth"))
    assert torch.equal(other[0].weight, weight.t() if turns else weight)


def test_a_model_without_weights_is_built_from_an_empty_file(tmp_path):
    save_file({}, tmp_path / "none.safetensors")
    model = weights.load("square", tmp_path / "none.safetensors", size=2)
    assert model(torch.full((1, 2, 2), 3.0)).tolist() == [[[9.0, 9.0], [9.0, 9.0]]]
    with pytest.raises(WeightsError, match="snn_onepass"):
        weights.load("snn_onepass", tmp_path / "none.safetensors")


def test_errors_of_the_catalog_and_models_without_weights(tmp_path, tensors):
    torch.save(tensors, tmp_path / "w.pth")
    with pytest.raises(WeightsError, match="does not fit square: the model has no weights"):
        weights.load("square", tmp_path / "w.pth")
    with pytest.raises(UsageError, match="vim_tiny"):
        weights.load("vim_tni", tmp_path / "w.pth")
    with pytest.raises(UsageError, match="stride"):
        weights.load("vim_tiny", tmp_path / "w.pth", strid=4)
    with pytest.raises(Unavailable):
        weights.build("square", {}, kernels="custom")


def test_a_custom_model_is_built_for_the_state_of_the_plain_one(state):
    model = weights.build("vim_tiny", state, {"depth": 6, "image_size": 48}, kernels="custom")
    assert same(model.state_dict(), state)
    assert model.input_shape == (3, 48, 48)
