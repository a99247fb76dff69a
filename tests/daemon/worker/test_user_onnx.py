"""A user's own ONNX file: what it reads, its answers, and each refusal with its words."""

from contextlib import nullcontext

import numpy as np
import pytest
import torch
from worker_jobs import build_and_load, changed, of_file

from benchd.daemon.errors import UnfitModel, Unsupported, UsageError
from benchd.daemon.measuring.user_inputs import inputs_of
from benchd.daemon.records import InputSpec
from benchd.daemon.worker import packing, workload
from benchd.daemon.worker.backends import tensorrt
from benchd.daemon.worker.check import checking as check
from benchd.daemon.worker.source import Source
from benchd.exporters.artifacts import sha256_of
from benchd.exporters.sessions import SessionError

onnx = pytest.importorskip("onnx", reason="writes and reads files")
pytest.importorskip("onnxruntime", reason="computes the reference")

from onnx_made import written  # noqa: E402 - writes ONNX

user_onnx = pytest.importorskip("benchd.daemon.worker.user_onnx")
measured_onnx = pytest.importorskip("benchd.daemon.measuring.user_onnx")


OPEN = "g (float[N,4] x) => (float[N,4] y) { y = Relu(x) }"
FIXED = "g (float[2,4] x) => (float[2,4] y) { y = Relu(x) }"
HALF = "g (float16[2,4] x) => (float16[2,4] y) { y = Relu(x) }"
TABLE = """g (int64[2,3] rows) => (float[2,3,4] y) <float[2,4] table = {0,0,0,0, 10,20,30,40}> {
  y = Gather(table, rows)
}"""
PAIR = """g (float[N,4] x, float[N,M] z) => (float[N,4] y, float[N,M] w) { y = Relu(x)  w = Neg(z) }"""
STORED = """g (float[2,4] x, float[4] bias) => (float[2,4] y) <float[4] bias = {1,2,3,4}> { y = Add(x, bias) }"""


BY_TOKENS = """g (int64[2,3] rows) => (float[2,3,1] y) <float[1,4] table = {1,2,3,4}, float16[4,1] w = {1,2,3,4}> {
  e = Gather(table, rows)  h = Cast<to = 10>(e)  m = MatMul(h, w)  y = Cast<to = 1>(m)
}"""
FLOAT_ENDS = """g (float[2,4] x) => (float[2,1] y) {
  h = Cast<to = 10>(x)  w = Constant<value = float16[4,1] {1,2,3,4}>()  m = MatMul(h, w)  y = Cast<to = 1>(m)
}"""
MIXED = """g (float16[2,1] x) => (float[2,1] y) <float16[1,1] a = {1}, float[1,1] b = {2}, float[1,1] c = {3}> {
  h = MatMul(x, a)  f = Cast<to = 1>(h)  m = MatMul(f, b)  y = MatMul(m, c)
}"""
HALF_TABLE = "g (int64[2,3] rows) => (float16[2,3,2] y) <float16[1,2] table = {1,2}> { y = Gather(table, rows) }"
IDS_FIRST = "g (int64[2,4] x, float16[2,4] z) => (float16[2,4] y) { c = Cast<to = 10>(x)  y = Add(c, z) }"
BRAIN = "g (float[2,4] x) => (bfloat16[2,1] y) <bfloat16[4,1] w = {1,2,3,4}> { c = Cast<to = 16>(x)  y = MatMul(c, w) }"


def own(folder, graph, *given):
    return user_onnx.OnnxModule(written(folder, graph), inputs_of(given))


def test_a_file_of_fixed_sizes_needs_no_input_option(tmp_path):
    module = own(tmp_path, FIXED)
    assert (module.batch_size, module.inputs) == (2, [InputSpec("x", "float32", [4])])
    images = torch.randn(2, 4)
    assert torch.equal(module(images), images.relu())
    assert torch.equal(module.double()(images.double()), images.relu())


def test_open_sizes_come_from_the_input_option(tmp_path):
    module = own(tmp_path, PAIR, "z=7")
    assert (module.batch_size, [str(spec) for spec in module.inputs]) == (None, ["x=4", "z=7"])
    outputs = module(-torch.ones(3, 4), torch.ones(3, 7)).named
    assert torch.equal(outputs["y"], torch.zeros(3, 4))
    assert torch.equal(outputs["w"], -torch.ones(3, 7))


