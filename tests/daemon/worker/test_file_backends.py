"""ONNX Runtime and OpenVINO on the CPU: the numbers of eager, its own memory per run, several inputs, their facts."""

import os
from importlib.metadata import version
from types import SimpleNamespace

import pytest
import torch
from fake_gpu import with_multiprocessors
from PIL import Image
from torch import nn
from worker_jobs import changed, job, measured, of_file, user_module

from benchd.daemon.errors import Unsupported
from benchd.daemon.records import Variant
from benchd.daemon.worker import steps, workload
from benchd.daemon.worker.backends import onnxruntime, openvino
from benchd.daemon.worker.source import Source
from benchd.daemon.worker.structures import cast, values
from benchd.models.catalog import build
from benchd.models.vim import Vim

pytest.importorskip("onnx", reason="writes files")
pytest.importorskip("onnxscript", reason="exports")
pytest.importorskip("onnxruntime", reason="is a backend")
core = pytest.importorskip("openvino", reason="is a backend")

from onnx_made import written  # noqa: E402 - writes ONNX

CPU = torch.device("cpu")
CAPABILITIES = "OPTIMIZATION_CAPABILITIES"
TABLE = """g (float[N,4] x, int64[N] rows) => (float[N,4] y) <float[2,4] table = {0,0,0,0, 10,20,30,40}> {
  r = Gather(table, rows)  y = Add(x, r)
}"""
TWO_OUTPUTS = """g (float[2,4] x) => (float[2,4] y, float[2] z) <int64[1] last = {1}> {
  y = Relu(x)  z = ReduceMax <keepdims = 0> (x, last)
}"""
HALF_FIRST = """g (float16[2,4] h, float[2,4] x) => (float[2,1] y) <float[4,1] w = {1,2,3,4}> {
  c = Cast<to = 1>(h)  s = Add(c, x)  y = MatMul(s, w)
}"""
NON_ZERO = "g (float[2,4] x) => (float[2,4] z, int64[2,found] y) { y = NonZero(x)  z = Relu(x) }"
SHAPES = {"vim": (3, 24, 24), "onepass": (3, 32, 32), "affine": (4,)}


