"""A runtime's own layers and their times: each covers nodes of the file, and a layer made slower is the one named."""

import dataclasses
import os
import random
import time
from collections import Counter
from statistics import median

import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper
from worker_jobs import as_loaded, build_and_load, changed, job, user_module

from benchd.daemon.measuring import user_model
from benchd.daemon.records import Variant
from benchd.daemon.verdicts import layers
from benchd.daemon.verdicts.layers import Round
from benchd.daemon.worker import layer_times

DEPTH, ROUNDS, WARM_UP, RUNS = 10, 5, 10, 60
SHAPE = (1, 32, 40, 40)
FAULTS = ("twice", "no fusion", "copies", "float64", "larger kernel")


def net(path, faults):
    """Write a net of convolutions with ReLU; `faults` are by the number of their layer."""
    draw, nodes, weights, value = np.random.default_rng(0), [], [], "x"

    def add(operator, reads, name, **attributes):
        nodes.append(helper.make_node(operator, reads, [name], name=name, **attributes))
        return name

    def conv(read, name, size=3):
        weight = draw.standard_normal((SHAPE[1], SHAPE[1], size, size)) / (size * np.sqrt(SHAPE[1]))
        weights.append(numpy_helper.from_array(weight.astype(np.float32), f"w_{name}"))
        return add("Conv", [read, f"w_{name}"], name, pads=[size // 2] * 4)

    for number in range(DEPTH):
        fault = faults.get(number)
        after = conv(value, f"conv{number}", size=7 if fault == "larger kernel" else 3)
        if fault == "twice":
            after = add("Add", [after, conv(value, f"again{number}")], f"sum{number}")
        if fault == "no fusion":
            after = add("Erf", [after], f"erf{number}")
        for step in range(3 if fault == "copies" else 0):  # transposes would be optimised away
            halves = [f"{half}{number}_{step}" for half in ("upper", "lower")]
            nodes.append(helper.make_node("Split", [after], halves, name=f"split{number}_{step}", axis=1))
            after = add("Concat", halves, f"whole{number}_{step}", axis=1)
        if fault == "float64":
            after = add("Cast", [after], f"up{number}", to=TensorProto.DOUBLE)
        value = add("Relu", [after], f"relu{number}")
        if fault == "float64":
            value = add("Cast", [value], f"down{number}", to=TensorProto.FLOAT)
    ends = [helper.make_tensor_value_info(end, TensorProto.FLOAT, SHAPE) for end in ("x", value)]
    graph = helper.make_graph(nodes, "net", ends[:1], ends[1:], weights)
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), path)
    return path


def loaded_from(path, backend="onnxruntime", threads=1):
    """Return the file in a session of its own, of so many threads, and a batch."""
    torch.set_num_threads(threads)
    own = user_model.onnx_file(path, [])
    a_job = changed(job(path.parent, model=own.model, variant=Variant.parse(backend)), own=own)
    built, loaded = build_and_load(a_job)
    return loaded, built.images[:1]


@pytest.mark.parametrize(
    ("backend", "faults"),
    [
        ("onnxruntime", {}),
        ("onnxruntime", {1: "no fusion", 2: "twice", 3: "float64"}),
        ("openvino", {}),
        ("openvino", {1: "no fusion"}),  # sums and casts it takes away
    ],
)
def test_every_node_of_the_file_is_covered_once_and_every_node_that_runs_covers_some(backend, faults, tmp_path):
    path = net(tmp_path / "net.onnx", faults)
    rows = layer_times.measure(*loaded_from(path, backend))
    covered = [name for row in rows if not row.kind.startswith("Reorder") for name in row.covers]
    assert sorted(covered) == sorted(node.name for node in onnx.load(path).graph.node)
    assert all(row.covers and row.ms > 0 and row.calls == 1 for row in rows)
    assert all(row.covers[0].startswith(("conv", "again")) for row in rows if row.kind.startswith("Conv"))


def test_layers_of_torch_are_its_modules_and_a_whole_variant_says_why_not():
    batch = torch.zeros(1, 16, 32, 32)
    eager = as_loaded(torch.nn.Sequential(torch.nn.Conv2d(16, 8, 3), torch.nn.ReLU()))
    assert [row.kind for row in layer_times.measure(eager, batch) if row.kind] == ["Conv2d", "ReLU"]
    assert "runs as a whole" in layer_times.measure(dataclasses.replace(eager, module=None), batch)


def test_layers_of_compile_are_its_kernels_in_their_order(tmp_path):
    module = user_module(tmp_path, forward="images = nn.functional.gelu(self.fc(images.flatten(1))) @ self.fc.weight")
    built, loaded = build_and_load(job(tmp_path, module=module, variant=Variant.parse("compile")))
    rows = layer_times.measure(loaded, built.images[:1])
    assert [row.kind for row in rows] == ["addmm", "fused_gelu", "mm", "addmm"]
    assert [row.name for row in rows if row.kind == "addmm"] == ["addmm 1", "addmm 2"]
    assert all(row.ms > 0 for row in rows)


def timed(*sides):
    """Return the median ms of a run of each, in turns."""
    times_ms = [[] for _ in sides]
    for _ in range(RUNS):
        for (loaded, batch), side_ms in zip(sides, times_ms, strict=True):
            begun = time.perf_counter()
            loaded.run(batch)
            side_ms.append((time.perf_counter() - begun) * 1e3)
    return [median(each[WARM_UP:]) for each in times_ms]


def judged(folder, faults, threads=(1, 1)):
    """Return the verdict on a net without faults against one with them, by sessions of so many threads."""
    paths = net(folder / "before.onnx", {}), net(folder / "after.onnx", faults)
    rounds = []
    for _ in range(ROUNDS):
        sides = [loaded_from(path, threads=count) for path, count in zip(paths, threads, strict=True)]
        profiles = []
        for side, count in zip(sides, threads, strict=True):
            torch.set_num_threads(count)  # of the session that is made to profile
            profiles.append(layer_times.measure(*side))
        rounds.append(Round(*timed(*sides), *profiles))
    return layers.judge(rounds)


def first_layers(verdict):
    """Return the numbers of the layers that are named, the largest change first."""
    named = [change.name for change in verdict.changes] if verdict else []
    return ["".join(filter(str.isdigit, name.partition("_")[0])) for name in named]


@pytest.mark.slow
def test_in_nine_of_ten_nets_the_planted_layer_is_the_first_that_is_named(tmp_path):
    counted = Counter()
    for seed in range(40):
        draw = random.Random(seed)
        chosen = draw.sample(range(1, DEPTH), 2 if seed % 4 == 3 else 1)
        faults = {number: draw.choice(FAULTS) for number in chosen}
        named = first_layers(judged(tmp_path, faults))
        counted["right" if named and int(named[0] or -1) in faults else str(faults)] += 1
    assert counted["right"] >= 36, counted


@pytest.mark.slow
@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two CPUs")
def test_in_nine_of_ten_nets_fewer_threads_are_said_to_slow_down_all_layers_alike(tmp_path):
    verdicts = [judged(tmp_path, {}, threads=(2, 1)) for _ in range(20)]
    assert sum(bool(verdict and verdict.alike) for verdict in verdicts) >= 18, verdicts


@pytest.mark.slow
def test_where_nothing_changed_one_of_twenty_nets_at_most_has_a_layer_named(tmp_path):
    named = [first_layers(judged(tmp_path, {})) for _ in range(40)]
    assert sum(map(bool, named)) <= 2, named