def test_an_input_without_a_name_goes_by_its_place(tmp_path):
    assert [str(spec) for spec in own(tmp_path, PAIR, "4", "float32:7").inputs] == ["x=4", "z=7"]
    assert [str(spec) for spec in own(tmp_path, PAIR, "x=4", "7").inputs] == ["x=4", "z=7"]


def test_a_stored_value_is_no_input(tmp_path):
    module = own(tmp_path, STORED)
    assert [spec.name for spec in module.inputs] == ["x"]
    assert module(torch.zeros(2, 4)).tolist() == [[1, 2, 3, 4]] * 2


def test_whole_numbers_as_first_input_are_drawn_so_that_they_fit_a_table(tmp_path):
    built = workload.build(of_file(tmp_path, written(tmp_path, TABLE), batch_size=2))
    assert set(built.images.unique().tolist()) == {0, 1}
    assert built.facts.data == "random 0-1, seed 0"
    assert built.images.dtype == torch.int64
    rows = built.images[:2]
    assert torch.equal(built.plain(rows), rows[..., None] * torch.tensor([10.0, 20, 30, 40]))


def damaged(change):
    def write(folder):
        path = written(folder, STORED)
        path.write_bytes(change(path.read_bytes()))
        return path

    return write


def with_external_data(folder, location="net.data"):
    model = onnx.load(written(folder, STORED))
    (bias,) = model.graph.initializer
    bias.CopyFrom(onnx.numpy_helper.from_array(onnx.numpy_helper.to_array(bias), bias.name))  # as raw bytes
    onnx.save(model, folder / "net.onnx", save_as_external_data=True, location="net.data", size_threshold=0)
    model = onnx.load(folder / "net.onnx", load_external_data=False)
    next(entry for entry in model.graph.initializer[0].external_data if entry.key == "location").value = location
    (folder / "net.onnx").write_bytes(model.SerializeToString())
    return folder / "net.onnx"


def text(graph):
    return lambda folder: written(folder, graph)


REFUSED = {
    "absent": (lambda folder: folder / "net.onnx", [], r"net\.onnx: No such file or directory"),
    "truncated": (damaged(lambda content: content[:-30]), [], r"net\.onnx: truncated or not a valid ONNX file: "),
    "empty": (damaged(lambda content: b""), [], r"net\.onnx: truncated or not a valid ONNX file: "),
    "weights missing": (
        lambda folder: (with_external_data(folder), (folder / "net.data").unlink())[0],
        [],
        r"net\.onnx: its weights are in net\.data, which is not next to it: copy both$",
    ),
    "weights elsewhere": (
        lambda folder: with_external_data(folder, "../net.data"),
        [],
        r"truncated or not a valid ONNX file: its weights are in \.\./net\.data, outside its folder",
    ),
    "no inputs": (
        text("g () => (float y) <float one = {1}> { y = Neg(one) }"),
        [],
        "it has no inputs, so it cannot be measured",
    ),
    "text": (
        text("g (string[2] x) => (string[2] y) { y = Identity(x) }"),
        [],
        "input x is STRING, but benchd supplies tensors of numbers; export the part after the tokenizer",
    ),
    "unknown input": (text(FIXED), ["images=4"], r"--input images: the inputs of net\.onnx are x$"),
    "one too many": (text(FIXED), ["4", "5"], r"--input 5: the inputs of net\.onnx are x$"),
    "other rank": (text(FIXED), ["x=4x1"], r"--input x=4x1: net\.onnx expects 4 after the batch, not 4x1$"),
    "bfloat16": (text(BRAIN), [], r"net\.onnx: its weights are BFLOAT16; export it in float32 or float16"),
    "other size": (text(OPEN), ["x=5"], r"--input x=5: net\.onnx expects 4 after the batch, not 5$"),
    "other type": (text(OPEN), ["x=int64:4"], r"--input x=int64:4: input x of net\.onnx is float32, not int64$"),
    "with the batch": (text(OPEN), ["x=3x4"], r"--input x=3x4: omit the batch: --input x=4 --batch-sizes 3$"),
    "open size": (text(PAIR), ["x=4"], r"input z is \? after the batch; give it as in --input z=1$"),
    "no batch": (
        text("g (float x) => (float y) { y = Neg(x) }"),
        [],
        "none of its inputs has a batch axis; export it with the batch as the first dimension",
    ),
}


