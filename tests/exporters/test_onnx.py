"""Exported files against their models, and what an exporter gets wrong in silence: refused, and no file left."""

import math
import sys
from functools import cache

import numpy as np
import pytest
import torch
from dyadic_nets import dyadic_qann
from torch import nn

from benchd.exporters import artifacts, sessions
from benchd.models.catalog import build
from benchd.models.stbif import Quantiser, convert
from benchd.models.vim import Vim

onnx = pytest.importorskip("onnx", reason="reads what was written")
pytest.importorskip("onnxscript", reason="torch exports with it")
pytest.importorskip("onnxruntime", reason="runs what was written")
exporter = pytest.importorskip("benchd.exporters.onnx")
onnx_files = pytest.importorskip("benchd.exporters.onnx_files")

TIME_STEPS = 2


def dyadic(shape, low, high, unit=1 / 8):
    return torch.randint(low, high, shape, generator=torch.Generator().manual_seed(len(shape))).float() * unit


def with_dyadic_weights(module):
    """Give `module` weights whose products and sums float32 holds exactly."""
    with torch.no_grad():
        for layer in module.modules():
            if isinstance(layer, (nn.Conv2d, nn.Linear)):
                layer.weight.copy_(dyadic(layer.weight.shape, -4, 5))
                layer.bias.copy_(dyadic(layer.bias.shape, -2, 3, 3 / 8))
    return module.eval()