class Affine(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(4, 3)

    def forward(self, images):
        return self.fc(images)


BUILDERS = {
    "vim": lambda: Vim(32, 1, patch_size=8, stride=8, num_classes=10, image_size=24).eval(),
    "onepass": lambda: build("snn_onepass", time_steps=2, encoding="rate", threshold=0.1),
    "affine": lambda: Affine().eval(),
}


@pytest.fixture(params=[onnxruntime, openvino], ids=["onnxruntime", "openvino"])
def backend(request):
    return request.param


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    return tmp_path_factory.mktemp("store")


def source(kind, store, **fields):
    torch.manual_seed(0)
    facts = {
        "module": BUILDERS[kind](),
        "images": torch.rand(8, *SHAPES[kind]),
        "model": kind,
        "options": {"scan": "serial"} if kind == "vim" else {},
        "judged_by": "codes" if kind == "onepass" else "outputs",
    }
    return Source(**facts, weights_sha256="0" * 64, folder=store, **fields)


def user_onnx(folder, graph):
    """Write a graph as the user's own file; return it as a workload."""
    return workload.build(of_file(folder, written(folder, graph), batch_size=2))


@pytest.mark.parametrize(
    ("kind", "precision", "tolerance"), [("vim", "fp32", 1e-5), ("affine", "fp16", 2e-2), ("affine", "fp32", 1e-6)]
)
def test_it_agrees_with_eager(backend, kind, precision, tolerance, store):
    if precision == "fp16" and backend is openvino and "FP16" not in core.Core().get_property("CPU", CAPABILITIES):
        pytest.skip("OpenVINO computes nothing in fp16 on this CPU, and the variant is refused")
    own = source(kind, store)
    loaded = backend.load(own, precision, CPU, own.images[:2])
    is_half = precision == "fp16" and backend is onnxruntime  # OpenVINO reads float32 and lowers it itself
    assert (loaded.dtype, loaded.module) == (torch.float16 if is_half else torch.float32, None)
    answer = loaded.run(own.images[2:4].to(loaded.dtype))
    with torch.no_grad():
        want = own.module(own.images[2:4])
    assert answer.dtype == loaded.dtype
    torch.testing.assert_close(answer.float(), want, rtol=0, atol=tolerance * float(want.abs().max()))


def test_a_rate_encoded_model_runs_on_the_draws_it_is_given(backend, store):
    own = source("onepass", store)
    loaded = backend.load(own, "fp32", CPU, own.images[:2])
    draws = [torch.rand(2, 2, 3, 32, 32, generator=torch.Generator().manual_seed(seed)) for seed in (1, 2)]
    answers = [loaded.run(own.images[:2], uniforms) for uniforms in draws]
    assert not torch.equal(*answers)
    with torch.no_grad():
        for outputs, uniforms in zip(answers, draws, strict=True):
            torch.testing.assert_close(outputs, own.module(own.images[:2], uniforms))


def test_a_run_leaves_the_output_of_the_run_before_it_unless_told_to_overwrite_it(backend, store):
    own = source("affine", store)
    loaded = backend.load(own, "fp32", CPU, own.images[:2])
    first = loaded.run(own.images[:2])
    kept = first.clone()
    second = loaded.run(own.images[2:4])
    assert first.data_ptr() != second.data_ptr()
    assert torch.equal(first, kept)
    assert not torch.equal(first, second)
    loaded.reuse()
    third = loaded.run(own.images[2:4])
    assert torch.equal(third, second)
    fourth = loaded.run(own.images[:2])
    assert fourth.data_ptr() == third.data_ptr()
    assert torch.equal(fourth, kept)


def test_a_run_that_writes_nothing_leaves_no_right_answer(store):
    """Were each input's output apart, the one of its last run would be taken for that of this run."""
    own = source("affine", store)
    loaded = onnxruntime.load(own, "fp32", CPU, own.images[:2])
    pool = list(own.images.split(2))
    right = [own.module(images).detach() for images in pool]
    step = steps.SingleInference(loaded, pool, known=range(4))
    for index in range(40):
        step(index)
    assert all(torch.allclose(answer, right[place]) for place, answer in step.sample.answers)
    step.sample.clear()
    loaded.run._session = SimpleNamespace(run_with_iobinding=lambda binding: None)
    for index in range(40):
        step(index)
    assert not all(torch.allclose(answer, right[place]) for place, answer in step.sample.answers)


def test_an_input_may_lie_in_any_order(backend, store):
    own = source("vim", store)
    run = backend.load(own, "fp32", CPU, own.images[:2]).run
    images = own.images[:2]
    turned = images.to(memory_format=torch.channels_last)
    assert not turned.is_contiguous()
    torch.testing.assert_close(run(turned), run(images))


def test_what_ran_it_is_told(store):
    own = source("affine", store)
    facts = onnxruntime.load(own, "fp32", CPU, own.images[:2]).runtime
    assert (facts.provider, facts.node_shares) == ("CPUExecutionProvider", {"CPUExecutionProvider": 1.0})
    assert facts.threads == torch.get_num_threads()
    assert facts.load_s > 0
    assert facts.notes == []
    assert [used.format for used in own.used] == ["onnx"]


def test_openvino_tells_in_what_its_layers_compute(store):
    own = source("affine", store)
    facts = openvino.load(own, "fp32", CPU, own.images[:2]).runtime
    assert facts.provider == f"OpenVINO {version('openvino')}"
    assert (facts.threads, facts.notes) == (torch.get_num_threads(), ["layers by number format: 1 f32"])


def test_openvino_pins_no_thread_where_several_models_compute_at_once(store):
    """Otherwise it pins the threads of all of them to the same CPUs, and half of the processes take twice as long."""
    own = source("affine", store, is_alone=False)
    loaded = openvino.load(own, "fp32", CPU, own.images[:2])
    assert loaded.run.compiled.get_property("ENABLE_CPU_PINNING") is False


@pytest.mark.parametrize("precision", ["fp16", "bf16", "int8"])
def test_openvino_refuses_a_format_that_it_would_not_compute_in(precision, tmp_path):
    """It takes a precision as a hint, and computes integers as they are."""
    built = user_onnx(tmp_path, "g (int64[2,4] x) => (int64[2,4] y) { y = Neg(x) }")
    compiled = core.Core().compile_model(built.source.onnx("fp32", 2, "cpu_without_scan").path, "CPU")
    with pytest.raises(Unsupported, match=f"computes none of its layers in {precision} on this CPU, but . in i"):
        openvino._computed(compiled, precision)


def test_an_own_file_may_have_several_inputs(backend, tmp_path):
    built = user_onnx(tmp_path, TABLE)
    loaded = backend.load(built.source, "fp32", CPU, built.images[:2])
    table = torch.tensor([[0.0] * 4, [10, 20, 30, 40]])
    drawn_rows = []
    for start in range(0, 8, 2):
        x, rows = values(built.images[start : start + 2])
        assert (x.dtype, rows.dtype) == (torch.float32, torch.int64)
        answer = loaded.run(x, rows)
        assert torch.equal(answer, x + table[rows])
        assert torch.equal(answer, built.plain(x, rows))
        drawn_rows.append(rows.tolist())
    assert len({tuple(rows) for rows in drawn_rows}) > 1  # the inputs behind the first rotate too


def test_an_own_file_may_read_half_precision_before_float32(backend, tmp_path):
    built = user_onnx(tmp_path, HALF_FIRST)
    batch = built.images[:2]
    loaded = backend.load(built.source, "fp32", CPU, batch)
    assert [value.dtype for value in values(cast(batch, loaded.dtype))] == [torch.float16, torch.float32]
    torch.testing.assert_close(loaded.run(*values(cast(batch, loaded.dtype))), built.plain(*values(batch)))


def test_every_output_is_answered_by_its_name(backend, tmp_path):
    built = user_onnx(tmp_path, TWO_OUTPUTS)
    loaded = backend.load(built.source, "fp32", CPU, built.images[:2])
    answers = loaded.run(built.images[:2]).named
    wanted = built.plain(built.images[:2]).named
    assert [(name, value.shape) for name, value in answers.items()] == [("y", (2, 4)), ("z", (2,))]
    assert all(torch.equal(answers[name], wanted[name]) for name in ("y", "z"))


def test_the_size_of_an_output_may_depend_on_the_values(tmp_path):
    built = user_onnx(tmp_path, NON_ZERO)
    images = torch.zeros(2, 4)
    images[0, :3] = 1
    loaded = onnxruntime.load(built.source, "fp32", CPU, images)
    for ones in (5, 8, 0, 3, 3):  # in one place in memory
        images.view(-1)[:] = torch.arange(8) < ones
        answers, wanted = loaded.run(images).named, built.plain(images).named
        assert list(answers) == ["z", "y"]
        assert answers["y"].shape == (2, ones)
        assert all(torch.equal(answers[name], wanted[name]) for name in answers)
    loaded.run._session = SimpleNamespace(run_with_iobinding=lambda binding: None)
    with pytest.raises(RuntimeError):  # a run that writes nothing has no answer
        loaded.run(images)


@pytest.mark.parametrize(
    ("graph", "dtype"),
    [
        ("g (int64[2,4] x) => (int64[2,4] y) { y = Neg(x) }", torch.int64),
        ("g (int8[2,4] x) => (int8[2,4] y) { y = Sign(x) }", torch.int8),
        ("g (int16[2,4] x) => (int16[2,4] y) { y = Identity(x) }", torch.int16),
        ("g (bool[2,4] x) => (bool[2,4] y) { y = Not(x) }", torch.bool),
    ],
    ids=["int64", "int8", "int16", "bool"],
)
def test_an_own_file_may_compute_with_other_types(backend, graph, dtype, tmp_path):
    built = user_onnx(tmp_path, graph)
    loaded = backend.load(built.source, "fp32", CPU, built.images[:2])
    answer = loaded.run(built.images[:2])
    assert (built.images.dtype, answer.dtype) == (dtype, dtype)
    assert torch.equal(answer, built.plain(built.images[:2]))


def test_openvino_takes_a_file_in_half_precision_as_it_is_written(tmp_path):
    built = user_onnx(tmp_path, "g (float16[2,4] x) => (float16[2,4] y) { y = Relu(x) }")
    loaded = openvino.load(built.source, "fp16", CPU, built.images[:2])
    assert loaded.dtype == torch.float16
    assert torch.equal(loaded.run(built.images[:2].half()), built.images[:2].half().relu())
    with pytest.raises(Unsupported, match="is in fp16; request"):
        openvino.load(built.source, "bf16", CPU, built.images[:2])


def test_an_output_that_is_no_number_makes_the_case_unsupported(backend, tmp_path):
    built = user_onnx(tmp_path, "g (float[2,4] x) => (seq(float[2,4]) y) { y = SequenceConstruct(x, x) }")
    with pytest.raises(Unsupported, match=r"y in the file is a seq\(tensor\(float\)\)|for operations: \w+::Sequence"):
        backend.load(built.source, "fp32", CPU, built.images[:2])


def test_a_data_set_smaller_than_the_batch_fills_it(tmp_path):
    """A file has the size of the batch that it is loaded for."""
    images = tmp_path / "images" / "one"
    images.mkdir(parents=True)
    for number in range(6):
        Image.new("RGB", (4, 4), (40 * number, 0, 0)).save(images / f"{number}.png")
    a_job = job(tmp_path, module=user_module(tmp_path), variant=Variant("onnxruntime"), batch_size=8, streams=2)
    a_job = changed(a_job, data=f"imagefolder:{images.parent}")
    check = measured(a_job).check
    assert check.passed, check.note


def weighted(folder, weight):
    graph = f"g (float[2,4] x) => (float[2,4] y) <float[1] w = {{{weight}}}> {{ y = Mul(x, w) }}"
    return user_onnx(folder, graph).source.onnx("fp32", 2, "cpu")


def test_the_provider_of_tensorrt_computes_in_the_types_of_the_file(tmp_path, monkeypatch):
    """With a flag for a precision its networks are weakly typed."""
    monkeypatch.setenv("CACHE_DIRECTORY", str(tmp_path))
    with_multiprocessors(monkeypatch, 8)
    options = onnxruntime._options("tensorrt", weighted(tmp_path, 1), torch.zeros(2, 4))
    assert options.pop("trt_engine_cache_enable") == "True", "as Python spells it"
    assert list(options) == ["trt_engine_cache_path"]


def test_files_sizes_or_gpus_that_differ_share_no_engine_and_old_engines_go(tmp_path, monkeypatch):
    """The provider names engines by the names in the graph, which are the same here."""
    monkeypatch.setenv("CACHE_DIRECTORY", str(tmp_path))
    monkeypatch.setattr(onnxruntime, "_ENGINE_FOLDERS", 2)
    folders = []
    for time, (weight, number, batch) in enumerate([(1, 4, 2), (1, 8, 2), (2, 8, 2), (2, 8, 1)]):
        with_multiprocessors(monkeypatch, number)
        folders.append(onnxruntime._engines(weighted(tmp_path, weight), torch.zeros(batch, 4)))
        (folders[-1] / "engine").touch()
        os.utime(folders[-1], (time, time))
    assert len(set(folders)) == 4
    assert [folder.exists() for folder in folders] == [False, False, True, True]
