"""Which nodes of a file a runtime's own layers cover, and the time of each, with the real runtimes."""

import dataclasses

import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper
from worker_jobs import as_loaded, build_and_load, changed, job, user_module

from benchd.daemon.measuring import user_model
from benchd.daemon.records import Variant
from benchd.daemon.worker import layer_times

SIZES = (1, 16, 32, 32)


def loaded_from(path, backend="onnxruntime"):
    """Return the file as a worker loads it, and a batch."""
    own = user_model.onnx_file(path, [])
    a_job = changed(job(path.parent, model=own.model, variant=Variant.parse(backend)), own=own)
    built, loaded = build_and_load(a_job)
    return loaded, built.images[:1]


def net(path, *, activation="Relu", extra=0):
    """Write a net of three convolutions with activations, a skip, and nodes that only copy behind the second one."""
    draw, nodes, weights, value = np.random.default_rng(0), [], [], "x"
    for number in range(3):
        weights.append(
            numpy_helper.from_array(draw.standard_normal((16, 16, 3, 3)).astype(np.float32) / 12, f"w{number}")
        )
        nodes += [
            helper.make_node("Conv", [value, f"w{number}"], [f"c{number}"], name=f"conv{number}", pads=[1, 1, 1, 1]),
            helper.make_node(activation, [f"c{number}"], [f"r{number}"], name=f"act{number}"),
        ]
        value = f"r{number}"
        for step in range(extra if number == 1 else 0):
            nodes.append(helper.make_node("Erf", [value], [f"e{step}"], name=f"erf{step}"))
            value = f"e{step}"
    nodes.append(helper.make_node("Add", [value, "x"], ["y"], name="skip"))
    ends = [helper.make_tensor_value_info(name, TensorProto.FLOAT, SIZES) for name in ("x", "y")]
    graph = helper.make_graph(nodes, "net", ends[:1], ends[1:], weights)
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), path)
    return path


@pytest.mark.parametrize("backend", ["onnxruntime", "openvino"])
@pytest.mark.parametrize("activation", ["Relu", "Elu"])
def test_every_node_of_the_file_is_covered_once_and_every_node_that_runs_covers_some(activation, backend, tmp_path):
    loaded, batch = loaded_from(net(tmp_path / "net.onnx", activation=activation, extra=2), backend)
    rows = layer_times.measure(loaded, batch)
    inserted = [row for row in rows if row.kind.startswith("Reorder")]
    covered = [name for row in rows if row not in inserted for name in row.covers]
    assert sorted(covered) == sorted(
        [*(f"{kind}{n}" for n in range(3) for kind in ("conv", "act")), "erf0", "erf1", "skip"]
    )
    assert all(row.covers and row.ms > 0 and row.calls == 1 for row in rows)
    assert all(row.covers[0].startswith("conv") for row in rows if row.kind.startswith("Conv"))


def test_layers_of_compile_are_its_kernels_in_their_order(tmp_path):
    module = user_module(tmp_path, forward="images = nn.functional.gelu(self.fc(images.flatten(1))) @ self.fc.weight")
    built, loaded = build_and_load(job(tmp_path, module=module, variant=Variant.parse("compile")))
    rows = layer_times.measure(loaded, built.images[:1])
    assert [row.kind for row in rows] == ["addmm", "fused_gelu", "mm", "addmm"]
    assert [row.name for row in rows if row.kind == "addmm"] == ["addmm 1", "addmm 2"]
    assert all(row.ms > 0 for row in rows)


def test_layers_of_torch_are_its_modules_and_a_whole_variant_says_why_not():
    batch = torch.zeros(SIZES)
    eager = as_loaded(torch.nn.Sequential(torch.nn.Conv2d(16, 8, 3), torch.nn.ReLU()))
    assert [row.kind for row in layer_times.measure(eager, batch) if row.kind] == ["Conv2d", "ReLU"]
    assert "runs as a whole" in layer_times.measure(dataclasses.replace(eager, module=None), batch)
