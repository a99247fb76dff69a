"""Layers made slower in a file on purpose, in ONNX Runtime itself: how often the first one named is a planted one."""

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
from worker_jobs import build_and_load, changed, job

from benchd.daemon.measuring import user_model
from benchd.daemon.records import Variant
from benchd.daemon.verdicts import layers
from benchd.daemon.verdicts.layers import Round
from benchd.daemon.worker import layer_times

FLOAT = TensorProto.FLOAT
DEPTH, ROUNDS, WARM_UP, RUNS = 10, 5, 10, 60
SHAPE = (1, 32, 40, 40)
FAULTS = ("twice", "no fusion", "copies", "float64", "larger kernel")


def net(path, faults):
    """Write a net of convolutions with ReLU; `faults` are by the number of their layer."""
    draw, nodes, weights, value = np.random.default_rng(0), [], [], "x"

    def conv(source, number, name, size=3):
        weight = draw.standard_normal((SHAPE[1], SHAPE[1], size, size)) / (size * np.sqrt(SHAPE[1]))
        weights.append(numpy_helper.from_array(weight.astype(np.float32), f"w_{name}"))
        nodes.append(
            helper.make_node("Conv", [source, f"w_{name}"], [name], name=f"conv{number}", pads=[size // 2] * 4)
        )

    for number in range(DEPTH):
        fault = faults.get(number)
        after = f"c{number}"
        conv(value, number, after, size=7 if fault == "larger kernel" else 3)
        if fault == "twice":
            conv(value, f"{number}_again", f"again{number}")
            nodes.append(helper.make_node("Add", [after, f"again{number}"], [f"sum{number}"], name=f"sum{number}"))
            after = f"sum{number}"
        if fault == "no fusion":
            nodes.append(helper.make_node("Erf", [after], [f"e{number}"], name=f"Erf{number}"))
            after = f"e{number}"
        for step in range(3 if fault == "copies" else 0):  # transposes would be optimised away
            halves = [f"{half}{number}_{step}" for half in ("upper", "lower")]
            nodes.append(helper.make_node("Split", [after], halves, name=f"Split{number}_{step}", axis=1))
            after = f"whole{number}_{step}"
            nodes.append(helper.make_node("Concat", halves, [after], name=f"Concat{number}_{step}", axis=1))
        if fault == "float64":
            nodes.append(helper.make_node("Cast", [after], [f"d{number}"], name=f"up{number}", to=TensorProto.DOUBLE))
            nodes.append(helper.make_node("Relu", [f"d{number}"], [f"h{number}"], name=f"relu{number}"))
            nodes.append(helper.make_node("Cast", [f"h{number}"], [f"r{number}"], name=f"down{number}", to=FLOAT))
        else:
            nodes.append(helper.make_node("Relu", [after], [f"r{number}"], name=f"relu{number}"))
        value = f"r{number}"
    ends = [helper.make_tensor_value_info(end, FLOAT, SHAPE) for end in ("x", value)]
    graph = helper.make_graph(nodes, "net", ends[:1], ends[1:], weights)
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), path)
    return path


def loaded_from(path, threads=1):
    """Return the file in a session of its own, of so many threads, and a batch."""
    torch.set_num_threads(threads)
    own = user_model.onnx_file(path, [])
    a_job = changed(job(path.parent, model=own.model, variant=Variant.parse("onnxruntime")), own=own)
    built, loaded = build_and_load(a_job)
    return loaded, built.images[:1]


def timed(*sides):
    """Return the median ms of a run of each, in turns."""
    times_ms = [[] for _ in sides]
    for _ in range(RUNS):
        for (loaded, batch), kept in zip(sides, times_ms, strict=True):
            begun = time.perf_counter()
            loaded.run(batch)
            kept.append((time.perf_counter() - begun) * 1e3)
    return [median(each[WARM_UP:]) for each in times_ms]


def judged(folder, faults, threads=(1, 1)):
    """Return the verdict on a net without faults against one with them, by sessions of so many threads."""
    paths = net(folder / "before.onnx", {}), net(folder / "after.onnx", faults)
    rounds = []
    for _ in range(ROUNDS):
        sides = [loaded_from(path, count) for path, count in zip(paths, threads, strict=True)]
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
