"""The trained nets that ship: what they answer, and which cases run on them."""

import re
from functools import cache

import pytest
import torch
from safetensors.torch import load_file
from simulations import slow

from benchd.daemon.errors import UsageError
from benchd.models import catalog, data, demo, weights
from benchd.models.demo import CHECKPOINTS, train
from benchd.models.demo.train import Digits, Recipe

README = (demo.FOLDER / "README.md").read_text(encoding="utf-8")


def loaded(model, **options):
    return weights.load(model, CHECKPOINTS[model].path, **(dict(CHECKPOINTS[model].options) | options))


@cache
def images(model):
    entry = catalog.entry(model)
    shape = entry.image_shape(CHECKPOINTS[model].options)
    return data.open_set("demo", shape, dataset=entry.dataset, inputs=entry.inputs).taken(10_000)


@torch.inference_mode()
def answers(module, x):
    return torch.cat([module(batch) for batch in x.split(64)])


@cache
def classes(model):
    return answers(loaded(model), images(model).images).argmax(1)


def test_the_files_are_small_and_hold_half_precision():
    files = set(demo.FOLDER.glob("*.safetensors"))
    pixels = {demo.IMAGES, demo.CALIBRATION}
    assert files == {checkpoint.path for checkpoint in CHECKPOINTS.values()} | pixels
    assert sum(path.stat().st_size for path in files) < 8e6
    for path in files:
        dtypes = {tensor.dtype for tensor in load_file(path).values()}
        assert dtypes <= ({torch.uint8} if path in pixels else {torch.float16, torch.int64})


@pytest.mark.parametrize("model", CHECKPOINTS)
def test_a_shipped_net_reaches_the_accuracy_that_its_readme_names(model):
    sample = images(model)
    right = int((classes(model) == sample.labels).sum())
    assert right / len(sample.labels) >= 0.97
    assert re.search(
        rf"^\| `{model}` .*\| {right} of {len(sample.labels)}, {100 * right / 359:.1f} % \|$", README, re.M
    )


@pytest.mark.parametrize("model", CHECKPOINTS)
def test_half_precision_answers_as_float32_does(model):
    few = slice(0, 24)
    half = answers(loaded(model).half(), images(model).images[few].half()).argmax(1)
    assert (half == classes(model)[few]).sum() >= 23


@pytest.mark.parametrize("every", [12, slow(1)])
def test_the_spiking_net_equals_its_quantised_one_image_for_image(every):
    """By class, and in float64 all but the last bits: of one in twelve images, and under `slow` of all."""
    x, quantised = images("qann_resnet18").images[::every], loaded("qann_resnet18")
    spiking = loaded("snn_stbif_resnet18", time_steps=37)
    assert torch.equal(answers(spiking, x).argmax(1), classes("qann_resnet18")[::every])
    x = x.double()
    torch.testing.assert_close(answers(spiking.double(), x), answers(quantised.double(), x), rtol=0, atol=1e-9)


def test_the_digits_are_every_fifth_and_exact_in_half_precision():
    _, test_set = train.digits()
    stored = load_file(demo.IMAGES)
    assert torch.equal(stored["images"], test_set.images.to(torch.uint8))
    assert torch.equal(stored["labels"], test_set.labels.to(torch.uint8))
    sample = data.open_set("demo", (3, 32, 32), inputs="unit").taken(359)
    assert torch.equal(sample.images.half().float(), sample.images)
    assert sample.images.amin() == 0
    assert sample.images.amax() == 1
    centres = sample.images[:, 0].unflatten(2, (8, 4)).unflatten(1, (8, 4))[:, :, 1:3, :, 1:3].mean((2, 4))
    assert torch.corrcoef(torch.stack((centres.flatten(), stored["images"].flatten() / 16.0)))[0, 1] > 0.99


def test_training_again_gives_the_same_numbers():
    learnt, _ = train.digits()
    few, recipe = Digits(learnt.images[:128], learnt.labels[:128]), Recipe(1, 1e-3, 1e-2)
    torch.use_deterministic_algorithms(mode=True)  # as main does; a fixture takes it back
    first, second = (train.trained("qann_resnet18", few, recipe).state_dict() for _ in range(2))
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_options_of_a_checkpoint_are_filled_in_and_what_it_was_not_trained_with_is_named():
    assert demo.complete("snn_stbif_resnet18", {"time_steps": 12}) == {"time_steps": 12, "width": 16}
    assert demo.complete("vim_tiny", {"scan": "two_level"}) == {"scan": "two_level", **CHECKPOINTS["vim_tiny"].options}
    with pytest.raises(UsageError, match=r"option width=8: the weights demo of qann_resnet18 have width=16; leave it"):
        demo.complete("qann_resnet18", {"width": 8})
    with pytest.raises(UsageError, match=r"option encoding=rate: the weights demo of snn_onepass have encoding=repeat"):
        demo.complete("snn_onepass", {"encoding": "rate"})
    with pytest.raises(UsageError, match=r"vim_small has none; choose one of vim_tiny, snn_onepass"):
        demo.complete("vim_small", {})


@pytest.mark.parametrize(
    ("model", "options", "asked", "used"),
    [
        ("snn_onepass", {}, (None, None), ("demo", "demo")),
        ("snn_onepass", {"time_steps": 4}, (None, None), ("demo", "demo")),
        ("snn_onepass", {"decay": 0.5}, (None, None), (None, None)),
        ("snn_onepass", {}, ("random", None), (None, None)),
        ("snn_onepass", {}, ("random", "demo"), (None, "demo")),
        ("snn_onepass", {}, (None, "demo"), ("demo", "demo")),
        ("snn_onepass", {}, (None, "cifar10:d"), (None, "cifar10:d")),
        ("snn_onepass", {}, ("w.pth", None), ("w.pth", None)),
        ("snn_stbif_resnet18", {}, (None, None), (None, None)),
        ("snn_stbif_resnet18", {"width": 16}, (None, None), ("demo", "demo")),
        ("qann_resnet18", {"width": 16}, ("demo", "cifar10:d"), ("demo", "cifar10:d")),
        ("vim_tiny", {}, (None, None), (None, None)),
        ("vim_small", dict(CHECKPOINTS["vim_tiny"].options), (None, None), (None, None)),
    ],
    ids=str,
)
def test_a_case_at_the_options_of_a_checkpoint_runs_on_it_unless_told_otherwise(model, options, asked, used):
    assert demo.sources(model, options, *asked) == used
