"""A user's own inputs: what files and functions hold, as a model reads it, and every reason to refuse them."""

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from worker_jobs import changed, job, run_here, user_module

from benchd.daemon.errors import UsageError
from benchd.daemon.records import InputSpec, Variant
from benchd.daemon.worker.samples import open_samples
from benchd.daemon.worker.structures import trimmed

LINES = """
import torch

def rows():
    for place in range(6):
        yield {"batch": {"ids": torch.full((3,), place), "rate": torch.tensor(16000)}}, place % 2

class Set:
    def __len__(self):
        return 4

    def __getitem__(self, place):
        return [torch.full((2,), float(place)), torch.ones(1)]

held = Set()

def ragged():
    yield torch.zeros(3, 2)
    yield torch.zeros(3, 4)

def spoken():
    for length in (3, 5, 4):
        yield {"audio": torch.ones(length, 2), "mask": torch.ones(length, dtype=torch.bool), "rate": 16000}, length

def triple():
    yield torch.zeros(3), 1, 2

def words():
    yield "three"

def nothing():
    return iter(())

def endless():
    while True:
        yield torch.zeros(())

def nested():
    yield {"batch": {"z": [torch.zeros(2)]}}
"""


@pytest.fixture
def code(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text(LINES)
    return path


def test_a_file_holds_its_items_by_name_and_one_target_each(tmp_path):
    arrays = {"x": torch.arange(12.0).reshape(6, 2), "ids": torch.arange(6), "targets": torch.ones(6, 1)}
    np.savez(tmp_path / "a.npz", **{name: value.numpy() for name, value in arrays.items()})
    save_file(arrays, tmp_path / "a.safetensors")
    for name in ("a.npz", "a.safetensors"):
        samples = open_samples(str(tmp_path / name))
        batch, targets = samples.read([1, 4])
        assert {spec.name: (spec.dtype, spec.shape, spec.items) for spec in samples.specs()} == {
            "x": ("float32", [2], 6),
            "ids": ("int64", [], 6),
        }
        assert batch.named["x"].tolist() == [[2.0, 3.0], [8.0, 9.0]]
        assert [target.tolist() for target in targets] == [[1.0], [1.0]]


def test_a_function_yields_what_the_model_takes_and_a_tuple_has_the_target(code):
    samples = open_samples(f"{code}:rows")
    batch, targets = samples.read([0, 5])
    assert list(batch.named) == ["batch.ids", "batch.rate"]
    assert batch.named["batch.ids"].tolist() == [[0, 0, 0], [5, 5, 5]]
    assert targets == [0, 1]
    assert samples.sha256 == open_samples(f"{code}:rows").sha256


def test_an_only_input_and_those_by_place_need_no_name(tmp_path, code):
    np.savez(tmp_path / "a.npz", np.zeros((2, 3)), np.zeros(2))
    np.savez(tmp_path / "b.npz", anything=np.zeros((2, 3)))
    for text in (tmp_path / "a.npz", tmp_path / "b.npz", f"{code}:held"):
        assert {spec.name for spec in open_samples(str(text)).specs()} == {""}


def test_items_of_different_lengths_are_filled_up_and_a_batch_is_as_long_as_its_longest(code):
    samples = open_samples(f"{code}:spoken")
    batch, targets = samples.read([0, 2])
    assert (targets, batch.lengths["audio"].tolist(), batch.named["audio"].shape) == ([3, 4], [3, 4], (2, 5, 2))
    shorter = trimmed(batch)
    assert (shorter.named["audio"].shape, shorter.named["mask"].tolist()) == ((2, 4, 2), [[1, 1, 1, 0], [1, 1, 1, 1]])
    assert shorter.named["rate"].tolist() == [16000, 16000]
    assert trimmed(batch[:1]).named["audio"].shape == (1, 3, 2)
    assert samples.taken(3)[1].endswith("of lengths 3 to 5")
    read, specs = samples.read_by([InputSpec(name, None, []) for name in ("audio", "mask", "rate")])
    assert (sorted(read.lengths), specs[0].shape) == (["audio", "mask"], [5, 2])


def test_a_data_set_ends_at_its_length_and_a_list_is_by_place(code):
    samples = open_samples(f"{code}:held")
    assert (len(samples), list(samples.inputs), samples.targets) == (4, ["0", "1"], [])


def test_a_model_reads_an_only_input_by_any_name_in_its_own_type(tmp_path):
    np.savez(tmp_path / "a.npz", whatever=np.arange(6))
    samples, specs = open_samples(str(tmp_path / "a.npz")).read_by([InputSpec("", "float32", [])])
    assert samples.read([5])[0].tolist() == [5.0]
    assert (specs[0].dtype, specs[0].file, specs[0].items) == ("float32", "a.npz", 6)


@pytest.mark.parametrize(
    ("arrays", "specs", "reason"),
    [
        ({"x": np.zeros((2, 3))}, [InputSpec("x", "float32", [4])], r"x is \[3\], but the model takes x=4"),
        ({"x": np.full((2,), 0.5)}, [InputSpec("x", "int64", [])], "numbers beyond int64"),
        (
            {"x": np.zeros(2)},
            [InputSpec("x", None, []), InputSpec("y", None, [])],
            "it has x, but the model takes x, y",
        ),
    ],
)
def test_what_a_model_does_not_read_is_refused(tmp_path, arrays, specs, reason):
    np.savez(tmp_path / "a.npz", **arrays)
    with pytest.raises(UsageError, match=reason):
        open_samples(str(tmp_path / "a.npz")).read_by(specs)


@pytest.mark.parametrize(
    ("arrays", "reason"),
    [
        ({"x": np.zeros(3), "y": np.zeros(2)}, "different numbers of items"),
        ({"x": np.zeros(0)}, "no items"),
        ({"x": np.zeros(3), "targets": np.zeros(2)}, "3 items, but 2 targets; give one per item"),
        ({"x": np.array([np.nan])}, "NaN"),
        ({"x": np.zeros(2, complex)}, "its numbers are torch.complex128"),
        ({"x": np.array(["a"])}, "not a complete .npz file of numbers"),
    ],
)
def test_a_file_of_other_than_items_is_refused(tmp_path, arrays, reason):
    np.savez(tmp_path / "a.npz", **arrays)
    with pytest.raises(UsageError, match=reason):
        open_samples(str(tmp_path / "a.npz"))


@pytest.mark.parametrize("name", ["a.npz", "a.safetensors"])
def test_a_damaged_file_is_refused(tmp_path, name):
    (tmp_path / name).write_bytes(b"PK\x03\x04 half of it")
    with pytest.raises(UsageError, match="not a complete"):
        open_samples(str(tmp_path / name))


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        ("ragged", r"is \[3, 2\] in item 0 and \[3, 4\] in item 1; items may differ only in their first axis"),
        ("triple", "yield a tuple"),
        ("words", "an item is str, not numbers"),
        ("nothing", "no items"),
        ("endless", "it yields more than 200,000 items; end it"),
        ("nested", r"batch\.z is a list within the inputs; yield a dict there, or a tensor"),
    ],
)
def test_a_function_of_other_than_items_is_refused(code, function, reason):
    with pytest.raises(UsageError, match=reason):
        open_samples(f"{code}:{function}")