@pytest.mark.parametrize(("make", "given", "reason"), REFUSED.values(), ids=REFUSED)
def test_what_cannot_be_measured_is_refused_with_the_reason(make, given, reason, tmp_path):
    with pytest.raises(UsageError, match=reason):
        user_onnx.OnnxModule(make(tmp_path), inputs_of(given))


def test_weights_in_a_file_beside_it_count_as_its_bytes(tmp_path):
    module = user_onnx.OnnxModule(with_external_data(tmp_path), [])
    assert module(torch.zeros(2, 4)).tolist() == [[1, 2, 3, 4]] * 2
    artifact = user_onnx.artifact(module.path, "fp32", module.sha256)
    assert artifact.metadata.bytes == sum(path.stat().st_size for path in tmp_path.iterdir())
    (tmp_path / "net.data").write_bytes(np.array([5, 6, 7, 8], np.float32).tobytes())
    with pytest.raises(UnfitModel, match="was replaced while it was measured"):
        user_onnx.artifact(module.path, "fp32", module.sha256)


CONTRIB = "g (float[N,4] x) => (float[N,4] y) { y = com.microsoft.Gelu(x) }"
CLASSIFIER = """g (float[N,4] x) => (string[N] label, seq(map(string, float)) chances) {
  label, p = ai.onnx.ml.LinearClassifier<classlabels_strings = ["cat", "dog"], post_transform = "SOFTMAX",
    coefficients = [1.0, -1.0, 0.5, 0.25, -1.0, 1.0, -0.5, 0.75], intercepts = [0.0, 0.1]>(x)
  chances = ai.onnx.ml.ZipMap<classlabels_strings = ["dog", "cat"]>(p)
}"""


@pytest.mark.parametrize("graph", [CONTRIB, CLASSIFIER], ids=["contrib", "zipmap"])
def test_operators_of_other_domains_are_measured_where_a_runtime_has_them(graph, tmp_path):
    a_job = of_file(tmp_path, written(tmp_path, graph), batch_size=3)
    built, loaded = build_and_load(a_job)
    assert check.check_and_answers(built, loaded, a_job).check.passed
    with pytest.raises(Unsupported, match="strings or maps") if graph is CLASSIFIER else nullcontext():
        packing.refuse(a_job, built, loaded.run(built.images[:3]))


def test_labels_become_numbers_that_tell_them_apart_and_maps_a_row_per_item(tmp_path):
    module = own(tmp_path, CLASSIFIER)
    outputs = module(torch.tensor([[9.0, 0, 0, 0], [0, 9, 0, 0], [8, 0, 0, 0]])).named
    first, second, third = outputs["label"].tolist()
    assert first == third != second
    assert outputs["chances"].shape == (3, 2)
    assert torch.allclose(outputs["chances"].float().sum(1), torch.ones(3))
    assert outputs["chances"][0].argmax() != outputs["chances"][1].argmax()


def test_an_opset_that_onnx_runtime_does_not_know_is_told_by_its_name(tmp_path):
    module = user_onnx.OnnxModule(written(tmp_path, FIXED, opset=99), [])
    with pytest.raises(SessionError, match=r"net\.onnx: ONNX Runtime .* cannot load it: .*[Oo]pset"):
        module(torch.zeros(2, 4))


def loaded_as(folder, graph, variant):
    """Return the workload and the loaded variant of a file, and its job."""
    a_job = of_file(folder, written(folder, graph), variant, batch_size=2)
    return *build_and_load(a_job), a_job


@pytest.mark.parametrize("dtype", ["uint64", "uint32", "uint16"])
@pytest.mark.parametrize("variant", ["onnxruntime", "openvino"])
def test_unsigned_numbers_of_any_width_are_read(variant, dtype, tmp_path):
    graph = f"g ({dtype}[2,4] x) => (float[2,4] y) {{ y = Cast<to = 1>(x) }}"
    check_result = check.check_and_answers(*loaded_as(tmp_path, graph, variant)).check
    assert (check_result.verdict, check_result.max_abs_error) == ("passed", 0.0)


