"""A net in NIR, the exchange format of spiking frameworks, as a module that runs all time steps in one call.

Each neuron is stepped by forward Euler, as in the frameworks; anything that the file does not define is an option:

    I <- I + dt / tau_syn (w_in x - I)                 for CubaLIF and CubaLI; elsewhere I = x
    v <- v + dt / tau (v_leak - v + r I)               for IF and I: v <- v + dt r I
    a spike if v > v_threshold, which then resets v

With `gain` "per_step", the first factor of x, w_in or r, is added in full at each step, instead of times dt / tau. A
state starts at v_leak, or at 0 without a leak. Edges that close a cycle carry the previous step. Equations:
neuroir.org.
"""

import math
import operator
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import reduce
from graphlib import TopologicalSorter
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn

from benchd.daemon.errors import UsageError
from benchd.models.nir_file import Graph, Node, read

State = tuple[Tensor, ...]

_LONGEST = 4096  # the longest delay, in steps


class _StatefulNode(nn.Module):
    """A node with a state: `step` takes its charge and a state, and returns its output and the next state."""

    def forward(self, x: Tensor) -> Tensor:
        """Return the output of all steps (T, B, ...)."""
        state, leaving = None, []
        for charge in self.charged(x).unbind():
            out, state = self.step(charge, state)
            leaving.append(out)
        return torch.stack(leaving)

    def charged(self, x: Tensor) -> Tensor:
        """Return the charge for an input of one step or of all steps."""
        return x

    def step(self, charge: Tensor, state: State | None) -> tuple[Tensor, State]:
        """Return the output (B, ...) and the next state."""
        raise NotImplementedError

    def _keep(self, **values: Any) -> None:
        for name, value in values.items():
            self.register_buffer(name, torch.from_numpy(np.array(value, np.float32)))


class _Neurons(_StatefulNode):
    """A population of neurons of one type, with coefficients computed in float64."""

    gain: Tensor
    decay: Tensor
    rest: Tensor
    leak: Tensor
    decay_in: Tensor
    drive: Tensor
    threshold: Tensor
    v_reset: Tensor

    def __init__(self, node: Node, dt: float, reset: str, current: str, fires: str, gain: str) -> None:
        super().__init__()
        kind, r, is_per_step = node["type"], node["r"].astype(np.float64), gain == "per_step"
        self.has_synapse, self.leaks, self.spikes = kind.startswith("Cuba"), kind not in ("IF", "I"), kind.endswith("F")
        self._is_delayed, self._subtracts = reset.startswith("delayed_"), reset.endswith("subtract")
        self._uses_new, self._fires_at = current == "new", fires == "at"
        rate = _rate(node, "tau_mem" if self.has_synapse else "tau", dt) if self.leaks else dt
        if self.has_synapse:
            rate_in, w_in = _rate(node, "tau_syn", dt), np.asarray(node.get("w_in", 1.0), np.float64)
            self._keep(gain=w_in if is_per_step else rate_in * w_in, decay_in=1.0 - rate_in, drive=rate * r)
        else:
            self._keep(gain=r if is_per_step else rate * r)
        if self.leaks:
            self._keep(decay=1.0 - rate, rest=node["v_leak"], leak=rate * node["v_leak"])
        if self.spikes:
            self._keep(threshold=node["v_threshold"], v_reset=node.get("v_reset", 0.0))
            self.emitted = nn.Identity()

    def charged(self, x: Tensor) -> Tensor:
        """Return the charge added to the synapses, or to the potentials of neurons without synapses."""
        return x * self.gain

    def step(self, charge: Tensor, state: State | None) -> tuple[Tensor, State]:
        """Return spikes, or the potentials of non-spiking neurons."""
        if state is None:
            zeros = torch.zeros_like(charge)
            state = (zeros + self.rest if self.leaks else zeros, zeros, zeros.bool())
        v, synapse, fires = state
        drive = charge
        if self.has_synapse:
            later = self.decay_in * synapse + charge
            drive, synapse = self.drive * (later if self._uses_new else synapse), later
        v = (self.decay * v + self.leak if self.leaks else v) + drive
        if not self.spikes:
            return v, (v, synapse, fires)
        v = self._reset_by(fires, v) if self._is_delayed else v
        fires = v >= self.threshold if self._fires_at else v > self.threshold
        v = v if self._is_delayed else self._reset_by(fires, v)
        return fires.to(v.dtype), (v, synapse, fires)

    def _reset_by(self, fires: Tensor, v: Tensor) -> Tensor:
        return v - fires * self.threshold if self._subtracts else torch.where(fires, self.v_reset, v)


