"""Modules as users write them: what is imported, what they read and answer, and each sentence where it cannot be."""

import sys

import msgspec
import numpy as np
import pytest
import torch
from worker_jobs import build_and_load, changed, job, measured, run_here, user_module

from benchd.daemon.errors import UnfitModel, Unsupported, UsageError
from benchd.daemon.measuring.user_inputs import inputs_of, of_module
from benchd.daemon.records import Variant
from benchd.daemon.worker import steps, workload
from benchd.daemon.worker.check import audit
from benchd.daemon.worker.check import checking as check
from benchd.daemon.worker.structures import values
from benchd.exporters.artifacts import sha256_of

HELPER = """
from torch import nn

class Head(nn.Linear):
    pass
"""
ZOO = '''
from __future__ import annotations

import threading
from dataclasses import dataclass

import torch
from helper import Head
from torch import Tensor, nn
from torch.nn import functional as F


@dataclass
class Found:
    logits: Tensor
    hidden: list
    nothing: Tensor | None = None


class Base(nn.Module):
    input_shape = (3, 4, 4)

    def __init__(self):
        super().__init__()
        self.fc = Head(48, 5)

    def head(self, x):
        return self.fc(x.flatten(1))


def net(forward):
    return type("Net", (Base,), {"forward": forward})


as_dict = net(lambda self, x: {"logits": self.head(x), "aux": [self.head(x), {"deep": x}]})
as_dataclass = net(lambda self, x: Found(self.head(x), [x, x.mean()]))
scalar = net(lambda self, x: self.head(x).mean())
numbers = net(lambda self, x: (self.head(x), 3, 2.5, True, None))
in_float = net(lambda self, x: self.fc(x.float().flatten(1)))
in_brain = net(lambda self, x: self.head(x.to(self.fc.weight.dtype)))
unchanged = net(lambda self, x: x)
whole = net(lambda self, x: (self.head(x).argmax(1), x > 0))
varying = net(lambda self, x: {"logits": self.head(x), "boxes": x[x > 0.5]})
seldom = net(lambda self, x: {"logits": self.head(x), "boxes": x[x.flatten(1)[:, 0] > 1]})
dropout = net(lambda self, x: F.dropout(self.head(x), 0.5))
not_a_number = net(lambda self, x: {"logits": self.head(x), "loss": self.head(x).sum() / 0})
writes = net(lambda self, x: self.head(x.mul_(2)))
text = net(lambda self, x: {"logits": self.head(x), "name": "cat"})
branches = net(lambda self, x: self.head(x) if x.sum() > 0 else self.head(x) * 2)
same_names = net(lambda self, x, h: {"x": x * 2, "h": h.tanh(), "fc.weight": self.head(x), "outputs": x + 1})
only_outputs = net(lambda self, x: {"outputs": self.head(x)})
answer = 42


class Counting(Base):
    calls = 0

    def forward(self, x):
        self.calls += 1
        return self.head(x) + self.calls


class Counts(Counting):
    def forward(self, x):
        self.calls += 1
        return self.head(x)


class OneOff(nn.Module):
    """Answers with the class beside the right one, but in float64; its weight is large enough to be shared."""

    def __init__(self):
        super().__init__()
        self.head = nn.Linear(48, 22_000)

    def forward(self, x):
        answer = self.head(x.flatten(1)).argmax(1)
        return answer if x.dtype == torch.float64 else answer + 1


class Raises(Base):
    def forward(self, x):
        return x.view(7, -1, 5)


class Named(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(10, 8)

    def forward(self, *, ids, mask):
        return (self.embedding(ids) * mask[..., None]).sum(1)


class OneDict(Named):
    def forward(self, batch, scale):
        return super().forward(ids=batch["words"]["ids"], mask=batch["mask"]) * scale[:, None]


class Forgets(Named):
    def forward(self, *, ids, mask):
        is_exact = self.embedding.weight.dtype == torch.float64
        return super().forward(ids=ids if is_exact else torch.where(ids > 1, 0, ids), mask=mask)


class Float32Only(Named):
    def _apply(self, fn, recurse=True):
        raise NotImplementedError


class Says(Named):
    inputs = ["ids=int64:6", "mask=bool:6"]


class Plain(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(48, 5)

    def forward(self, x):
        return self.fc(x.flatten(1))


def autoencoder():
    """Attributes that this project's own models have too, with another meaning."""
    module = unchanged()
    module.encode, module.encoded, module.freeze, module.neurons = 1, 2, True, nn.ModuleList()
    return module


def training():
    return nn.Sequential(nn.Flatten(), nn.Linear(48, 5), nn.Dropout(0.5)).train()


def lazy():
    return nn.Sequential(nn.Flatten(), nn.LazyLinear(5))


def lazy_norm():
    return nn.Sequential(nn.LazyConv2d(4, 3), nn.LazyBatchNorm2d(), nn.Flatten(), nn.LazyLinear(5))


class Remembers(Base):
    """Keeps what depends on its weights in attributes of its own."""

    def __init__(self):
        super().__init__()
        self.scales = {"of": [self.fc.weight.norm()]}

    def forward(self, x):
        self.last = self.head(x)
        return self.last * self.scales["of"][0]


def old_norms():
    flat = nn.utils.weight_norm(nn.Linear(48, 8)), nn.utils.spectral_norm(nn.Linear(8, 5))
    return nn.Sequential(nn.Flatten(), *flat)


def compiled_inside():
    return nn.Sequential(nn.Flatten(), torch.compile(nn.Linear(48, 5)))


class Decorated(Base):
    @torch.compile
    def forward(self, x):
        return self.head(x)


def scripted():
    return torch.jit.script(Plain())


def quantised():
    from torch.ao.quantization import quantize_dynamic

    return quantize_dynamic(Plain().eval(), {nn.Linear}, dtype=torch.qint8)


def exported():
    return torch.export.export(Plain().eval(), (torch.zeros(2, 3, 4, 4),))


def dense():
    torch.manual_seed(0)
    module = Plain()
    module.fc.bias.data = torch.zeros(5)
    return module


def strided():
    module = dense()
    module.fc.weight.data = torch.stack([module.fc.weight.data] * 2, 2)[..., 1]
    module.fc.bias.data = torch.zeros(1).expand(5)
    return module


def locked():
    module = Plain()
    module.lock = threading.Lock()
    return module


def needs(depth):
    return Plain()


def wrong():
    return {"a": 1}
'''
IMAGE = ["3x4x4"]
BRAIN = ["bfloat16:3x4x4"]
WORDS = ["ids=int64:6", "mask=bool:6"]
OF_REFUSED = {"branches": [], "varying": [], "in_brain": BRAIN}
# torch.ao and torch.jit say on every use that they are old
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")


