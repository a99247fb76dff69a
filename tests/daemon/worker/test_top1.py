"""Accuracy over a folder of images as a worker counts it: right and wrong variants, labels that fit and that do not.

Images of class k are grey at 50 k, and the module reads that off them, so that every answer is known.
"""

import pytest
from PIL import Image
from worker_jobs import build_and_load, changed, job, measured, of_file, user_module

from benchd.daemon.records import Variant
from benchd.daemon.worker import top1

PER_CLASS = 15
RIGHT = (
    "levels = ((images[:, 0].mean((1, 2)) * 0.229 + 0.485) * 255 / 50)[:, None].to(torch.float32); "
    "scores = -(levels - torch.arange(5.0)) ** 2; print(images.dtype, file=sys.stderr); "
)
BF16_WRONG = "return scores.flip(1) if images.dtype == torch.bfloat16 else scores"


def write_images(folder, classes=5, per_class=PER_CLASS):
    for label in range(classes):
        (folder / f"class{label}").mkdir(parents=True)
        for number in range(per_class):
            Image.new("RGB", (6, 5), (50 * label,) * 3).save(folder / f"class{label}" / f"{number:03}.png")


def asked(tmp_path, forward="return scores", *, count="full", data=None, labels=None, **fields):
    """Return a job of a module that ends in these lines, with its accuracy over the images."""
    module = user_module(tmp_path, forward=RIGHT + forward)
    a_job = job(tmp_path, module=module, **fields)
    return changed(a_job, data=f"imagefolder:{data or tmp_path / 'images'}", labels=labels, accuracy=count)


def runs_in_fp32(capfd):
    """Return how often the module ran in float32 since the last call, by what it printed."""
    return capfd.readouterr().err.splitlines().count("torch.float32")


def in_this_process(a_job):
    """Return the accuracy of the job and the parts that were told."""
    (built, loaded), progress = build_and_load(a_job), []
    return top1.measure(built, built.dataset, loaded, a_job, progress.append), progress


def counted(a_job):
    return in_this_process(a_job)[0]


def test_a_right_variant_is_right_on_every_image_of_the_set(tmp_path):
    write_images(tmp_path / "images")
    outcome = measured(asked(tmp_path, batch_size=4))  # 75 images: the last batch is not full
    accuracy = outcome.accuracy
    assert (accuracy.images, accuracy.right, accuracy.reference_right, accuracy.gained, accuracy.lost) == (
        75,
        75,
        75,
        0,
        0,
    )
    assert accuracy.low < 0.96 < accuracy.high == 1.0
    assert accuracy.data == f"75 of the 75 images of imagefolder:{tmp_path}/images"
    assert outcome.process.stages.accuracy_s > 0
    assert "accuracy" not in outcome.missing


@pytest.mark.parametrize(
    ("forward", "right", "of_fp32", "drop"),
    [
        (BF16_WRONG, 15, 75, 0.8),
        ("return scores if images.dtype == torch.bfloat16 else scores.flip(1)", 75, 15, -0.8),
    ],
    ids=["loses", "gains"],
)
def test_a_variant_that_is_right_on_other_images_than_fp32_loses_or_gains_them(tmp_path, forward, right, of_fp32, drop):
    write_images(tmp_path / "images")
    accuracy = counted(asked(tmp_path, forward, variant=Variant(precision="bf16")))
    assert (accuracy.right, accuracy.reference_right, accuracy.drop) == (right, of_fp32, pytest.approx(drop))
    assert (accuracy.gained, accuracy.lost) == ((0, 60) if drop > 0 else (60, 0))
    assert abs(accuracy.drop_low - drop) < 0.12


def test_so_many_images_are_spread_over_the_whole_set(tmp_path):
    write_images(tmp_path / "images")
    accuracy = counted(asked(tmp_path, BF16_WRONG, count=10, variant=Variant(precision="bf16")))
    assert (accuracy.images, accuracy.right) == (10, 2)  # two of each class, and bf16 knows the middle one
    assert accuracy.data.startswith("10 of the 75 images")


def test_fp32_answers_once_for_all_variants_of_the_same_images(tmp_path, capfd):
    write_images(tmp_path / "images")
    a_job = asked(tmp_path, BF16_WRONG, variant=Variant(precision="bf16"))
    first = counted(a_job)
    assert runs_in_fp32(capfd) == 75
    assert counted(a_job) == first
    assert runs_in_fp32(capfd) == 0
    other = Image.new("RGB", (6, 5), (100, 100, 100))
    other.save(tmp_path / "images" / "class0" / "000.png")  # the same names, another image
    changed = counted(a_job)
    assert runs_in_fp32(capfd) == 75
    assert (changed.reference_right, changed.data_sha256 == first.data_sha256) == (74, False)


