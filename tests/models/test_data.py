"""Real and random images: tiny data sets written in the formats of the real ones."""

import hashlib
import pickle

import numpy as np
import pytest
import torch
from PIL import Image
from torchvision import datasets
from torchvision.transforms import functional

from benchd.models.data import DataError, open_set, random_images

IMAGENET = torch.tensor([[0.485, 0.456, 0.406], [0.229, 0.224, 0.225]])[:, :, None, None]
CIFAR10 = torch.tensor([[0.4914, 0.4822, 0.4465], [0.2023, 0.1994, 0.2010]])[:, :, None, None]


def write_image_folder(root, counts, size=(48, 40)):
    generator = np.random.default_rng(0)
    for name, count in counts.items():
        (root / name).mkdir()
        for index in range(count):
            pixels = generator.integers(0, 256, (size[1], size[0], 3), dtype=np.uint8)
            Image.fromarray(pixels).save(root / name / f"{index:03}.png")


@pytest.fixture
def cifar10(tmp_path, monkeypatch):
    """CIFAR-10's python layout with 30 test images: torchvision checks sums, so it is told those of these files."""
    folder = tmp_path / "cifar-10-batches-py"
    folder.mkdir()
    pixels = np.random.default_rng(0).integers(0, 256, (30, 3072), dtype=np.uint8)
    labels = [index % 10 for index in range(30)]
    sums = {}
    for name, content in (
        ("test_batch", {"data": pixels, "labels": labels}),
        ("batches.meta", {"label_names": [f"class{index}" for index in range(10)]}),
    ):
        written = pickle.dumps(content)
        (folder / name).write_bytes(written)
        sums[name] = hashlib.md5(written, usedforsecurity=False).hexdigest()
    monkeypatch.setattr(datasets.CIFAR10, "train_list", [])
    monkeypatch.setattr(datasets.CIFAR10, "test_list", [["test_batch", sums["test_batch"]]])
    meta = {"filename": "batches.meta", "key": "label_names", "md5": sums["batches.meta"]}
    monkeypatch.setattr(datasets.CIFAR10, "meta", meta)
    return tmp_path, torch.from_numpy(pixels).view(30, 3, 32, 32)


@pytest.mark.parametrize("inputs", ["unit", "normal"])
def test_cifar10_is_spread_evenly_and_normalised_as_its_models_were_trained(cifar10, inputs):
    folder, pixels = cifar10
    sample = open_set(f"cifar10:{folder}", (3, 32, 32), dataset="cifar10", inputs=inputs).taken(10)
    want = pixels[::3] / 255
    torch.testing.assert_close(sample.images, want if inputs == "unit" else (want - CIFAR10[0]) / CIFAR10[1])
    assert sample.labels.tolist() == [3 * index % 10 for index in range(10)]
    assert sample.source == f"10 of the 30 images of cifar10:{folder}"
    mean = ", mean (0.4914, 0.4822, 0.4465), deviation (0.2023, 0.1994, 0.201)" if inputs == "normal" else ""
    assert sample.of.preprocessing.endswith(f"centre crop 32x32, /255{mean}")


def test_the_digits_that_ship_take_the_shape_of_the_model():
    digits = open_set("demo", (3, 32, 32), inputs="unit").taken(100)
    assert digits.source == "100 of the 359 images of demo"
    assert digits.images.shape == (100, 3, 32, 32)
    assert len(digits.labels.unique()) == 10
    assert torch.equal(digits.images[:, 0], digits.images[:, 2])
    normal = open_set("demo", (3, 32, 32)).taken(400)
    assert normal.source == "all 359 images of demo, fewer than the 400 asked for"
    assert abs(normal.images.mean()) < 0.02
    assert abs(normal.images.std() - 1) < 0.02
    larger = open_set("demo", (1, 224, 224)).taken(2)
    assert larger.images.shape == (2, 1, 224, 224)
    assert larger.of.why_unlabelled(10) is None
    assert "demo has 10 classes, but the model has 1000" in larger.of.why_unlabelled(1000)
    with pytest.raises(DataError, match="does not take images"):
        open_set("demo", (64, 64))