def test_floats_that_are_whole_because_they_are_large_are_no_whole_numbers(tmp_path):
    graph = "g (uint8[2,4] x) => (float[2,4] y) <float k = {123456789}> { c = Cast<to = 1>(x)  y = Mul(c, k) }"
    assert check.check_and_answers(*loaded_as(tmp_path, graph, "onnxruntime")).check.verdict == "passed"


@pytest.mark.parametrize("variant", ["onnxruntime", "openvino"])
def test_an_answer_without_numbers_is_said(variant, tmp_path):
    graph = """g (float[2,4] x) => (float[2,4] y, float[2,0] z) <int64[1] no = {0}, int64[1] axis = {1}> {
      y = Relu(x)  z = Slice(x, no, no, axis)
    }"""
    with pytest.raises(UnfitModel, match="answer z is empty: leave it out of the answer"):
        check.check_and_answers(*loaded_as(tmp_path, graph, variant))


@pytest.mark.parametrize(
    ("body", "drawing"),
    [
        ("r = RandomNormalLike(x)  y = Add(x, r)", "RandomNormalLike"),
        ("y = Dropout(x, half, on)", "Dropout"),
        ("y = If<then_branch = t () => (float[2,4] a) { a = RandomUniformLike(x) }, "
         "else_branch = e () => (float[2,4] b) { b = Identity(x) }>(on)", "RandomUniformLike"),
    ],
)  # fmt: skip
def test_a_file_that_draws_random_numbers_is_refused_with_its_operators(body, drawing, tmp_path):
    graph = f"g (float[2,4] x) => (float[2,4] y) <bool on = {{1}}, float half = {{0.5}}> {{ {body} }}"
    built, loaded, a_job = loaded_as(tmp_path, graph, "onnxruntime")
    with pytest.raises(UnfitModel, match=rf"changes between runs: net\.onnx draws random numbers \({drawing}\)"):
        check.check_and_answers(built, loaded, a_job)


@pytest.mark.parametrize(
    ("graph", "asked", "advice"),
    [
        (FIXED, "fp16", "is in fp32; request onnxruntime, openvino or tensorrt"),
        (HALF, "fp32", "is in fp16; request onnxruntime-fp16, openvino-fp16 or tensorrt-fp16"),
        (TABLE, "fp16", "is in fp32; request onnxruntime, openvino or tensorrt"),
        (BY_TOKENS, "fp32", "is in fp16; request onnxruntime-fp16, openvino-fp16 or tensorrt-fp16"),
        (FLOAT_ENDS, "fp32", "is in fp16; request onnxruntime-fp16, openvino-fp16 or tensorrt-fp16"),
        (MIXED, "fp16", "is in fp32; request onnxruntime, openvino or tensorrt"),
        (HALF_TABLE, "fp32", "is in fp16; request onnxruntime-fp16, openvino-fp16 or tensorrt-fp16"),
        (IDS_FIRST, "fp32", "is in fp16; request onnxruntime-fp16, openvino-fp16 or tensorrt-fp16"),
    ],
    ids=["fp32", "fp16", "whole numbers", "tokens", "float ends", "mixed", "half table", "ids first"],
)
def test_another_precision_is_unsupported_with_the_variant_to_ask_for(graph, asked, advice, tmp_path):
    path = written(tmp_path, graph)
    with pytest.raises(Unsupported, match=rf"net\.onnx {advice}$"):
        user_onnx.artifact(path, asked, sha256_of(path))


@pytest.mark.parametrize("sizes", ["1,seq", "N,seq", "N,4,seq"])
def test_tensorrt_takes_no_length_for_the_batch(sizes, tmp_path):
    path = written(tmp_path, f"g (float[N,4] x, float[{sizes}] z) => (float[N,4] y) {{ y = Relu(x) }}")
    source = Source(torch.nn.Identity(), torch.zeros(2, 4), "own", {}, "", "outputs", tmp_path, own=path)
    with pytest.raises(Unsupported, match=r"net\.onnx has dynamic sizes other than the batch in z: export"):
        tensorrt.load(source, "fp32", torch.device("cuda"), torch.zeros(2, 4))


@pytest.mark.parametrize("graph", [OPEN, FIXED, STORED])
def test_a_batch_alone_may_be_open_for_tensorrt(graph, tmp_path):
    assert measured_onnx.open_inputs(written(tmp_path, graph)) == []