def _rate(node: Node, name: str, dt: float) -> np.ndarray:
    """Return dt divided by a time constant."""
    times = node[name].astype(np.float64)
    if (times < dt).any():
        raise UsageError(f"{name} {times.min():g} is shorter than the time step {dt:g}: give a smaller --option dt=")
    return dt / times


class _Delay(_StatefulNode):
    """Delays each element by its own whole number of steps; returns 0 before that."""

    steps: Tensor

    def __init__(self, node: Node, dt: float) -> None:
        super().__init__()
        steps = np.rint(node["delay"].astype(np.float64) / dt)
        if (steps < 0).any() or (steps > _LONGEST).any():
            raise UsageError(f"a delay of {node['delay'].max():g} is outside 0 to {_LONGEST} time steps of {dt:g}")
        self._keep(steps=steps)
        self._different = sorted(set(steps.astype(int).reshape(-1).tolist()))

    def step(self, charge: Tensor, state: State | None) -> tuple[Tensor, State]:
        """Return the delayed input, and the last inputs, newest first."""
        history = (charge, *(state or ()))[: self._different[-1] + 1]
        late = torch.zeros_like(charge)
        for steps in self._different:
            late = torch.where(self.steps == steps, history[steps], late) if steps < len(history) else late
        return late, history


class _Scale(nn.Module):
    def __init__(self, scale: np.ndarray) -> None:
        super().__init__()
        self.scale = _parameter(scale)

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale


class _Threshold(nn.Module):
    def __init__(self, threshold: np.ndarray) -> None:
        super().__init__()
        self.threshold = _parameter(threshold)

    def forward(self, x: Tensor) -> Tensor:
        return (x > self.threshold).to(x.dtype)


class _SumPool2d(nn.AvgPool2d):
    def forward(self, input: Tensor) -> Tensor:  # noqa: A002 - torch's name
        return super().forward(input) * math.prod(self.kernel_size)  # type: ignore[arg-type]


def _parameter(values: np.ndarray) -> nn.Parameter:
    return nn.Parameter(torch.from_numpy(np.array(values, np.float32)))


def _linear(node: Node) -> nn.Module:
    outputs, inputs = node["weight"].shape
    return _weighted(node, nn.Linear(inputs, outputs, bias="bias" in node, device="meta"))


def _convolution(node: Node) -> nn.Module:
    outputs, inputs, *kernel = node["weight"].shape
    groups, padding = int(node["groups"]), node["padding"]
    layer: Any = nn.Conv2d if node["type"] == "Conv2d" else nn.Conv1d
    module = layer(
        inputs * groups,
        outputs,
        kernel,
        _sizes(node, "stride"),
        padding if isinstance(padding, str) else _sizes(node, "padding"),
        _sizes(node, "dilation"),
        groups,
        "bias" in node,
        device="meta",
    )
    return _weighted(node, module)


def _weighted(node: Node, layer: Any) -> nn.Module:
    for name, value in layer.named_parameters():
        if tuple(value.shape) != node[name].shape:
            raise UsageError(f"its {name} has the shape {node[name].shape}, not {tuple(value.shape)}")
        setattr(layer, name, _parameter(node[name]))
    return layer


def _sizes(node: Node, name: str) -> tuple[int, ...]:
    sizes: tuple[int, ...] = tuple(np.atleast_1d(node[name]).astype(int).tolist())
    return sizes


def _pool(node: Node) -> nn.Module:
    kernel, stride, padding = (_sizes(node, name) for name in ("kernel_size", "stride", "padding"))
    kernel, stride, padding = (2 * sizes if len(sizes) == 1 else sizes for sizes in (kernel, stride, padding))
    layer: Any = _SumPool2d if node["type"] == "SumPool2d" else nn.AvgPool2d
    return cast(nn.Module, layer(kernel, stride, padding))


def _flatten(node: Node) -> nn.Module:
    """Return the flatten layer for a batch, an axis that files omit."""
    first, last = int(node["start_dim"]), int(node["end_dim"])
    return nn.Flatten(first + (first >= 0), last + (last >= 0))


