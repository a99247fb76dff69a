"""The selective recurrence in two forms of standard ONNX ops; which is faster depends on the runtime.

    h[t] = exp(delta[t] A) h[t-1] + x[t] B[t]      y[t] = sum over n of h[t] C[t]      h[-1] = 0

delta, x and y are (length, *batch, E), B and C (length, *batch, N), A broadcasts to (*batch, N, E); at most one size of
`*batch` is dynamic.

- "scan": one Scan node, one token at a time. The state stays in the cache: fastest on a CPU.
- "two_level": no loop. All chunks of about sqrt(length) tokens run at once from a zero state, tracking their cumulative
  decay; then one step per chunk passes the states on. For runtimes with slow loops. Only decays in (0, 1] are
  multiplied: dividing by them would overflow.
"""

import itertools
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx_ir as ir

from benchd.exporters.files import Form
from benchd.kernels.selective_scan.torch_impl import ONNX_OPERATOR


def expand(model: ir.Model, form: Form) -> None:
    """Replace every ONNX_OPERATOR node in `model` by its form in standard ops, in place."""
    domain, _, name = ONNX_OPERATOR.partition("::")
    for node in [node for node in model.graph if (node.domain, node.op_type) == (domain, name)]:
        build = _Form(node)
        y = build.scan() if form == "scan" else build.two_level()
        for constant in build.tape.initializers:
            model.graph.register_initializer(constant)
        ir.convenience.replace_nodes_and_values(model.graph, node, [node], build.tape.nodes, node.outputs, [y])
    model.opset_imports.pop(domain, None)


class _Form:
    """The standard nodes that replace one node; 6-dimensional values are (chunks, chunk, *batch, ., .)."""

    def __init__(self, node: ir.Node) -> None:
        self.tape = ir.tape.Tape()
        self._name = node.name or node.outputs[0].name
        self._delta, self._x, self._B, self._C, self._A = (_present(value) for value in node.inputs)
        shape = self._delta.shape
        if shape is None or not isinstance(shape[0], int):
            raise ValueError(f"{self._name}: the number of tokens must be fixed, not {shape}")
        self._length: int = shape[0]
        self._channels = int(str(shape[-1]))
        self._batch = [size if isinstance(size, int) else -1 for size in shape[1:-1]]
        if self._batch.count(-1) > 1:
            raise ValueError(f"{self._name}: at most one batch size may be dynamic, not {shape}")

    def scan(self) -> ir.Value:
        """Return y, computed by a Scan node over the tokens."""
        delta, x, C = (self._op("Unsqueeze", value, self._int(-2)) for value in (self._delta, self._x, self._C))
        B = self._op("Unsqueeze", self._B, self._int(-1))
        # zeros in the shape of the state, for any batch
        first = self._op("Gather", B, self._constant(np.int64(0)))
        start = self._op("Mul", self._op("Mul", first, self._A), self._zero())
        _, y = self.tape.op_multi_out(
            "Scan",
            [start, delta, x, B, C],
            num_outputs=2,
            attributes={"body": self._token(), "num_scan_inputs": 4},
        )
        return self._op("Squeeze", y, self._int(-2))

    def _token(self) -> ir.Graph:
        """Return the Scan body; it maps a state (*batch, N, E) and a token to the next state and y (*batch, 1, E)."""
        kind, names = self._delta.type, ("state", "delta", "x", "B", "C")
        state, delta, x, B, C = inputs = [ir.Value(name=f"{self._name}.{name}", type=kind) for name in names]
        tape = ir.tape.Tape()
        decay = tape.op("Exp", [tape.op("Mul", [delta, self._A])])
        state = tape.op("Add", [tape.op("Mul", [decay, state]), tape.op("Mul", [x, B])])
        y = tape.op("MatMul", [C, state])
        for number, node in enumerate(tape.nodes):
            node.outputs[0].name = f"{self._name}.{number}"
        return ir.Graph(inputs, [state, y], nodes=tape.nodes, name=f"{self._name}.token")

    def two_level(self) -> ir.Value:
        """Return y, computed step by step in all chunks at once, then from chunk to chunk."""
        chunk = max(1, math.isqrt(self._length))
        chunks = -(-self._length // chunk)
        delta, x, C = (self._chunked(value, chunks, chunk, axis=-2) for value in (self._delta, self._x, self._C))
        B = self._chunked(self._B, chunks, chunk, axis=-1)
        decays = self._split(self._op("Exp", self._op("Mul", delta, self._A)), 1, chunk)
        charges = self._split(self._op("Mul", x, B), 1, chunk)
        products = list(itertools.accumulate(decays, lambda before, decay: self._op("Mul", decay, before)))
        states = [charges[0]]
        for decay, charge in zip(decays[1:], charges[1:], strict=True):
            states.append(self._op("Add", self._op("Mul", decay, states[-1]), charge))
        entering = self._handed_on(self._split(products[-1], 0, chunks), self._split(states[-1], 0, chunks))
        carried = self._op("Mul", self._op("Concat", *products, axis=1), entering)
        h = self._op("Add", self._op("Concat", *states, axis=1), carried)
        y = self._op("Reshape", self._op("MatMul", C, h), self._int(chunks * chunk, *self._batch, self._channels))
        return self._op("Slice", y, self._int(0), self._int(self._length), self._int(0))

    def _handed_on(self, products: Sequence[ir.Value], states: Sequence[ir.Value]) -> ir.Value:
        """Return the state entering each chunk (zeros for the first)."""
        entering = [self._op("Mul", states[0], self._zero())]
        for product, state in zip(products[:-1], states[:-1], strict=True):
            entering.append(self._op("Add", self._op("Mul", product, entering[-1]), state))
        return self._op("Concat", *entering, axis=0)

    def _chunked(self, value: ir.Value, chunks: int, chunk: int, *, axis: int) -> ir.Value:
        """Return (length, *batch, n) as (chunks, chunk, *batch, 1, n), or as (..., n, 1) for axis -1.

        The zero tokens at the end do not change the state.
        """
        numbers = value.shape[-1] if value.shape is not None else None
        missing = chunks * chunk - self._length
        if missing:
            dimensions = 2 + len(self._batch)
            pads = [0] * dimensions + [missing] + [0] * (dimensions - 1)
            value = self._op("Pad", value, self._int(*pads))
        last = [1, numbers] if axis == -2 else [numbers, 1]
        return self._op("Reshape", value, self._int(chunks, chunk, *self._batch, *last))

    def _split(self, value: ir.Value, axis: int, parts: int) -> Sequence[ir.Value]:
        attributes = {"axis": axis, "num_outputs": parts}
        return self.tape.op_multi_out("Split", [value], num_outputs=parts, attributes=attributes)

    def _op(self, operator: str, *inputs: ir.Value, **attributes: Any) -> ir.Value:
        return self.tape.op(operator, list(inputs), attributes=attributes)

    def _int(self, *values: Any) -> ir.Value:
        return self._constant(np.array(values, np.int64))

    def _zero(self) -> ir.Value:
        dtype = self._delta.dtype
        return self._constant(np.zeros((), dtype.numpy() if dtype else np.float32))

    def _constant(self, value: Any) -> ir.Value:
        name = f"{self._name}.constant{len(self.tape.initializers)}"
        return self.tape.initializer(ir.tensor(np.asarray(value), name=name))


def _present(value: ir.Value | None) -> ir.Value:
    if value is None:
        raise ValueError(f"{ONNX_OPERATOR}: an input is missing")
    return value