def test_a_file_that_is_replaced_while_it_is_measured_is_refused(tmp_path):
    module = own(tmp_path, FIXED)
    path = written(tmp_path, OPEN)
    with pytest.raises(UnfitModel, match=r"^net\.onnx was replaced while it was measured: leave it alone"):
        user_onnx.artifact(path, "fp32", module.sha256)


def test_another_batch_size_than_the_file_s_is_refused(tmp_path):
    with pytest.raises(UsageError, match=r"net\.onnx has a fixed batch size of 2: give --batch-sizes 2$"):
        workload.build(of_file(tmp_path, written(tmp_path, FIXED), batch_size=1))


STREAM = """g (float[{x}] x, float[{state}] state, int64 rate) => (float[4] y) {{
  f = Cast<to = 1>(rate)  m = ReduceSum<keepdims = 0>(x)  n = ReduceSum<keepdims = 0>(state)
  p = Add(m, n)  q = Add(p, f)
  one = Constant<value = float[4] {{1,2,3,4}}>()  y = Mul(q, one)
}}"""
PLACED = {
    "named": ("batch,64", "2,batch,8", [], [[64], [2, 8]], [0, 1, None], None),
    "time first": ("T,N,4", "2,N,8", ["x=5x4"], [[5, 4], [2, 8]], [1, 1, None], None),
    "like the first": ("a,64", "2,a,8", [], [[64], [2, 8]], [0, 1, None], None),
    "fixed": ("1,64", "2,1,8", [], [[64], [2, 8]], [0, 1, None], 1),
    "open": ("a,64", "2,k,8", [], [[64], [2, 8]], [0, 1, None], None),
    "as the user says": ("a,3,8", "k,3,8", ["x=Nx3x8", "state=3xNx8"], [[3, 8], [3, 8]], [0, 1, None], 3),
    "shared": ("batch,64", "10,4", [], [[64], [10, 4]], [0, None, None], None),
}


@pytest.mark.parametrize(("x", "state", "given", "shapes", "axes", "batch"), PLACED.values(), ids=PLACED)
def test_the_batch_is_the_axis_that_the_file_calls_so(x, state, given, shapes, axes, batch, tmp_path):
    module = own(tmp_path, STREAM.format(x=x, state=state), *given, "rate=()=16000")
    assert [spec.shape for spec in module.inputs] == [*shapes, []]
    assert [spec.batch_axis for spec in module.inputs] == axes
    assert module.batch_size == batch
    again = own(tmp_path, STREAM.format(x=x, state=state), *map(str, module.inputs))
    assert again.inputs == module.inputs


WORDS = """g (float[6,N,2] x, int32[N] lengths, int64[N,3] mask, int32[N,3] ids) => (float[6,1,N,3] y, float z)
<float[2] t = {1,2}, int64[3] a = {1,3,2}, int64[3] b = {1,3,3}, int64[2] s = {10,4}> {
  w = ConstantOfShape<value = float[1] {0}>(a)  r = ConstantOfShape<value = float[1] {0}>(b)
  y = RNN<hidden_size = 3>(x, w, r, "", lengths)
  table = ConstantOfShape<value = float[1] {1}>(s)  i = Cast<to = 7>(ids)  j = Mul(i, mask)  e = Gather(table, j)
  z = ReduceSum<keepdims = 0>(e)
}"""


def test_whole_numbers_stay_within_what_the_file_accepts(tmp_path):
    words = of_file(tmp_path, written(tmp_path, WORDS), batch_size=2)
    built = workload.build(changed(words, inputs=inputs_of(["x=6xNx2"])))
    assert built.facts.data == "random x normal, lengths 0-6, mask 0-1, ids 0-9, seed 0"


def test_a_given_range_and_a_file_replace_what_is_drawn(tmp_path):
    path = tmp_path / "rows.npy"
    np.save(path, np.array([[0, 1, 1], [1, 1, 0]], np.int32))
    (given,) = own(tmp_path, TABLE, "rows=3:0-0").inputs
    assert given.span == (0, 0)
    (spec,) = own(tmp_path, TABLE, f"@{path}").inputs
    assert (spec.dtype, spec.shape, spec.items, spec.span) == ("int64", [3], 2, None)
    np.save(path, np.zeros((2, 4), np.int64))
    with pytest.raises(UsageError, match=r"net\.onnx expects 3 after the batch, not 4"):
        own(tmp_path, TABLE, f"@{path}")