@pytest.mark.parametrize("variant", ["eager", "onnxruntime"])
def test_items_that_the_module_cannot_run_are_wrong_input_whatever_the_variant(tmp_path, variant):
    np.savez(tmp_path / "a.npz", x=np.zeros((9, 3, 4, 5)))
    a_job = job(tmp_path, module=user_module(tmp_path), variant=Variant.parse(variant))
    outcome = run_here(changed(a_job, samples=str(tmp_path / "a.npz")))
    assert outcome.process.reason.startswith("--inputs a.npz (an item float32 [3, 4, 5]): net.py:15: in forward: ")
    assert (outcome.flags, "1x60" in outcome.process.reason) == (["usage_error"], True)


def test_a_case_is_measured_and_checked_on_them_and_its_record_names_their_hash(tmp_path):
    np.savez(tmp_path / "a.npz", x=np.random.default_rng(0).normal(size=(9, 3, 4, 4)))
    a_job = changed(job(tmp_path, module=user_module(tmp_path)), samples=str(tmp_path / "a.npz"))
    outcome = run_here(a_job)
    assert (outcome.process.status, outcome.check.verdict) == ("ok", "passed")
    (spec,) = outcome.model.inputs
    assert outcome.model.data == f"9 of the 9 items of a.npz (SHA-256 {spec.sha256[:12]})"
