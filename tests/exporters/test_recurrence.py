"""Both ONNX forms of the recurrence in ONNX Runtime, against the scan in float64."""

from functools import cache

import numpy as np
import pytest
import torch
from pairs import pairs

from benchd.exporters import files, sessions
from benchd.kernels.selective_scan import selective_scan
from benchd.kernels.selective_scan.torch_impl import ONNX_OPERATOR

pytest.importorskip("onnxruntime", reason="runs what was built")
ir = pytest.importorskip("onnx_ir", reason="comes with onnxscript")
recurrence = pytest.importorskip("benchd.exporters.recurrence")

CHANNELS, STATES = 5, 4
LENGTHS = [1, 2, 31, 64, 65, 197, 1000]
# delta lies within half of it; decays are exp(-delta) to the power of about one
DELTAS = {"decays near 0.99": 0.01, "hot": 100.0}
NAMES = ("delta", "x", "B", "C")


def graph(form, length, *batch):
    """Return the recurrence over two directions with the rates as an input, in this form; a size may be a name."""
    widths = (CHANNELS, CHANNELS, STATES, STATES)
    inputs = [value(name, length, 2, *batch, width) for name, width in zip(NAMES, widths, strict=True)]
    inputs.append(value("A", 2, *[1] * len(batch), STATES, CHANNELS))
    domain, _, name = ONNX_OPERATOR.partition("::")
    y = ir.Value(name="y", type=ir.TensorType(ir.DataType.FLOAT))
    node = ir.Node(domain, name, inputs, outputs=[y], name="recurrence")
    opsets = {"": files.OPSET, domain: 1}
    built = ir.Graph(inputs, [y], nodes=[node], opset_imports=opsets, name="test")
    model = ir.Model(built, ir_version=9)
    recurrence.expand(model, form)
    return model


def value(name, *shape):
    return ir.Value(name=name, shape=ir.Shape(shape), type=ir.TensorType(ir.DataType.FLOAT))


def session(model, folder):
    ir.save(model, folder / "model.onnx")
    return sessions.open_session(folder / "model.onnx")


@cache
def images(length, typical_delta):
    """Return every input of the graph for five images and y (length, 2, images, channels) of them in float64."""
    generator = torch.Generator().manual_seed(length)

    def normal(width):
        return torch.randn(length, 2, 5, width, generator=generator)

    delta = typical_delta * (0.5 + torch.rand(length, 2, 5, CHANNELS, generator=generator))
    rates = -(0.5 + torch.rand(2, 1, STATES, CHANNELS, generator=generator))
    inputs = {"delta": delta, "x": delta * normal(CHANNELS), "B": normal(STATES), "C": normal(STATES), "A": rates}
    return inputs, reference(*(tensor.double() for tensor in inputs.values()))


def reference(delta, x, B, C, A):
    directions = [
        selective_scan(
            *(tensor[:, g].transpose(0, 1) for tensor in (x / delta, delta)),
            A[g, 0].mT,
            *(tensor[:, g].transpose(0, 1) for tensor in (B, C)),
            implementation="torch",
        )
        for g in (0, 1)
    ]
    return torch.stack(directions).permute(2, 0, 1, 3).numpy()


def assert_near(run, length, batch):
    for typical_delta in DELTAS.values():
        inputs, exact = images(length, typical_delta)
        feeds = {name: (inputs[name] if name == "A" else inputs[name][:, :, :batch]).numpy() for name in inputs}
        (answer,) = run.run(None, feeds)
        assert np.abs(answer - exact[:, :, :batch]).max() <= 1e-5 * np.abs(exact).max()


@pairs(form=files.FORMS, length=LENGTHS, batch=[1, 3, "batch"])
def test_the_answers_are_the_scan_s_whatever_batch_is_fixed(form, length, batch, tmp_path):
    run = session(graph(form, length, batch), tmp_path)
    for size in (1, 3, 5) if batch == "batch" else (batch,):
        assert_near(run, length, size)


@pytest.mark.parametrize("form", files.FORMS)
def test_a_dynamic_length_and_two_dynamic_sizes_of_a_batch_are_refused(form):
    with pytest.raises(ValueError, match="the number of tokens must be fixed"):
        graph(form, "length", 3)
    with pytest.raises(ValueError, match="at most one batch size may be dynamic"):
        graph(form, 31, "rows", "columns")