def test_outputs_without_a_score_per_class_have_no_accuracy(tmp_path):
    write_images(tmp_path / "images", per_class=2)
    words = "top-1 needs one score per class, but the first output is 5x1 for each image"
    assert words in counted(asked(tmp_path, "return scores[:, :, None]"))


def test_a_file_of_labels_serves_a_model_of_more_classes(tmp_path):
    write_images(tmp_path / "images", 2, per_class=2)
    labels = tmp_path / "labels.csv"
    labels.write_text("class0/000.png,0\nclass1/000.png,1\nclass1/001.png,4\n")
    accuracy = counted(asked(tmp_path, labels=str(labels)))
    assert (accuracy.images, accuracy.right) == (3, 2)


def test_a_score_that_is_no_number_is_never_right(tmp_path):
    write_images(tmp_path / "images")
    broken = "return torch.where(scores == scores, torch.nan, 0) if images.dtype == torch.bfloat16 else scores"
    accuracy = counted(asked(tmp_path, broken, variant=Variant(precision="bf16")))
    assert (accuracy.right, accuracy.lost) == (0, 75)


def test_a_modules_own_preprocessing_replaces_the_usual_one(tmp_path):
    write_images(tmp_path / "images")
    a_job = asked(tmp_path, "pass")
    path = tmp_path / "net.py"
    path.write_text(
        path.read_text().split("    def forward")[0]
        + "    def preprocess(self, picture):\n"
        + "        return torch.full((3, 4, 4), picture.getpixel((0, 0))[0] / 50)\n\n"
        + "    def forward(self, images):\n        return -(images[:, 0, 0, :1] - torch.arange(5.0)) ** 2\n\n"
        + "def build():\n    return Net()\n"
    )
    assert counted(a_job).right == 75


def test_an_onnx_file_of_the_users_own_is_held_against_labels(tmp_path):
    pytest.importorskip("onnx", reason="writes and reads files")
    pytest.importorskip("onnxruntime", reason="runs the file")
    from onnx_made import written

    for label, colour in enumerate(("red", "lime", "blue")):
        (tmp_path / "images" / str(label)).mkdir(parents=True)
        for number in range(3):
            Image.new("RGB", (8, 8), colour).save(tmp_path / "images" / str(label) / f"{number}.png")
    Image.new("RGB", (8, 8), "red").save(tmp_path / "images" / "2" / "0.png")
    graph = "g (float[N,3,4,4] x) => (float[N,3] y) <int64[2] axes = {2,3}> { y = ReduceMean<keepdims=0>(x, axes) }"
    a_job = of_file(tmp_path, written(tmp_path, graph), batch_size=2)
    accuracy = measured(changed(a_job, data=f"imagefolder:{tmp_path}/images", accuracy="full")).accuracy
    assert (accuracy.images, accuracy.right, accuracy.reference_right) == (9, 8, 8)


def test_images_are_read_in_parts_and_each_part_is_told(tmp_path):
    write_images(tmp_path / "images", per_class=40)
    accuracy, progress = in_this_process(asked(tmp_path, batch_size=6))
    assert accuracy.right == 200
    assert progress == [f"image {number} of 200" for number in (66, 132, 198, 200)]


def test_a_rate_encoded_image_gets_the_same_draws_in_any_batch(tmp_path):
    write_images(tmp_path / "images", 10, per_class=7)
    options = {"decay": 0.95, "threshold": 1.0, "reset": "zero", "encoding": "rate", "p_scale": 1.0}
    answers = []
    for batch_size in (1, 16):
        a_job = changed(
            job(tmp_path, model="snn_onepass", batch_size=batch_size),
            options=options | {"batch_norm": False, "time_steps": 2},
            data=f"imagefolder:{tmp_path}/images",
            accuracy="full",
        )
        built, loaded = build_and_load(a_job)
        indices = built.dataset.spread(70)
        answers.append(top1._answers(loaded, built, built.dataset, indices, a_job, lambda percent: None))
    assert answers[0].sha256 == answers[1].sha256
    assert (answers[0].classes == answers[1].classes).mean() > 0.95