class Qann(nn.Module):
    """A small quantised net; its scales are powers of two."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(2, 4, 3, padding=1)
        self.relu1, self.relu2 = Quantiser(8), Quantiser(8)
        self.pool = nn.MaxPool2d(2)
        self.fc1, self.fc2 = nn.Linear(64, 8), nn.Linear(8, 5)

    def forward(self, x):
        x = self.pool(self.relu1(self.conv(x)))
        return self.fc2(self.relu2(self.fc1(torch.flatten(x, 1))))


def vim():
    torch.manual_seed(0)
    return Vim(32, 1, patch_size=8, stride=8, num_classes=10, image_size=24).eval()


def onepass(encoding):
    return with_dyadic_weights(build("snn_onepass", time_steps=TIME_STEPS, decay=0.5, encoding=encoding))


def qann():
    return with_dyadic_weights(Qann())


BUILDERS = {
    "vim": vim,
    "repeat": lambda: onepass("repeat"),
    "rate": lambda: onepass("rate"),
    "qann": qann,
    "stbif": lambda: convert(dyadic_qann(), 4),
}
SHAPES = {"vim": (3, 24, 24), "repeat": (3, 32, 32), "rate": (3, 32, 32), "qann": (2, 8, 8), "stbif": (3, 32, 32)}


def images_for(kind, count=8):
    """Return images that a dyadic net turns into exact sums; a third of 3/8 is what ST-BIF is fed with."""
    shape = (count, *SHAPES[kind])
    return dyadic(shape, 0, 9) if kind in ("repeat", "rate") else dyadic(shape, -8, 9, 3 / 8)


def export(module, images, path, *, precision="fp32", batch=None, form=None, judged_by="outputs"):
    return exporter.export(module, images, path, precision=precision, batch=batch, form=form, judged_by=judged_by)


CASES = [
    ("vim", "fp32", None, "two_level"),
    ("vim", "fp16", 3, "scan"),
    ("repeat", "fp32", None, None),
    ("repeat", "fp16", 1, None),
    ("rate", "fp32", None, None),
    ("qann", "fp32", None, None),
    ("stbif", "fp32", None, None),
    pytest.param("stbif", "fp16", 1, None, marks=pytest.mark.slow),
]


# each is in the tables of TensorRT 10.3's parser and of 11's, with the types of our files
OPERATORS = """
Add And AveragePool Cast CastLike Concat ConstantOfShape Conv CumSum Div Exp Expand Floor Gather Gemm Greater
GreaterOrEqual Less LessOrEqual MatMul Max MaxPool Min Mul Pad Pow Reciprocal ReduceMean ReduceSum Relu Reshape Scan
Shape Sigmoid Slice Softplus Split Sqrt Squeeze Sub Transpose Unsqueeze Where
"""


def operators(graph):
    """Return the operators of a graph and of the bodies in it."""
    bodies = [attribute.g for node in graph.node for attribute in node.attribute if attribute.HasField("g")]
    return {node.op_type for node in graph.node}.union(*map(operators, bodies))


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    """Return a function from a case to its module, its file and what was found, each exported once."""
    folder = tmp_path_factory.mktemp("exported")

    @cache
    def of(kind, precision, batch, form):
        module, path = BUILDERS[kind](), folder / f"{kind}-{precision}-{batch}-{form}.onnx"
        judged_by = "outputs" if kind == "vim" else "codes"
        facts = export(module, images_for(kind), path, precision=precision, batch=batch, form=form, judged_by=judged_by)
        return module, path, facts

    return of


@pytest.mark.parametrize(("kind", "precision", "batch", "form"), CASES)
def test_a_file_is_its_model_in_standard_operators(exported, kind, precision, batch, form):
    _, path, facts = exported(kind, precision, batch, form)
    written = onnx.load(path)
    onnx.checker.check_model(written, full_check=True)
    assert {entry.domain: entry.version for entry in written.opset_import} == {"": 18}
    assert {node.domain for node in written.graph.node} == {""}
    assert len(written.functions) == 0
    assert operators(written.graph) <= set(OPERATORS.split())
    size = "batch" if batch is None else batch
    shape = [*([TIME_STEPS] if kind == "rate" else []), size, *SHAPES[kind]]
    assert described(written.graph.input) == [("inputs", precision, shape)]
    assert described(written.graph.output) == [("outputs", precision, [size, 5 if kind == "qann" else 10])]

    assert (facts.opset, facts.form, facts.input_shape) == (18, form, shape)
    assert facts.nodes == len(written.graph.node)
    assert (facts.unchecked, facts.parity.argmax_disagreements) == ("", 0)
    assert facts.parity.batch_sizes == ([1, 2, 5] if batch is None else [batch])
    assert facts.parity.images >= 8
    assert facts.load_s > 0


@pytest.mark.parametrize("kind", BUILDERS)
def test_a_quantised_file_of_each_is_one_that_tensorrt_reads(exported, kind, tmp_path):
    """Its explicit quantisation takes int8 with a zero point of 0 and scales that are constants above 0."""
    quantised = pytest.importorskip("benchd.exporters.quantised")
    module, path, _ = exported(kind, "fp32", None, "two_level" if kind == "vim" else None)
    images = images_for(kind, 16)
    inputs = [module.encode(image) if kind == "rate" else image for image in images.split(1)]
    feeds = [{"inputs": batch.numpy()} for batch in inputs]
    quantisation = quantised.quantise(path, tmp_path / "int8.onnx", feeds, "tensorrt", {}, smooth=kind == "vim")
    written = onnx.load(tmp_path / "int8.onnx")
    onnx.checker.check_model(written, full_check=True)
    assert {entry.domain: entry.version for entry in written.opset_import} == {"": 18}
    pairs = {"QuantizeLinear", "DequantizeLinear"}
    assert pairs <= operators(written.graph) <= {*OPERATORS.split(), *pairs}
    initializers = {tensor.name: onnx.numpy_helper.to_array(tensor) for tensor in written.graph.initializer}
    for node in written.graph.node:
        if node.op_type in pairs:
            scale, zero = initializers[node.input[1]], initializers[node.input[2]]
            assert (scale.dtype, zero.dtype, zero.any()) == (np.float32, np.int8, False)
            assert np.isfinite(scale).all()
            assert (scale > 0).all()
    assert len(quantisation.layers) >= 1


def described(values):
    types = {onnx.TensorProto.FLOAT: "fp32", onnx.TensorProto.FLOAT16: "fp16"}
    return [
        (value.name, types[tensor.elem_type], [size.dim_param or size.dim_value for size in tensor.shape.dim])
        for value in values
        for tensor in [value.type.tensor_type]
    ]


def test_the_form_of_the_scan_is_the_one_asked_for(exported):
    loops = {
        case[-1]: [node.op_type for node in onnx.load(exported(*case)[1]).graph.node].count("Scan")
        for case in CASES[:2]
    }
    assert loops == {"scan": 1, "two_level": 0}  # both directions in one


def test_a_half_precision_file_holds_its_weights_in_half_precision(exported):
    _, path, _ = exported("repeat", "fp16", 1, None)
    tensors = onnx.load(path).graph.initializer
    numbers = {kind: sum(math.prod(t.dims) for t in tensors if t.data_type == kind) for kind in (1, 10)}
    assert numbers[onnx.TensorProto.FLOAT16] > 2_000_000
    assert numbers[onnx.TensorProto.FLOAT] < 100_000  # the neurons' state, which starts from zeros in float32


@pytest.mark.parametrize("kind", ["repeat", "rate", "qann", "stbif"])
def test_dyadic_weights_leave_no_spike_to_rounding(exported, kind):
    """At a batch that the export did not look at, the outputs have the bits of eager: no spike is another."""
    module, path, _ = exported(kind, "fp32", None, None)
    images = images_for(kind, 7)
    torch.manual_seed(1)
    inputs = module.encode(images) if kind == "rate" else images
    with torch.no_grad():
        want = module.encoded(inputs) if kind == "rate" else module(inputs)
    assert want.unique().numel() > 10
    (answer,) = sessions.open_session(path).run(None, {"inputs": inputs.numpy()})
    assert np.array_equal(answer, want.numpy())


class Affine(nn.Module):
    """x (n, 4) to (n, 3); subclasses are wrong in one way each."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.fc = nn.Linear(4, 3)

    def forward(self, x):
        return self.fc(x)