@pytest.fixture(autouse=True)
def _own_imports(monkeypatch):
    """Leave no module and no path of one test to the next."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield
    for name in ("zoo", "helper", "inner"):
        sys.modules.pop(name, None)


def zoo(folder, name, given=(), **fields):
    (folder / "zoo.py").write_text(ZOO)
    (folder / "helper.py").write_text(HELPER)
    a_job = job(folder, module=f"{folder}/zoo.py:{name}", **{"model": f"own.zoo.{name}", "batch_size": 2} | fields)
    return changed(a_job, inputs=of_module(inputs_of(given)))


def checked(a_job):
    """Build, load, run and check the job here, without a worker."""
    built, loaded = build_and_load(a_job)
    pool = steps.batches(built.images, a_job.case.batch_size, loaded)
    with torch.inference_mode():
        step = steps.SingleInference(steps.uniform(loaded, loaded.run(pool[0])), pool, known=[0])
        step(0)
    result, right, _ = check.check_and_answers(built, loaded, a_job)
    return audit.audited(result, right, step.sample.answers)


TAKEN = {
    "as_dataclass": [],
    "numbers": [],
    "unchanged": [],
    "whole": [],
    "Counts": [],
    "autoencoder": [],
    "Says": [],
    "OneDict": ["batch.words.ids=int64:6:0-9", "batch.mask=bool:6", "scale=float32:"],
    "training": IMAGE,
    "lazy_norm": IMAGE,
    "old_norms": IMAGE,
    "Remembers": IMAGE,
    "exported": IMAGE,
    "scripted": IMAGE,
    "in_brain": BRAIN,
}


@pytest.mark.parametrize(("name", "given"), TAKEN.items(), ids=TAKEN)
def test_modules_as_they_are_agree_with_float64(name, given, tmp_path):
    result = checked(zoo(tmp_path, name, given))
    assert (result.passed, result.reference, result.audited) == (True, "float64", 2), result.note


def test_weights_of_any_stride_are_the_same_numbers(tmp_path):
    strided, dense = (workload.build(zoo(tmp_path, name, IMAGE)) for name in ("strided", "dense"))
    assert strided.facts.weights_sha256 == dense.facts.weights_sha256


def test_an_answer_without_rows_is_checked_in_several_batches(tmp_path):
    given = zoo(tmp_path, "scalar", [], batch_size=4)
    limits = msgspec.structs.replace(given.limits, check_images=8)
    result = checked(msgspec.structs.replace(given, limits=limits))
    assert result.passed, result.note


def test_a_wrong_answer_of_a_large_weight_fails_its_check_and_not_its_process(tmp_path):
    assert measured(zoo(tmp_path, "OneOff", IMAGE)).check.verdict == "failed"


@pytest.mark.parametrize("name", ["as_dataclass", "numbers", "unchanged", "whole", "in_float", "OneDict", "old_norms"])
def test_the_exported_file_answers_the_same_by_every_path(name, tmp_path):
    pytest.importorskip("onnxscript", reason="exports")
    pytest.importorskip("onnxruntime", reason="runs the file")
    result = checked(zoo(tmp_path, name, TAKEN.get(name, []), variant=Variant("onnxruntime")))
    assert result.passed, result.note


@pytest.mark.parametrize(
    ("backend", "name", "given"),
    [
        ("onnxruntime", "same_names", ["x=3x4x4", "h=6"]),
        ("openvino", "same_names", ["x=3x4x4", "h=6"]),
        ("onnxruntime", "only_outputs", []),
    ],
)
def test_an_answer_may_be_named_as_an_input_or_a_weight(name, given, backend, tmp_path):
    pytest.importorskip("onnxscript", reason="exports")
    pytest.importorskip(backend, reason="runs the file")
    result = checked(zoo(tmp_path, name, given, variant=Variant(backend)))
    assert result.passed, result.note


@pytest.mark.parametrize(("name", "given"), [("in_float", []), ("quantised", IMAGE)])
def test_where_float64_cannot_run_the_reference_is_float32_and_says_why(name, given, tmp_path):
    result = checked(zoo(tmp_path, name, given))
    assert (result.passed, result.reference) == (True, "float32")
    assert result.note.startswith("compared with float32 on the CPU, because float64 cannot run this model (Runtime")


@pytest.mark.parametrize("name", ["varying", "seldom"])
def test_an_answer_that_changes_its_size_is_compared_batch_by_batch(name, tmp_path):
    """The second one has no boxes at all in most batches."""
    assert checked(zoo(tmp_path, name, batch_size=2)).passed


REFUSED = {
    "dropout": ([], UnfitModel, "answer to the same input changes between runs"),
    "Counting": ([], UnfitModel, "answer to the same input changes between runs"),
    "not_a_number": ([], UnfitModel, "answer loss is NaN or infinite in float64"),
    "writes": ([], UnfitModel, "forward writes to its input"),
    "text": ([], UnfitModel, "returns str at name"),
    "locked": (IMAGE, UnfitModel, r"copied by copy\.deepcopy \(TypeError: cannot pickle"),
    "needs": ([], UsageError, r"--module zoo\.py:needs: missing a required argument: 'depth'; give a function that"),
    "wrong": ([], UsageError, r"--module zoo\.py:wrong: it returned dict, not torch\.nn\.Module"),
    "answer": ([], UsageError, r"--module zoo\.py:answer: this is int, not a function"),
    "absent": ([], UsageError, r"--module zoo\.py:absent: zoo\.py has no 'absent'"),
    "lazy": ([], UsageError, "give each input of the module without the batch axis, as in --input 3x224x224"),
    "Named": (["int64:6"], UsageError, r"--input int64:6: Named\.forward\(.*ids, mask\).*give each of its inputs"),
}


@pytest.mark.parametrize(
    ("name", "given", "kind", "words"), [(name, *rest) for name, rest in REFUSED.items()], ids=REFUSED
)
def test_what_cannot_be_measured_ends_in_a_sentence(name, given, kind, words, tmp_path):
    with pytest.raises(kind, match=words):
        checked(zoo(tmp_path, name, given))


@pytest.mark.parametrize(
    ("name", "variant", "words"),
    [
        ("scripted", Variant("compile"), "torch cannot compile or export a scripted module"),
        ("quantised", Variant("onnxruntime"), "torch cannot export a quantised module"),
        ("compiled_inside", Variant(), "the module is already compiled, .*: build it without torch.compile"),
        ("Decorated", Variant("onnxruntime"), "the module is already compiled"),
        ("quantised", Variant("eager", "fp16"), "leave fp16, bf16 and amp out"),
        ("branches", Variant("onnxruntime"), r"cannot export (this: |a model whose sizes).*measured with --onnx"),
        ("in_brain", Variant("onnxruntime"), "NumPy, which lacks bfloat16: take the input in float32"),
        ("in_brain", Variant("torchao", "int8"), "NumPy, which lacks bfloat16: take the input in float32"),
        ("varying", Variant("onnxruntime"), r"sizes depend on the values of its inputs; .*measured with --onnx"),
    ],
)
def test_what_torch_does_not_make_of_a_module_is_unsupported(name, variant, words, tmp_path):
    pytest.importorskip("onnxscript", reason="exports")
    with pytest.raises(Unsupported, match=words):
        checked(zoo(tmp_path, name, OF_REFUSED.get(name, IMAGE), variant=variant))


def test_an_input_in_bfloat16_is_measured_from_end_to_end(tmp_path):
    check = measured(zoo(tmp_path, "in_brain", BRAIN)).check
    assert check.passed, check.note


def test_data_is_for_a_model_of_images(tmp_path):
    a_job = changed(zoo(tmp_path, "Named", WORDS), data="imagefolder:nowhere")
    with pytest.raises(UsageError, match="--data gives one input, but own"):
        workload.build(a_job)


def test_a_missing_package_is_told_from_a_package_that_misses_another(tmp_path):
    a_job = changed(zoo(tmp_path, "lazy"), module="gone.net:build", module_folder=str(tmp_path))
    with pytest.raises(UsageError, match=r"--module gone\.net:build: no module 'gone' in this folder"):
        workload.build(a_job)
    (tmp_path / "inner.py").write_text("import lost")
    with pytest.raises(ModuleNotFoundError, match="lost"):
        workload.build(changed(a_job, module="inner:build"))


def test_a_failure_names_the_line_of_the_user_s_file_and_the_log_through_a_compiler_too(tmp_path):
    outcome = run_here(zoo(tmp_path, "Raises", variant=Variant("compile")))
    line = ZOO.splitlines().index("        return x.view(7, -1, 5)") + 1
    assert outcome.process.reason == (
        f"zoo.py:{line}: in forward: return x.view(7, -1, 5): RuntimeError: shape '[7, -1, 5]' is invalid for input of "
        "size 96 (log: logs/run.0.log)"
    )
    assert outcome.flags == []


def test_the_flag_of_a_float32_reference_stands_in_the_outcome(tmp_path):
    assert "reference_fp32" in measured(zoo(tmp_path, "in_float")).flags


DRAWN = {
    "table": ("Named", WORDS, "random ids 0-9, mask 0-1, seed 0"),
    "table of the exact form": ("Forgets", WORDS, "random ids 0-9, mask 0-1, seed 0"),
    "table of the only form": ("Float32Only", WORDS, "random ids 0-9, mask 0-1, seed 0"),
    "as given": ("Named", ["ids=int64:6:2-5", "mask=bool:6"], "random ids 2-5, mask 0-1, seed 0"),
    "bytes": ("in_float", ["uint8:3x4x4"], "random 0-255, seed 0"),
    "indexes nothing": ("in_float", ["int64:3x4x4"], "random 0-1, seed 0"),
    "range of floats": ("as_dict", ["3x4x4:0.5-2"], "random 0.5-2, seed 0"),
}


@pytest.mark.parametrize(("name", "given", "data"), DRAWN.values(), ids=DRAWN)
def test_inputs_are_drawn_over_what_they_mean_and_the_record_says_so(name, given, data, tmp_path):
    built = workload.build(zoo(tmp_path, name, given))
    assert built.facts.data == data
    again = workload.build(zoo(tmp_path, name, [str(spec) for spec in built.facts.inputs]))
    for spec, first, second in zip(built.facts.inputs, values(built.images), values(again.images), strict=True):
        assert torch.equal(first, second)
        low, high = spec.span or (0, 1)
        ends = first.min().item(), first.max().item()
        assert ends == (low, high) if not first.is_floating_point() else low <= ends[0] < ends[1] <= high


@pytest.mark.parametrize(("given", "is_named"), [("int64:3x4x4", True), ("int64:3x4x4:0-1", False)])
def test_whole_numbers_whose_meaning_nothing_says_are_named_by_the_check(given, is_named, tmp_path):
    note = checked(zoo(tmp_path, "in_float", [given])).note
    assert ("drawn as 0 or 1; for a range, give --input" in note) == is_named


PLACED = """
import torch
from torch import nn


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.cell, self.head = nn.GRU(4, 3, num_layers=2), nn.Linear(3, 2)

    def forward(self, x, state, rate):
        if x.shape != (5, state.shape[1], 4) or state.shape != (2, x.shape[1], 3) or rate.shape != ():
            raise ValueError(f"{x.shape} {state.shape} {rate.shape}")
        answer, state = self.cell(x * (rate / 16000.0), state)
        return {"scores": self.head(answer[-1]), "next": state}
