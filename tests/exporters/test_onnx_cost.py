"""The products of ONNX files, against those that torch counts in the module that each was exported from."""

import onnx
import pytest
import torch
from onnx import TensorProto, helper
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from benchd.exporters.onnx_cost import count


def exported(module, path, *inputs):
    torch.onnx.export(module.eval(), inputs, path, input_names=["x"], dynamo=False)
    return path


@pytest.mark.parametrize(
    ("module", "shape"),
    [
        (
            nn.Sequential(nn.Conv2d(3, 8, 3, padding=1, groups=1), nn.ReLU(), nn.Flatten(), nn.Linear(288, 4)),
            (2, 3, 6, 6),
        ),
        (nn.ConvTranspose2d(2, 4, 2), (1, 2, 5, 5)),
        (nn.MultiheadAttention(8, 2), (5, 2, 8)),
    ],
)
@pytest.mark.filterwarnings("ignore")  # of an exporter that torch gives up
def test_a_file_has_the_products_of_its_module(module, shape, tmp_path):
    x = torch.zeros(shape)
    inputs = (x, x, x) if isinstance(module, nn.MultiheadAttention) else (x,)
    torch.backends.mha.set_fastpath_enabled(False)
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        module.eval()(*inputs)
    work = count(exported(module, tmp_path / "a.onnx", *inputs), {"x": shape})
    assert (work.matrix_flops, work.uncounted) == (counter.get_total_flops(), [])


def test_an_open_batch_is_that_of_the_inputs_and_what_is_unknown_is_named(tmp_path):
    weight = helper.make_tensor("w", TensorProto.FLOAT, [7, 5], [0.0] * 35)
    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["y"]),
        helper.make_node("DFT", ["z"], ["f"]),
        helper.make_node("Plugin", ["y"], ["z"], domain="mine"),
    ]
    graph = helper.make_graph(
        [nodes[0], nodes[2], nodes[1]],
        "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["N", 7])],
        [helper.make_tensor_value_info("f", TensorProto.FLOAT, None)],
        [weight],
    )
    opsets = [helper.make_opsetid("", 18), helper.make_opsetid("mine", 1)]
    onnx.save(helper.make_model(graph, opset_imports=opsets), tmp_path / "a.onnx")
    work = count(tmp_path / "a.onnx", {"x": [3, 7]})
    assert (work.matrix_flops, work.parameters_bytes, work.uncounted) == (2 * 3 * 5 * 7, 140, ["Plugin", "DFT"])