class Branch(Affine):
    def forward(self, x):
        return self.fc(x) if len(x) < 4 else -self.fc(x)


class Doubling(Affine):
    def forward(self, x):
        shift = 1
        while shift < len(x):
            x, shift = x + torch.roll(x, shift, 0), 2 * shift
        return self.fc(x)


class Foreign(Affine):
    def forward(self, x):
        return torch.onnx.ops.symbolic("foreign::Lif", (self.fc(x),), dtype=x.dtype, shape=(len(x), 3), version=1)


class Unknown(Affine):
    def forward(self, x):
        return torch.linalg.eigvals(self.fc(x).mT @ self.fc(x)).real


class Exporting(Affine):
    def forward(self, x):
        return self.fc(x) * (1.01 if torch.compiler.is_exporting() else 1.0)


@pytest.mark.parametrize(
    ("module", "batch", "reason"),
    [
        (Branch, None, "asked for any batch size of 1 or more, but traced the ranges"),
        (Doubling, None, "asked for any batch size of 1 or more, but traced the ranges"),
        (Foreign, 1, "the file uses the opsets .*'foreign': 1.*, not only the standard opset 18"),
        (Unknown, 1, "cannot export this: .*linalg_eig"),
        (Exporting, 1, r"off by 1\.0e-02 of the largest output"),
    ],
)
def test_what_is_not_its_model_is_refused_and_leaves_no_file(module, batch, reason, tmp_path):
    with pytest.raises(exporter.ExportError, match=reason):
        export(module(), torch.randn(8, 4), tmp_path / "model.onnx", batch=batch)
    assert list(tmp_path.iterdir()) == []


def as_large(module, path, inline_bytes):
    images = torch.randn(8, module.in_features)
    return exporter.export(
        module, images, path, precision="fp32", batch=None, form=None, judged_by="outputs", inline_bytes=inline_bytes
    )


def test_weights_beyond_the_limit_of_a_file_go_to_a_second_one(tmp_path):
    module, path = nn.Linear(64, 32), tmp_path / "model.onnx"
    assert as_large(module, path, 4 * (64 * 32 + 32)).parity is not None
    assert artifacts.parts(path) == [path]
    assert as_large(module, path, 4 * 64 * 32).parity.error_share < 1e-5
    _, data = artifacts.parts(path)
    assert path.stat().st_size < 4 * 64 * 32 <= data.stat().st_size
    (weights,) = onnx_files.data_files(path)
    assert weights == data


@pytest.mark.slow
def test_a_model_beyond_2_gb_is_exported(tmp_path):
    path = tmp_path / "model.onnx"
    with torch.no_grad():
        module = nn.utils.skip_init(nn.Linear, 2**14, 2**15 + 2**10)
        module.weight.normal_(std=0.01)
        module.bias.zero_()
    assert as_large(module.eval(), path, exporter.INLINE_BYTES).parity.error_share < 1e-4
    assert sum(part.stat().st_size for part in artifacts.parts(path)) > 2**31


def test_without_onnx_runtime_the_file_is_made_and_said_to_be_unchecked(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    facts = export(nn.Linear(4, 3), torch.randn(8, 4), tmp_path / "model.onnx")
    assert (facts.parity, facts.load_s) == (None, None)
    assert facts.unchecked.startswith("numbers not compared: ONNX Runtime is not installed: pip install onnxruntime")
    onnx.checker.check_model(tmp_path / "model.onnx", full_check=True)