"""


@pytest.mark.parametrize("backend", ["eager", "onnxruntime"])
def test_the_batch_is_where_the_input_says_and_a_constant_has_none(backend, tmp_path):
    if backend == "onnxruntime":
        pytest.importorskip("onnxscript", reason="exports")
    (tmp_path / "placed.py").write_text(PLACED)
    given = of_module(inputs_of(["x=5xNx4", "state=2xNx3", "rate=int64:()=16000"]))
    a_job = job(tmp_path, model="own.placed.Recurrent", module=f"{tmp_path}/placed.py:Recurrent", batch_size=3)
    check = measured(changed(a_job, inputs=given, variant=Variant(backend))).check
    assert check.passed, check.note


def test_inputs_of_a_file_are_its_items_again_and_again(tmp_path):
    items = np.random.default_rng(0).standard_normal((5, 3, 4, 4))
    path = tmp_path / "items.npy"
    np.save(path, items)
    built = workload.build(zoo(tmp_path, "as_dict", [f"@{path}"]))
    assert np.array_equal(built.images[5:10].numpy(), items.astype(np.float32))
    (spec,) = built.facts.inputs
    assert (spec.dtype, spec.shape, spec.sha256) == ("float32", [3, 4, 4], sha256_of(path))
    assert built.facts.data == f"5 items of items.npy (SHA-256 {spec.sha256[:12]})"
    as_read = workload.build(zoo(tmp_path, "in_float", [f"float64:@{path}"])).images
    assert as_read.dtype == torch.float64


def test_a_file_that_does_not_fit_is_refused_in_a_sentence(tmp_path):
    np.save(tmp_path / "halves.npy", np.full((4, 3, 4, 4), 0.5))
    np.save(tmp_path / "empty.npy", np.zeros((0, 4)))
    (tmp_path / "damaged.npy").write_bytes(b"damaged")
    np.save(tmp_path / "gaps.npy", np.full((4, 3, 4, 4), np.nan))
    np.save(tmp_path / "words.npy", np.array(["a"]))
    for text, words in {
        "int64:@{}/halves.npy": "numbers are float64, and some do not fit int64",
        "@{}/empty.npy": r"the first axis is the items, so \[0, 4\] contains none",
        "@{}/damaged.npy": "not a complete .npy file of numbers",
        "@{}/absent.npy": "No such file or directory",
        "float32:@{}/words.npy": "its <U1 array contains values that are not real numbers",
        "@{}/gaps.npy": "its float64 array contains values that are not real numbers",
    }.items():
        with pytest.raises(UsageError, match=words):
            workload.build(zoo(tmp_path, "as_dict", [text.format(tmp_path)]))


def test_a_failure_on_drawn_whole_numbers_says_which(tmp_path):
    module = user_module(tmp_path, forward="assert images.min() > 0; return self.fc(images.float().flatten(1))")
    given = of_module(inputs_of(["int64:3x4x4"]))
    outcome = run_here(changed(job(tmp_path, module=module), inputs=given))
    assert "; inputs: random 0-1, seed 0; give others as --input NAME=TYPE:SIZES:LOW-HIGH" in outcome.process.reason