def test_an_image_folder_is_resized_cropped_and_normalised(tmp_path):
    write_image_folder(tmp_path, {"a": 3, "b": 2})
    sample = open_set(f"imagefolder:{tmp_path}", (3, 28, 28), dataset="imagenet").taken(256)
    assert sample.images.shape == (5, 3, 28, 28)
    assert sample.labels.tolist() == [0, 0, 0, 1, 1]
    picture = Image.open(tmp_path / "b" / "001.png")
    shorter = functional.resize(picture, 32, functional.InterpolationMode.BICUBIC)
    want = (functional.to_tensor(functional.center_crop(shorter, 28)) - IMAGENET[0]) / IMAGENET[1]
    torch.testing.assert_close(sample.images[4], want)


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ("mnist:{root}", "unknown data 'mnist:.*use demo, cifar10:DIR or imagefolder:DIR"),
        ("cifar10", "unknown data 'cifar10'"),
        ("cifar10:", "unknown data 'cifar10:'"),
        ("imagefolder:{root}/none", "none is not a folder: give the folder of the images"),
        ("cifar10:{root}", "unpack the python version so that .*/cifar-10-batches-py/ exists"),
        ("imagefolder:{root}", "expected .*/<class>/<image>"),
    ],
)
def test_what_cannot_be_opened_says_what_to_do(tmp_path, spec, words):
    (tmp_path / "empty-class").mkdir()
    with pytest.raises(DataError, match=words):
        open_set(spec.format(root=tmp_path), (3, 32, 32))


def test_a_model_that_is_not_square_gets_a_cut_of_its_own_shape(tmp_path):
    write_image_folder(tmp_path, {"a": 1})
    assert open_set(f"imagefolder:{tmp_path}", (3, 20, 36)).taken(256).images.shape == (1, 3, 20, 36)


def test_a_model_of_one_channel_needs_preprocessing_of_its_own(tmp_path):
    write_image_folder(tmp_path, {"a": 1})
    with pytest.raises(DataError, match="takes 1x8x8: give the module an attribute `preprocess`"):
        open_set(f"imagefolder:{tmp_path}", (1, 8, 8))

    def grey(picture):
        return functional.to_tensor(picture.convert("L").resize((8, 8)))

    sample = open_set(f"imagefolder:{tmp_path}", (1, 8, 8), preprocess=grey).taken(256)
    torch.testing.assert_close(sample.images[0], grey(Image.open(tmp_path / "a" / "000.png")))


@pytest.mark.parametrize(
    ("made", "words"), [(lambda _: torch.zeros(3, 9, 8), r"\(3, 9, 8\), not"), (lambda _: [1], "list, not")]
)
def test_preprocessing_that_makes_something_else_is_named(tmp_path, made, words):
    write_image_folder(tmp_path, {"a": 1})
    with pytest.raises(DataError, match=rf"`preprocess` returned {words} a tensor of shape \(3, 8, 8\)"):
        open_set(f"imagefolder:{tmp_path}", (3, 8, 8), preprocess=made).taken(1)


def test_a_file_of_labels_names_images_and_classes_in_place_of_folders(tmp_path):
    write_image_folder(tmp_path, {"a": 3})
    (tmp_path / "a" / "001.png").rename(tmp_path / "one more.png")
    labels = tmp_path / "labels.txt"
    labels.write_text("\ufeffa/002.png 7\none more.png\t0\n\n./a/000.png, 12\n")
    dataset = open_set(f"imagefolder:{tmp_path}", (3, 8, 8), labels=str(labels))
    images, classes = dataset.read(dataset.spread(9))
    assert classes.tolist() == [7, 0, 12]
    direct = open_set(f"imagefolder:{tmp_path}", (3, 8, 8))
    torch.testing.assert_close(images[0], direct.read([1])[0][0])
    assert dataset.why_unlabelled(1000) is None
    assert dataset.why_unlabelled(12) == "the labels go up to 12, but the model has 12 classes"