_LAYERS: dict[str, Callable[[Node], nn.Module]] = {
    "Affine": _linear,
    "AvgPool2d": _pool,
    "Conv1d": _convolution,
    "Conv2d": _convolution,
    "Flatten": _flatten,
    "Input": lambda _: nn.Identity(),
    "Linear": _linear,
    "Output": lambda _: nn.Identity(),
    "Scale": lambda node: _Scale(node["scale"]),
    "SumPool2d": _pool,
    "Threshold": lambda node: _Threshold(node["threshold"]),
}
_NEURONS = ("CubaLI", "CubaLIF", "I", "IF", "LI", "LIF")


def _module(name: str, node: Node, dt: float, dialect: Mapping[str, str]) -> nn.Module:
    """Return a node's module; raise UsageError for an unknown type or parameters that do not fit."""
    kind = node["type"]
    try:
        if kind in _NEURONS:
            return _Neurons(node, dt, **dialect)
        if kind == "Delay":
            return _Delay(node, dt)
        if kind in _LAYERS:
            return _LAYERS[kind](node)
    except (AttributeError, KeyError, RuntimeError, TypeError, UsageError, ValueError) as error:
        reason = f"it lacks {error}" if isinstance(error, KeyError) else error
        raise UsageError(f"node {name} ({kind}): {reason}") from error
    known = ", ".join(sorted([*_NEURONS, *_LAYERS, "Delay"]))
    raise UsageError(f"node {name} has the type {kind}, which benchd does not support; it supports {known}")


class _Group:
    """Nodes that run together: a single one over all steps, or those of cycles step by step, in this order.

    In a cycle, stateless nodes that only feed back come first and read the previous step: `early`.
    """

    def __init__(self, names: Sequence[str], edges: Iterable[tuple[str, str]], stateless: Iterable[str]) -> None:
        edges = list(edges)
        self.names, self.early = list(names), set[str]()
        self.is_cycle = any(start in names and end in names for start, end in edges)
        for name in [name for name in reversed(names) if self.is_cycle and name in set(stateless)]:
            place = self.names.index(name)
            if all(end in self.names[:place] for start, end in edges if start == name):
                self.names.insert(0, self.names.pop(place))
                self.early.add(name)
        self.sources = {name: [start for start, end in edges if end == name] for name in self.names}


