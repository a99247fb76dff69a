"""A small convolutional net as an ONNX file, and inputs that calibrate it; no torch takes part."""

from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

CLASSES = 6


def images(count: int, seed: int = 0) -> np.ndarray:
    """Return `count` images (3, 8, 8), each a pattern of its class and some noise."""
    draw = np.random.default_rng(seed)
    patterns = np.random.default_rng(7).normal(size=(CLASSES, 3, 8, 8))
    return (patterns[np.arange(count) % CLASSES] + 0.2 * draw.normal(size=(count, 3, 8, 8))).astype(np.float32)


def feeds(count: int, seed: int = 0) -> list[dict[str, np.ndarray]]:
    """Return the images one by one, as the file reads them."""
    return [{"x": image[None]} for image in images(count, seed)]


def net(path: Path, *, products: int = 4, codes: bool = False, batch: int | str = 1) -> Path:
    """Write a net of `products` layers, the last one a Gemm; with `codes` the activations are 0, 0.3, .. 0.9.

    A name as `batch` leaves it open.
    """
    draw, last = np.random.default_rng(3), products - 1
    nodes, initializers, name, channels = [], [], "x", 3
    for place in range(last):
        initializers.append(
            numpy_helper.from_array((draw.normal(size=(8, channels, 3, 3)) / 5).astype("f"), f"w{place}")
        )
        nodes.append(helper.make_node("Conv", [name, f"w{place}"], [f"c{place}"], f"conv{place}", pads=[1] * 4))
        nodes.append(helper.make_node("Relu", [f"c{place}"], [f"r{place}"]))
        name, channels = f"r{place}", 8
        if codes:
            nodes += [
                helper.make_node("Div", [name, "step"], [f"d{place}"]),
                helper.make_node("Floor", [f"d{place}"], [f"f{place}"]),
                helper.make_node("Min", [f"f{place}", "three"], [f"m{place}"]),
                helper.make_node("Mul", [f"m{place}", "step"], [f"q{place}"]),
            ]
            name = f"q{place}"
    if codes:
        initializers += [
            numpy_helper.from_array(np.array(v, np.float32), n) for n, v in (("step", 0.3), ("three", 3.0))
        ]
    width = channels * 64
    # the classes are told apart: each row of the last layer is the answer of the net to the class's pattern
    nodes.append(helper.make_node("Flatten", [name], ["flat"]))
    nodes.append(helper.make_node("Gemm", ["flat", "head"], ["y"], "head", transB=1))
    initializers.append(numpy_helper.from_array(np.zeros((CLASSES, width), np.float32), "head"))
    given = helper.make_tensor_value_info("x", TensorProto.FLOAT, [batch, 3, 8, 8])
    answer = helper.make_tensor_value_info("y", TensorProto.FLOAT, [batch, CLASSES])
    model = helper.make_model(
        helper.make_graph(nodes, "net", [given], [answer], initializers), opset_imports=[helper.make_opsetid("", 18)]
    )
    model.ir_version = 9
    _trained(model)
    onnx.save(model, path)
    return path


def _trained(model: onnx.ModelProto) -> None:
    """Set the head to the centred features of each class's mean image."""
    from benchd.exporters import quantised

    by_class = [np.mean(images(24 * CLASSES, 5)[place::CLASSES], axis=0) for place in range(CLASSES)]
    activations = [
        values["flat"][0]
        for values in quantised.activations(model, ["flat"], [{"x": image[None]} for image in by_class])
    ]
    features = np.stack(activations) - np.mean(activations, axis=0)
    head = next(tensor for tensor in model.graph.initializer if tensor.name == "head")
    head.CopyFrom(numpy_helper.from_array((features / np.linalg.norm(features)).astype(np.float32), "head"))


def swapped(source: Path, path: Path, *, tensor: str, axis: int = 0) -> Path:
    """Write the file with the halves of one stored tensor exchanged: a fault of a converter."""
    model = onnx.load(source)
    initializer = next(candidate for candidate in model.graph.initializer if candidate.name == tensor)
    values = numpy_helper.to_array(initializer)
    initializer.CopyFrom(numpy_helper.from_array(np.roll(values, values.shape[axis] // 2, axis=axis).copy(), tensor))
    onnx.save(model, path)
    return path


def scaled(source: Path, path: Path, *, times: float) -> Path:
    """Write the file with the scale of each activation multiplied: a fault of a calibration."""
    model = onnx.load(source)
    names = {node.input[1] for node in model.graph.node if node.op_type == "QuantizeLinear"}
    for initializer in model.graph.initializer:
        if initializer.name in names:
            initializer.CopyFrom(
                numpy_helper.from_array(numpy_helper.to_array(initializer) * np.float32(times), initializer.name)
            )
    onnx.save(model, path)
    return path