def test_as_many_folders_as_classes_are_labels_and_no_other_number(tmp_path):
    write_image_folder(tmp_path, {"a": 1, "b": 1})
    dataset = open_set(f"imagefolder:{tmp_path}", (3, 8, 8))
    assert dataset.why_unlabelled(2) is None
    assert "has 2 classes, but the model has 1000: provide one folder per class" in dataset.why_unlabelled(1000)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("a/000.png 1\ncat\n", "labels.txt:2: 'cat': expected a path and a class index"),
        ("a/000.png -1\n", "labels.txt:1: "),
        ("a/000.png 1\na/000.png 2\n", "labels.txt:2: a/000.png already has a label"),
        ("../images/a/000.png 1\n", "labels.txt:1: .*: expected a path inside the folder of --data, without"),
        ("/images/a/000.png 1\n", "labels.txt:1: .*: expected a path inside the folder"),
        ("\n", "contains no labels"),
        ("a/none.png 1\n", "lists a/none.png, which is not a file in "),
    ],
)
def test_labels_that_do_not_fit_name_the_line(tmp_path, text, words):
    write_image_folder(tmp_path, {"a": 1})
    (tmp_path / "labels.txt").write_text(text)
    with pytest.raises(DataError, match=words):
        open_set(f"imagefolder:{tmp_path}", (3, 8, 8), labels=str(tmp_path / "labels.txt"))


def test_a_set_with_labels_of_its_own_takes_no_others(cifar10):
    with pytest.raises(DataError, match="cifar10 has its own labels"):
        open_set(f"cifar10:{cifar10[0]}", (3, 32, 32), labels="labels.txt")


def test_images_outside_class_folders_are_a_wrong_layout(tmp_path):
    Image.new("RGB", (8, 8)).save(tmp_path / "flat.png")
    with pytest.raises(DataError, match="one folder per class"):
        open_set(f"imagefolder:{tmp_path}", (3, 32, 32))


@pytest.mark.parametrize(
    ("damaged", "words"),
    [
        (lambda _: b"no image", "cannot identify"),
        (lambda png: png[: len(png) // 2], "truncated"),
        (lambda png: bytes(4).join(png.rsplit(b"IDAT", 1)), "broken PNG"),
    ],
    ids=["no image", "half of one", "a chunk without a name"],
)
@pytest.mark.parametrize("listed", [False, True], ids=["folders", "labels"])
def test_a_file_that_is_no_image_is_named(tmp_path, damaged, words, listed):
    write_image_folder(tmp_path, {"a": 2}, size=(200, 200))
    labels, bad = tmp_path / "labels.txt", tmp_path / "a" / "bad.png"
    labels.write_text("a/bad.png 1\n")
    bad.write_bytes(damaged((tmp_path / "a" / "001.png").read_bytes()))
    dataset = open_set(f"imagefolder:{tmp_path}", (3, 32, 32), labels=str(labels) if listed else None)
    with pytest.raises(DataError, match=rf"cannot read {bad}; replace or remove it: .*{words}"):
        dataset.taken(3)


def test_an_image_that_memory_may_not_hold_is_named(tmp_path, monkeypatch):
    write_image_folder(tmp_path, {"a": 1})
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 900)
    with pytest.raises(DataError, match=r"cannot read .*/000\.png; replace or remove it: .*decompression bomb"):
        open_set(f"imagefolder:{tmp_path}", (3, 32, 32)).taken(1)


def test_random_images_are_seeded_apart_from_the_global_generator():
    torch.manual_seed(0)
    state = torch.get_rng_state()
    unit = random_images((3, 8, 8), 50, "unit", seed=1)
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(random_images((3, 8, 8), 50, "unit", seed=1), unit)
    assert not torch.equal(random_images((3, 8, 8), 50, "unit", seed=2), unit)
    assert unit.shape == (50, 3, 8, 8)
    assert unit.min() >= 0
    assert unit.max() < 1
    normal = random_images((3, 8, 8), 50, "normal", seed=1)
    assert abs(normal.mean()) < 0.05
    assert abs(normal.std() - 1) < 0.05
