"""Moves outliers out of the activations of a state-space model before quantisation, without changing its result.

The range of a projection's input X (B, tokens, channels) varies from token to token, in a fixed order, and from channel
to channel. With static scales t per token and s per channel,

    X W = diag(t) (diag(1 / t) X diag(1 / s)) (diag(s) W)

has a middle factor of uniform range. Sources: PTQ4VM (WACV 2025, static scales per token), SmoothQuant (ICML 2023, s).
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from onnx import ModelProto, NodeProto, helper, numpy_helper

STRENGTH = 0.5  # exponent that balances activation and weight ranges in a channel's scale, as in SmoothQuant
_LEAST = 1e-5


def smooth(model: ModelProto, chosen: Sequence[NodeProto], largest: Mapping[str, NDArray[Any]]) -> dict[str, float]:
    """Rewrite the chosen MatMuls of the model in place; return the int8 scale of each new input by name.

    `chosen` are nodes of `model`, and `largest` contains the magnitudes (tokens, channels) of their inputs by name;
    nodes without them stay unchanged.
    """
    projections = [node for node in chosen if node.op_type == "MatMul" and node.input[0] in largest]
    return dict(_rewritten(model, node, largest[node.input[0]]) for node in projections)


def _rewritten(model: ModelProto, node: NodeProto, largest: NDArray[Any]) -> tuple[str, float]:
    """Insert the two scalings around one projection; return its new input and that input's int8 scale."""
    weight = next(tensor for tensor in model.graph.initializer if tensor.name == node.input[1])
    values = numpy_helper.to_array(weight)
    tokens = np.maximum(largest.max(axis=1), _LEAST)
    tokens = tokens / tokens.max()
    channels = np.maximum((largest / tokens[:, None]).max(axis=0), _LEAST)
    scales = channels**STRENGTH / np.maximum(np.abs(values).max(axis=1), _LEAST) ** (1 - STRENGTH)
    name = node.name
    added = {
        f"{name}_inverse": 1 / (tokens[:, None] * scales),
        f"{name}_tokens": tokens[:, None],
        f"{name}_weight": values * scales[:, None],
    }
    for key, value in added.items():
        model.graph.initializer.append(numpy_helper.from_array(value.astype(np.float32), key))
    given, answer, (smoothed, product) = node.input[0], node.output[0], (f"{name}_smoothed", f"{name}_product")
    node.input[0], node.input[1], node.output[0] = smoothed, f"{name}_weight", product
    place = list(model.graph.node).index(node)
    model.graph.node.insert(place + 1, helper.make_node("Mul", [product, f"{name}_tokens"], [answer], f"{name}_after"))
    model.graph.node.insert(place, helper.make_node("Mul", [given, f"{name}_inverse"], [smoothed], f"{name}_before"))
    return smoothed, float((largest / (tokens[:, None] * scales)).max()) / 127