class NirNet(nn.Module):
    """The net of a graph: inputs (B, T, ...) to the values of its Output, (B, T, ...) or summed over T.

    Integers and booleans are converted to the weights' type.
    """

    _numbers: Tensor

    def __init__(self, graph: Graph, time_steps: int, dt: float, readout: str, **dialect: str) -> None:
        super().__init__()
        self.input_shape = (time_steps, *_sizes(graph.nodes[graph.input], "shape"))
        self._input, self._output, self._is_summed = graph.input, graph.output, readout == "sum"
        self.nodes, self._keys = nn.ModuleDict(), dict[str, str]()
        in_order = _in_order(graph)
        for name in in_order:
            key = re.sub(r"\W", "_", name)
            while key in self.nodes or hasattr(nn.ModuleDict, key):
                key += "_"
            self._keys[name], self.nodes[key] = key, _module(name, graph.nodes[name], dt, dialect)
        edges = [(start, end) for start, end in graph.edges if end in self._keys]
        stateless = [name for name in in_order if not hasattr(self._of(name), "step")]
        self._groups = [_Group(names, edges, stateless) for names in _cycles(in_order, edges)]
        self.register_buffer("_numbers", torch.zeros(()), persistent=False)  # provides the type that all buffers have

    def _of(self, name: str) -> Any:
        return self.nodes[self._keys[name]]

    def neurons(self) -> list[nn.Module]:
        """Return the modules whose outputs are spikes (B, T, ...), in forward order."""
        ordered = (self._of(name) for group in self._groups for name in group.names)
        return [node.emitted for node in ordered if hasattr(node, "emitted")]

    def forward(self, x: Tensor) -> Tensor:
        """Return the values that reach the Output."""
        values = {self._input: x.to(self._numbers.dtype).transpose(0, 1)}
        for group in self._groups:
            values |= self._stepped(group, values) if group.is_cycle else self._whole(group, values)
            for name in set(group.names) - group.early:
                if hasattr(self._of(name), "emitted"):
                    values[name] = self._of(name).emitted(values[name].transpose(0, 1)).transpose(0, 1)
        out = values[self._output].transpose(0, 1)
        return out.sum(1) if self._is_summed else out

    def _whole(self, group: _Group, values: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return the output of a single node (T, B, ...)."""
        (name,) = group.names
        node, x = self._of(name), _sum(values[source] for source in group.sources[name])
        is_stepped = hasattr(node, "step")
        return {name: node(x) if is_stepped else node(x.flatten(0, 1)).unflatten(0, x.shape[:2])}

    def _stepped(self, group: _Group, values: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return the outputs of nodes in cycles (T, B, ...)."""
        outside = {source for sources in group.sources.values() for source in sources} - set(group.names)
        leaving: dict[str, list[Any]] = {name: [] for name in group.names if name not in group.early}
        states: dict[str, State] = {}
        latest: dict[str, Tensor | None] = {}
        for t in range(len(values[self._input])):
            latest |= {source: values[source][t] for source in outside}
            for name in group.names:
                node = self._of(name)
                arriving = [value for source in group.sources[name] if (value := latest.get(source)) is not None]
                if not arriving:  # feedback, before the first step
                    latest[name] = _at_rest(node)
                elif hasattr(node, "step"):
                    latest[name], states[name] = node.step(node.charged(_sum(arriving)), states.get(name))
                else:
                    latest[name] = node(_sum(arriving))
            for name, outputs in leaving.items():
                outputs.append(latest[name])
        return {name: torch.stack(outputs) for name, outputs in leaving.items()}


def _sum(arriving: Iterable[Tensor]) -> Tensor:
    return reduce(operator.add, arriving)


def _at_rest(node: Any) -> Tensor | None:
    """Return a layer's output without any input, for one item: its bias, or None for 0."""
    bias: Tensor | None = getattr(node, "bias", None)
    return None if bias is None else bias.reshape(-1, *[1] * (node.weight.dim() - 2))


def _in_order(graph: Graph) -> list[str]:
    """Return the nodes between Input and Output, excluding the Input, each after a node that leads to it."""
    reached, leading = _reach(graph.edges, graph.input), _reach([edge[::-1] for edge in graph.edges], graph.output)
    if graph.input not in leading:
        raise UsageError("no path leads from the Input to the Output")
    if unfed := sorted(set(leading) - set(reached)):
        raise UsageError(f"node {unfed[0]} receives nothing from the Input")
    return [name for name in reversed(reached) if name in leading and name != graph.input]


def _reach(edges: Iterable[tuple[str, ...]], first: str) -> list[str]:
    """Return the nodes reachable from the first, in depth-first post-order."""
    following: dict[str, list[str]] = defaultdict(list)
    for start, end in edges:
        following[start].append(end)
    left, seen, path = [], {first}, [(first, iter(following[first]))]
    while path:
        name, others = path[-1]
        after = next((other for other in others if other not in seen), None)
        if after is None:
            left.append(name)
            path.pop()
        else:
            seen.add(after)
            path.append((after, iter(following[after])))
    return left


def _cycles(names: Sequence[str], edges: Sequence[tuple[str, str]]) -> Iterator[list[str]]:
    """Yield the strongly connected components, each after all those that lead to it."""
    reached = {name: set(_reach(edges, name)) for name in names}
    together = {
        name: tuple(other for other in names if other in reached[name] and name in reached[other]) for name in names
    }
    before: dict[tuple[str, ...], set[tuple[str, ...]]] = {group: set() for group in together.values()}
    for start, end in edges:
        if start in together and together[start] != together[end]:
            before[together[end]].add(together[start])
    yield from map(list, TopologicalSorter(before).static_order())


def build(path: str, **options: Any) -> NirNet:
    """Return the net in a file in eval mode; the options are the catalog's.

    Raises UsageError with the file's name if it is damaged or has nodes that are unknown or do not fit together, and
    Unsupported without h5py.
    """
    graph = read(Path(path))
    try:
        net = NirNet(graph, **options).eval()
        with torch.no_grad():
            net(torch.zeros(1, 2, *net.input_shape[1:]))
    except UsageError as error:
        raise UsageError(f"{Path(path).name}: {error}") from error
    except RuntimeError as error:
        raise UsageError(f"{Path(path).name}: its nodes do not fit together: {error}") from error
    return net
