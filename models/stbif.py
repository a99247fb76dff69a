"""Quantised ResNet-18 and its conversion to a spiking net of ST-BIF neurons.

A QANN is a network of Conv2d, BatchNorm2d, Linear, pooling, residual additions and `Quantiser`s (codes 0..P times a
learnable scale, P = level//2 - 1). `convert` turns it into a network that receives 1/step of its input's charge at each
t < step = P, spikes for T steps and sums its output over T:

    Quantiser      -> ST-BIF neuron with threshold = scale and tracer bounds 0..P
    Conv/Linear+BN -> folded weight W g / sigma; folded bias / step, injected at t < step
    MaxPool        -> pool of the running sum, differenced over t
    layers before the first neuron have one input, so they run once; affine layers after the last neuron run on the sum

In exact arithmetic the sum equals the QANN's output for T >= step + L (P - 1), with L neuron layers on the longest
path: the input ends at step - 1, and each layer may need P - 1 further steps to settle. At level 8 that is 37 for the
ResNet. Sources: learned step size quantisation (LSQ, ICLR 2020), SpikeZIP-TF (ICML 2024), torchvision's ResNet.
"""

from __future__ import annotations

import copy
import math
import operator
from collections.abc import Callable, Iterator, Mapping
from typing import Any, cast

import torch
from torch import fx, nn
from torch.nn import functional

from benchd.kernels.dispatch import Unavailable
from benchd.kernels.exact_conv2d.layer import Grid, SpikeConvolution, require_integers
from benchd.kernels.op import is_exported, is_watched
from benchd.kernels.stbif import max_pool_delta, stbif_block
from benchd.kernels.stbif.native import fire
from benchd.kernels.stbif.torch_impl import running_sums
from benchd.models import random_weights
from benchd.models.catalog import Kernels
from benchd.models.synapses import Synapses, per_weight
from benchd.models.weights import WeightsError

PUBLISHED_NAMES = {r"(^|\.)relu\.s$": r"\1relu.scale", r"\.relu1\.s$": ".relu.scale", r"\.relu2\.s$": ".relu2.scale"}
"""Patterns of keys in the source's checkpoints, and our names for them: a block's relu1 follows bn1."""

_AFFINE = (nn.Conv2d, nn.BatchNorm2d, nn.Linear, nn.AvgPool2d, nn.AdaptiveAvgPool2d, nn.Flatten, nn.Identity)
_ADDITIONS = {operator.add, operator.iadd, torch.add, "add", "add_"}
_FOLDED, _LAYERS = "_folded", "_layers"
_CALIBRATION_IMAGES = 32


class Quantiser(nn.Module):
    """ReLU and quantisation combined: scale * clamp(floor(x / scale + 1/2), 0, pos_max), with LSQ's gradients."""

    neg_min = 0

    def __init__(self, level: int) -> None:
        super().__init__()
        self.pos_max = level // 2 - 1
        self.scale = nn.Parameter(torch.tensor(1.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return scale times codes, in the shape and dtype of `x` (B, ...)."""
        if torch.is_grad_enabled() and (x.requires_grad or self.scale.requires_grad):
            return _Lsq.apply(x, self.scale, self.neg_min, self.pos_max)
        return _quantised(x, self.scale, self.neg_min, self.pos_max)


def _quantised(x: torch.Tensor, scale: torch.Tensor, neg_min: int, pos_max: int) -> torch.Tensor:
    wide = torch.promote_types(x.dtype, torch.float32)
    codes = (x.to(wide) / scale.to(wide)).add_(0.5).floor_().clamp_(neg_min, pos_max)
    return codes.mul_(scale.to(wide)).to(x.dtype)


class _Lsq(torch.autograd.Function):
    """Its gradients: to x straight through within the bounds; to the scale code - x/scale within, the bound outside."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, scale: torch.Tensor, neg_min: int, pos_max: int) -> torch.Tensor:
        ctx.save_for_backward(x, scale)
        ctx.bounds = neg_min, pos_max
        return _quantised(x, scale, neg_min, pos_max)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, scale = ctx.saved_tensors
        neg_min, pos_max = ctx.bounds
        grad = grads[0]
        wide = torch.promote_types(x.dtype, torch.float32)
        ratio = x.to(wide) / scale.to(wide)
        inside = (ratio >= neg_min) & (ratio <= pos_max)
        slope = (ratio + 0.5).floor().clamp(neg_min, pos_max) - torch.where(inside, ratio, 0.0)
        # LSQ's factor, which gives the scale's updates the magnitude of a weight's, for any number of features
        factor = 1 / math.sqrt(max(1, x[0].numel() if len(x) else 1) * pos_max)
        return torch.where(inside, grad, 0.0), ((grad * slope).sum() * factor).to(scale.dtype), None, None


class _Block(nn.Module):
    """ResNet's basic block, under torchvision's names, with a quantiser for each of its two ReLUs."""

    def __init__(self, inputs: int, outputs: int, stride: int, level: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(outputs)
        self.relu = Quantiser(level)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(outputs)
        self.downsample = None if stride == 1 else _downsampling(inputs, outputs, stride)
        self.relu2 = Quantiser(level)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        inner = self.relu(self.bn1(self.conv1(x)))
        shortcut = x if self.downsample is None else self.downsample(x)
        return self.relu2(self.bn2(self.conv2(inner)) + shortcut)


def _downsampling(inputs: int, outputs: int, stride: int) -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))


def _stage(inputs: int, outputs: int, stride: int, level: int) -> nn.Sequential:
    return nn.Sequential(_Block(inputs, outputs, stride, level), _Block(outputs, outputs, 1, level))


class QuantisedResNet18(nn.Module):
    """ResNet-18 with 17 quantisers: images (B, 3, 32, 32) to logits (B, 10).

    Its four stages have `width` to 8 * `width` channels. Layers are named as in torchvision, which is not imported
    because that takes a second in each process.
    """

    input_shape = (3, 32, 32)

    def __init__(self, level: int, width: int = 64) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, width, 7, stride=2, padding=3, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.relu = Quantiser(level)
        self.maxpool = nn.MaxPool2d(3, stride=2, padding=1)
        self.layer1 = _stage(width, width, 1, level)
        self.layer2 = _stage(width, 2 * width, 2, level)
        self.layer3 = _stage(2 * width, 4 * width, 2, level)
        self.layer4 = _stage(4 * width, 8 * width, 2, level)
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self.fc = nn.Linear(8 * width, 10)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Return logits (B, 10) for images (B, 3, 32, 32)."""
        x = self.maxpool(self.relu(self.bn1(self.conv1(images))))
        x = self.layer4(self.layer3(self.layer2(self.layer1(x))))
        return self.fc(torch.flatten(self.avgpool(x), 1))

    def neurons(self) -> list[nn.Module]:
        """Return the quantisers, whose outputs are scale * codes (B, ...), in forward order."""
        return [module for module in self.modules() if isinstance(module, Quantiser)]


def build_qann(*, name: str, kernels: Kernels, level: int, width: int = 64) -> QuantisedResNet18 | FoldedNetwork:
    """Return the quantised ResNet-18 in eval mode with random weights, calibrated on seeded random images.

    Weights and images come from torch's global generator. Batch-norm statistics and quantiser scales are set from the
    calibration images, so that no layer is silent or saturated. With `kernels` "custom" and "custom-int8", which keep
    the state-dict keys, batch norms are folded and codes are convolved in integers; raises
    benchd.kernels.dispatch.Unavailable if the default device is not a CPU or lacks the instructions.
    """
    model = QuantisedResNet18(level, width)
    hooks = [quantiser.register_forward_pre_hook(_initialise_scale) for quantiser in model.neurons()]
    random_weights.calibrate(model, torch.randn(_CALIBRATION_IMAGES, *model.input_shape))
    for hook in hooks:
        hook.remove()
    return model if kernels == "torch" else fold(model, name, kernels)


def _initialise_scale(quantiser: Quantiser, inputs: tuple[torch.Tensor, ...]) -> None:
    """Set LSQ's initial step size from the first batch."""
    quantiser.scale.copy_(2 * inputs[0].abs().mean() / math.sqrt(quantiser.pos_max))


def build_snn(*, name: str, kernels: Kernels, level: int, time_steps: int, width: int = 64) -> SpikingNetwork:
    """Return the spiking ResNet-18 in eval mode: `convert` of `build_qann`, with the QANN's state-dict keys.

    Raises ValueError if time_steps < step = level//2 - 1, and benchd.kernels.dispatch.Unavailable if `kernels` other
    than "torch" have no implementation on the default device.
    """
    if kernels == "custom-int8":
        require_integers(name, kernels)
    return convert(build_qann(name=name, kernels="torch", level=level, width=width), time_steps, kernels=kernels)


def fold(qann: nn.Module, name: str, kernels: Kernels = "custom") -> FoldedNetwork:
    """Return `qann` in eval mode with folded batch norms and integer convolutions of codes.

    With `kernels` "custom-int8" the weights are int8. `qann` is unchanged; `name` is the model's name in errors. Raises
    the ValueError of `convert`, and benchd.kernels.dispatch.Unavailable if the default device is not a CPU or lacks the
    instructions.
    """
    require_integers(name, kernels)
    body = copy.deepcopy(qann).to(memory_format=torch.channels_last)
    graph = _trace(body)
    neurons = [str(node.target) for node in graph.nodes if isinstance(_module(body, node), Quantiser)]
    _fold_layers(body, graph, dict.fromkeys(graph.nodes, "still"), 0, 0, kernels)
    _introduce(body, graph)
    return FoldedNetwork(body, graph, neurons).eval()


def shape_from(state: Mapping[str, torch.Tensor], options: Mapping[str, Any]) -> dict[str, int]:
    """Return no arguments for `build`; raise WeightsError for a checkpoint with a different stem or width."""
    stem, width = state.get("conv1.weight"), options["width"]
    if stem is None or stem.dim() != 4 or stem.shape == (width, 3, 7, 7):
        return {}
    mismatch = f"conv1.weight is {tuple(stem.shape)} instead of {(width, 3, 7, 7)}"
    if stem.shape[1:] == (3, 7, 7):
        raise WeightsError(f"{mismatch}; pass --option width={len(stem)}")
    raise WeightsError(f"{mismatch}: only a 7x7 stem with stride 2 and a max pool is supported")


def convert(qann: nn.Module, time_steps: int, *, kernels: Kernels = "torch") -> SpikingNetwork:
    """Return the spiking form of `qann` over `time_steps` steps, in its dtype and on its device, in eval mode.

    `qann` is unchanged. The result has the same parameter and state-dict names. Batch norm uses the running statistics
    even in training. With `kernels` "custom", bias and shortcut are added in the neurons' kernel; with "custom-int8",
    the weights applied to spikes are also int8. Raises ValueError if time_steps < step or, with its name, for the first
    layer without a spiking form, and benchd.kernels.dispatch.Unavailable if the `kernels` cannot run on the default
    device.
    """
    implementation = _implementation(kernels)
    body = copy.deepcopy(qann)
    if implementation != "torch":
        body = body.to(memory_format=torch.channels_last)
    graph = _trace(body)
    step = _step(body, graph)
    if time_steps < step:
        raise ValueError(f"time_steps {time_steps} is less than step {step}: part of the input would never arrive")
    neurons = [str(node.target) for node in graph.nodes if isinstance(_module(body, node), Quantiser)]
    zones = _zones(body, graph)
    _fold_layers(body, graph, zones, time_steps, step, kernels)
    _cross_zones(graph, zones, time_steps, step)
    _spike(body, graph, zones, time_steps, implementation)
    _introduce(body, graph)
    return SpikingNetwork(body, graph, neurons, time_steps, step).eval()


def _implementation(kernels: Kernels) -> str:
    if kernels == "torch":
        return "torch"
    # fails here, not during the run, if the kernel is missing or does not compile
    stbif_block(torch.zeros(1, 1, 1), threshold=1.0, pos_max=1, neg_min=0, implementation="auto")
    return "auto"


class _Tracer(fx.Tracer):
    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return isinstance(m, Quantiser) or super().is_leaf_module(m, module_qualified_name)


def _trace(qann: nn.Module) -> fx.Graph:
    """Return the graph of `qann`; raise ValueError for a node without a spiking form."""
    graph = _Tracer().trace(qann)
    for node in graph.nodes:
        if not _convertible(qann, node):
            raise ValueError(f"{node.op} {node.target} has no spiking form")
    return graph


def _convertible(qann: nn.Module, node: fx.Node) -> bool:
    if node.op == "call_module":
        return isinstance(_module(qann, node), (Quantiser, nn.MaxPool2d, *_AFFINE))
    if node.target in _ADDITIONS:
        of_two = len(node.args) == 2 and all(isinstance(operand, fx.Node) for operand in node.args)
        return of_two and node.kwargs.keys() <= {"alpha"}
    return node.op in {"placeholder", "output"} or node.target in {torch.flatten, "flatten"}


def _module(root: nn.Module, node: fx.Node) -> nn.Module | None:
    return root.get_submodule(str(node.target)) if node.op == "call_module" else None


def _step(qann: nn.Module, graph: fx.Graph) -> int:
    layers = [_module(qann, node) for node in graph.nodes]
    if not (bounds := [layer.pos_max for layer in layers if isinstance(layer, Quantiser)]):
        raise ValueError("a QANN needs at least one Quantiser")
    return max(bounds)


def _zones(qann: nn.Module, graph: fx.Graph) -> dict[fx.Node, str]:
    """Return each node's zone: "still" (before neurons), "spiking" (T times a call) or "summed" (affine to the end)."""
    zones: dict[fx.Node, str] = {}
    for node in graph.nodes:
        moves = isinstance(_module(qann, node), Quantiser) or any(
            zones[source] == "spiking" for source in node.all_input_nodes
        )
        zones[node] = "spiking" if moves else "still"
    for node in reversed(graph.nodes):
        curved = isinstance(_module(qann, node), (Quantiser, nn.MaxPool2d))
        if zones[node] == "spiking" and not curved and all(zones[user] == "summed" for user in node.users):
            zones[node] = "summed"
    return zones


def _fold_layers(
    body: nn.Module, graph: fx.Graph, zones: dict[fx.Node, str], time_steps: int, step: int, kernels: Kernels
) -> None:
    """Replace each convolution or linear layer, and any batch norm directly after it, by a `_FoldedLayer` layer."""
    folded = nn.ModuleDict()
    body.add_module(_FOLDED, folded)
    for node in [node for node in graph.nodes if isinstance(_module(body, node), (nn.Conv2d, nn.Linear))]:
        follower = next(iter(node.users)) if len(node.users) == 1 else node
        follows = _module(body, follower)
        norm = follows if isinstance(follows, nn.BatchNorm2d) else None
        schedule = (time_steps, step) if zones[node] == "spiking" else None
        layer = cast("nn.Conv2d | nn.Linear", _module(body, node))
        folded[node.name] = _FoldedLayer(layer, norm, schedule, kernels)
        node.target = f"{_FOLDED}.{node.name}"
        if norm is not None:
            follower.replace_all_uses_with(node)
            graph.erase_node(follower)
    for node in graph.nodes:
        if isinstance(_module(body, node), nn.BatchNorm2d):
            raise ValueError(f"{node.target}: batch norm has a spiking form only directly after a convolution")


def _cross_zones(graph: fx.Graph, zones: dict[fx.Node, str], time_steps: int, step: int) -> None:
    """Encode inputs of the spiking zone and sum its outputs; values that meet summed ones outside it stay unchanged."""
    for node in list(graph.nodes):
        for source, destination, crossing, arguments in (
            ("still", "spiking", _encoded, (time_steps, step)),
            ("spiking", "summed", _summed, (time_steps,)),
        ):
            users = {user for user in node.users if zones.get(user) == destination}
            if zones[node] == source and users:
                with graph.inserting_after(node):
                    crossed = graph.call_function(crossing, (node, *arguments))
                node.replace_all_uses_with(crossed, delete_user_cb=users.__contains__)


def _encoded(charge: torch.Tensor, time_steps: int, step: int) -> torch.Tensor:
    """Return charge / step for t < step and zeros after, (T*B, ...)."""
    share = charge / step
    # images keep their layout because they are concatenated, not stacked
    return torch.cat([share] * step + [torch.zeros_like(share)] * (time_steps - step))


def _steps(folded: torch.Tensor, time_steps: int) -> torch.Tensor:
    """Return (T*B, ...) as (T, B, ...)."""
    return folded.unflatten(0, (time_steps, -1))


def _summed(folded: torch.Tensor, time_steps: int) -> torch.Tensor:
    return _steps(folded, time_steps).sum(0)


def _spike(body: nn.Module, graph: fx.Graph, zones: dict[fx.Node, str], time_steps: int, implementation: str) -> None:
    """Replace quantisers by neurons and max pools by pools of the running sum, which operate on (T, B, ...)."""
    body.add_module(_LAYERS, nn.ModuleDict())
    for node in list(graph.nodes):
        layer = _module(body, node)
        if zones.get(node) != "spiking" or not isinstance(layer, (Quantiser, StBif, nn.MaxPool2d, _MaxPoolOfSum)):
            continue
        if isinstance(layer, Quantiser):
            body.set_submodule(str(node.target), StBif(layer, implementation))
        elif isinstance(layer, nn.MaxPool2d):
            body.set_submodule(str(node.target), _MaxPoolOfSum(layer, implementation))
        fires = isinstance(layer, (Quantiser, StBif))
        if fires and implementation != "torch" and _joined(body, graph, node, time_steps):
            continue
        with graph.inserting_before(node):
            node.args = tuple(graph.call_function(_steps, (flat, time_steps)) for flat in node.args)
        with graph.inserting_after(node):
            flat = graph.call_function(torch.flatten, (node, 0, 1))
        node.replace_all_uses_with(flat, delete_user_cb=lambda user, flat=flat: user is not flat)


def _joined(body: nn.Module, graph: fx.Graph, node: fx.Node, time_steps: int) -> bool:
    """Pass the shortcut to neuron `node` if only it uses the sum; join it to a layer that has no other reader.

    Return whether there is such a layer.
    """
    current = cast("fx.Node", node.args[0])
    # the kernel adds exactly two operands, unscaled
    is_plain = current.target in _ADDITIONS and not current.kwargs and len(current.all_input_nodes) == 2
    # any other user of the sum, or of an operand that was added to in place, would miss the addition
    if is_plain and len(current.users) == len(cast("fx.Node", current.args[0]).users) == 1:
        node.args = current.args
        graph.erase_node(current)
        current = cast("fx.Node", node.args[0])
    layer, neuron = _module(body, current), cast("StBif", _module(body, node))
    if not isinstance(layer, _FoldedLayer) or not layer.scheduled or len(current.users) > 1:
        return False
    layer.adds_bias = False
    cast("nn.ModuleDict", body.get_submodule(_LAYERS))[node.name] = _SpikingLayer(layer, neuron, time_steps)
    node.target, node.args = f"{_LAYERS}.{node.name}", (current.args[0], *node.args[1:])
    graph.erase_node(current)
    return True


def _introduce(body: nn.Module, graph: fx.Graph) -> None:
    """Tell each folded layer which layer of neurons it reads, if it reads exactly one layer's codes."""
    on_the_way = (nn.Flatten, nn.Identity, nn.MaxPool2d, _MaxPoolOfSum)
    for node in graph.nodes:
        layer = _synapses(_module(body, node))
        if layer is None:
            continue
        source = node.args[0]
        while source.target in {torch.flatten, _steps} or isinstance(_module(body, source), on_the_way):
            source = source.args[0]
        sender = _module(body, source)
        if isinstance(sender, _SpikingLayer):
            sender = sender.members[1]
        if isinstance(sender, (Quantiser, StBif)):
            layer.reads(sender)


def _synapses(module: nn.Module | None) -> _FoldedLayer | None:
    if isinstance(module, _SpikingLayer):
        return module.members[0]
    return module if isinstance(module, _FoldedLayer) else None


def _learns() -> bool:
    return torch.is_grad_enabled() and not is_exported()


class StBif(nn.Module):
    """A layer of ST-BIF neurons, whose threshold is its quantiser's scale."""

    def __init__(self, quantiser: Quantiser, implementation: str) -> None:
        super().__init__()
        self.scale = quantiser.scale
        self.pos_max, self.neg_min = quantiser.pos_max, quantiser.neg_min
        self.implementation = implementation

    def forward(
        self, current: torch.Tensor, residual: torch.Tensor | None = None, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Return scale times the codes -1, 0 and 1, in the shape and dtype of `current` (T, B, ...).

        `residual` (T, B, ...) and `bias` (T, C) are added to the current.
        """
        return stbif_block(
            current,
            bias=bias,
            residual=residual,
            threshold=self.scale,
            pos_max=self.pos_max,
            neg_min=self.neg_min,
            output="values",
            implementation=self.implementation,
        )


class _SpikingLayer(nn.Module):
    """A folded layer and the neurons that are its only reader, whose kernel adds the bias and a shortcut.

    If no hook observes the values in between, they are two C calls: at batch 1, modules and views would take longer
    than the kernels.
    """

    def __init__(self, synapses: _FoldedLayer, neuron: StBif, time_steps: int) -> None:
        super().__init__()
        # a tuple keeps them out of this module's children, so that the state dict contains them once
        self.members = synapses, neuron
        self._time_steps = time_steps

    def forward(self, x: torch.Tensor, shortcut: torch.Tensor | None = None) -> torch.Tensor:
        """Return scale times the codes, (T*B, ...), for inputs (T*B, ...)."""
        synapses, neuron = self.members
        fits = x.dtype == torch.float32 and synapses.suits(x)
        if fits and not torch.compiler.is_compiling() and not is_watched(synapses, neuron):
            y, bias = synapses.convolved(x, None), synapses.bias
            return fire(y, self._time_steps, bias, shortcut, neuron.scale, neuron.pos_max, neuron.neg_min)
        current = _steps(synapses(x), self._time_steps)
        residual = None if shortcut is None else _steps(shortcut, self._time_steps)
        return torch.flatten(neuron(current, residual, synapses.bias_by_step()), 0, 1)


class _MaxPoolOfSum(nn.Module):
    """Max pool of the running sum over T, differenced: its outputs sum to the pool of the summed inputs."""

    def __init__(self, pool: nn.MaxPool2d, implementation: str) -> None:
        super().__init__()
        self.pool, self.implementation = pool, implementation
        if implementation != "torch" and (pool.ceil_mode or _squares(pool) is None):
            raise Unavailable("the custom max pool needs square windows, without dilation or ceil_mode")

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        """Return (T, B, C, H', W') for `values` (T, B, C, H, W)."""
        if self.implementation != "torch":
            kernel_size, stride, padding = cast("tuple[int, int, int]", _squares(self.pool))
            pooled = max_pool_delta(
                values, kernel_size=kernel_size, stride=stride, padding=padding, implementation=self.implementation
            )
            return pooled.contiguous() if _goes_by_planes(pooled) else pooled
        pooled = _steps(self.pool(running_sums(values).flatten(0, 1)), len(values))
        return torch.cat([pooled[:1], pooled.diff(dim=0)]).to(values.dtype)


def _squares(pool: nn.MaxPool2d) -> tuple[int, int, int] | None:
    """Return kernel size, stride and padding, or None if a window is not square or is dilated."""
    sides = [{size} if isinstance(size, int) else set(size) for size in (pool.kernel_size, pool.stride, pool.padding)]
    if any(len(side) > 1 for side in sides) or pool.dilation not in {1, (1, 1)}:
        return None
    kernel_size, stride, padding = (side.pop() for side in sides)
    return kernel_size, stride, padding


def _square_sizes(layer: nn.Conv2d | nn.Linear) -> tuple[int, int] | None:
    """Return the layer's stride and padding if `spike_conv2d` supports it, else None."""
    if isinstance(layer, nn.Linear):
        return 1, 0
    (stride, *strides), padding = set(layer.stride), layer.padding
    plain = layer.groups == 1 and set(layer.dilation) == {1} and layer.padding_mode == "zeros"
    if not plain or strides or isinstance(padding, str) or len(set(padding)) > 1:
        return None
    return stride, padding[0]


class _FoldedLayer(nn.Module):
    """A convolution or linear layer with folded batch norm and, given (T, step), its bias as a schedule over T.

    The parameters stay with their original layers. `weight` and `bias` are derived from them by `refresh` for
    inference, and again in each call that autograd records.
    """

    weight: torch.Tensor
    bias: torch.Tensor | None

    def __init__(
        self,
        layer: nn.Conv2d | nn.Linear,
        norm: nn.BatchNorm2d | None,
        schedule: tuple[int, int] | None,
        kernels: Kernels,
    ) -> None:
        super().__init__()
        self.adds_bias = True
        self._sizes = None if kernels == "torch" else _square_sizes(layer)
        shape = (*layer.weight.shape, 1, 1) if isinstance(layer, nn.Linear) else None
        self._convolve = SpikeConvolution(shape, per_weight(kernels))
        self._is_custom, self._by_planes = kernels != "torch", False
        self._senders: tuple[Quantiser | StBif, ...] = ()
        # a tuple keeps them out of this module's children, so that the state dict contains them once
        self._sources = (layer, norm)
        self._schedule = schedule
        self._held: list[tuple[nn.Module, str, str]] = [(layer, "_parameters", name) for name in ("weight", "bias")]
        if norm is not None:
            self._held += [(norm, "_parameters", name) for name in ("weight", "bias")]
            self._held += [(norm, "_buffers", name) for name in ("running_mean", "running_var")]
        # each with its storage, offset and version: while a storage is kept, no other can have its address
        self._derived_from: list[tuple[torch.Tensor, torch.UntypedStorage, int | torch.SymInt, int | None]] = []
        self.register_buffer("weight", None, persistent=False)
        self.register_buffer("bias", None, persistent=False)

    def refresh(self, *, force: bool) -> None:
        """Derive weight and bias again if forced, or if a tensor they come from was replaced or written to."""
        tensors = [tensor for tensor in self._tensors() if tensor is not None]
        by_planes = self._is_custom and _goes_by_planes(tensors[0])
        if force or by_planes != self._by_planes or not self._is_derived_from(tensors):
            self._by_planes = by_planes
            # ordinary tensors even in inference mode, which they may outlive
            with torch.inference_mode(False), torch.no_grad():
                weight, bias = self._derive()
            # for a layer without a norm this is its own Parameter, which must not be registered a second time
            self.weight, self.bias = weight.detach(), None if bias is None else bias.detach()
            # inference tensors have no version: writes go unnoticed until load_state_dict, to() or train()
            self._derived_from = [
                (
                    source,
                    source.untyped_storage(),
                    source.storage_offset(),
                    None if source.is_inference() else source._version,
                )
                for source in tensors
            ]

    def _is_derived_from(self, tensors: list[torch.Tensor]) -> bool:
        if len(tensors) != len(self._derived_from):
            return False
        for tensor, (source, storage, offset, version) in zip(tensors, self._derived_from, strict=True):
            # the storage first: a tensor whose data was replaced in inference mode no longer has a version
            if tensor is not source or tensor.untyped_storage()._cdata != storage._cdata:
                return False
            if tensor.storage_offset() != offset or (version is not None and tensor._version != version):
                return False
        return True

    @property
    def scheduled(self) -> bool:
        """Whether the layer runs in the spiking zone, for T steps with a bias for each."""
        return self._schedule is not None

    def reads(self, sender: Quantiser | StBif) -> None:
        """Treat inputs as codes of `sender`; the kernel still checks this."""
        self._senders = (sender,)

    @property
    def layer(self) -> nn.Conv2d | nn.Linear:
        """The convolution or linear layer that this layer replaces."""
        return self._sources[0]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the layer's output for `x`, (T*B, ...) with a schedule and (B, ...) without one."""
        weight, bias = self._derive() if _learns() else (self.weight, self.bias)
        if self._schedule is None:
            return self._apply_layer(x, weight, bias)
        y = self._apply_layer(x, weight, None)
        if bias is None or not self.adds_bias:
            return y
        _steps(y, self._schedule[0]).add_(bias)
        return y

    def bias_by_step(self) -> torch.Tensor | None:
        """Return the bias schedule as (T, out), derived again if autograd records; None without a bias."""
        bias = self._derive()[1] if _learns() else self.bias
        return None if bias is None else bias.flatten(1)

    def suits(self, x: torch.Tensor) -> bool:
        """Return whether the spike kernels can convolve `x`."""
        # torch 2.9 cannot trace bool() of a tuple
        reads_codes = self._sizes is not None and (self.scheduled or len(self._senders) > 0)
        return reads_codes and self._convolve.suits(x, self.weight)

    def _apply_layer(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        layer = self._sources[0]
        if self.suits(x):
            return self.convolved(x, bias)
        if isinstance(layer, nn.Conv2d):
            x = x.contiguous() if self._by_planes else x
            return layer._conv_forward(x, weight, bias)
        return functional.linear(x, weight, bias)

    def convolved(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """Return the layer's output, contiguous channels-last, for spikes `x` that it `suits`, with bias (out,)."""
        stride, padding = cast("tuple[int, int]", self._sizes)
        # a neuron emits at most one spike per step, and the pool of a running sum changes by at most one
        grid = None
        if self._senders:
            (sender,) = self._senders
            grid = Grid(sender.scale, 1 if self._schedule else sender.pos_max)
        if self.weight.dim() == 2:
            return self._convolve(x[:, :, None, None], self.weight, bias, grid=grid).flatten(1)
        return self._convolve(x, self.weight, bias, stride=stride, padding=padding, grid=grid)

    def _tensors(self) -> list[torch.Tensor | None]:
        # avoids attribute look-up, which costs as much as the comparison, except for a parametrised weight, which it
        # creates
        tensors = []
        for module, kind, name in self._held:
            registered = getattr(module, kind)  # a dictionary that torch.export replaces
            tensors.append(registered[name] if name in registered else getattr(module, name))
        return tensors

    def _derive(self) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return the folded weight and the bias (out,), or its schedule (T, 1, out, ...), in the weight's dtype."""
        layer, norm = self._sources
        dtype, wide = layer.weight.dtype, torch.promote_types(layer.weight.dtype, torch.float32)
        weight = layer.weight.to(wide)
        bias = None if layer.bias is None else layer.bias.to(wide)
        if norm is not None:
            weight, bias = _folded(weight, bias, norm, wide)
        if bias is not None and self._schedule is not None:
            bias = _scheduled(bias, *self._schedule).reshape(-1, 1, len(bias), *[1] * (weight.dim() - 2))
        weight = weight.to(dtype)
        if self._by_planes:  # contiguous() would do nothing for channels-last 1x1 weights
            weight = weight.clone(memory_format=torch.contiguous_format)
        return weight, None if bias is None else bias.to(dtype)


def _goes_by_planes(tensor: torch.Tensor) -> bool:
    """Return whether cuDNN convolves `tensor` in planes, as (N, C, H, W): float32 without autocast.

    It converts channels-last input and output of each layer: 13 % of the spiking ResNet-18's time on an H100.
    """
    return tensor.is_cuda and tensor.dtype == torch.float32 and not torch.is_autocast_enabled("cuda")


def _folded(
    weight: torch.Tensor, bias: torch.Tensor | None, norm: nn.BatchNorm2d, wide: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    if norm.running_mean is None or norm.running_var is None:
        raise ValueError("batch norm without running statistics has no spiking form")
    gain = (norm.running_var.to(wide) + norm.eps).rsqrt()
    if norm.affine:
        gain = gain * norm.weight.to(wide)
    shift = -norm.running_mean.to(wide) if bias is None else bias - norm.running_mean.to(wide)
    shift = gain * shift
    return weight * gain.view(-1, 1, 1, 1), shift + norm.bias.to(wide) if norm.affine else shift


def _scheduled(bias: torch.Tensor, time_steps: int, step: int) -> torch.Tensor:
    """Return (T, out): bias / step while the input arrives, then 0."""
    arrives = torch.arange(time_steps, device=bias.device) < step
    return torch.where(arrives[:, None], bias / step, 0.0)


class FoldedNetwork(nn.Module):
    """The result of `fold`, and the base of a spiking network: runs `body` by a graph over folded weights."""

    def __init__(self, body: nn.Module, graph: fx.Graph, neurons: list[str]) -> None:
        super().__init__()
        self.input_shape: tuple[int, ...] = getattr(body, "input_shape", ())
        self._neuron_names = neurons
        # the QANN's children under their own names, for the same state dict
        for name, child in body.named_children():
            self.add_module(name, child)
        self._run: Callable[[nn.Module, torch.Tensor], torch.Tensor] = type(fx.GraphModule(body, graph)).forward
        self.register_load_state_dict_post_hook(_refresh_after_load)  # type: ignore[no-untyped-call]
        self._refresh(force=True)

    def neurons(self) -> list[nn.Module]:
        """Return the layers of neurons, whose outputs are scale * codes (B, ...) or (T, B, ...), in forward order."""
        return [self.get_submodule(name) for name in self._neuron_names]

    def synapses(self) -> list[Synapses]:
        """Return the layers with weights in forward order."""
        return [Synapses(f, f.layer, "spikes" if f.scheduled else "values") for f in self._folded_layers()]

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Return the outputs, summed over T; compiled and exported graphs do not refresh the folded weights."""
        if not torch.compiler.is_compiling() and not torch.is_grad_enabled():
            self._refresh(force=False)
        return self._run(self, images)

    def train(self, mode: bool = True) -> FoldedNetwork:
        """Set the mode, and fold the weights again, because training may have changed them."""
        super().train(mode)
        self._refresh(force=True)
        return self

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> FoldedNetwork:
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        self._refresh(force=True)
        return self

    def _refresh(self, *, force: bool) -> None:
        with torch.no_grad():  # a parametrised weight, recreated at each access, is kept without its graph
            for folded in self._folded_layers():
                folded.refresh(force=force)

    def _folded_layers(self) -> Iterator[_FoldedLayer]:
        return cast("Iterator[_FoldedLayer]", self.get_submodule(_FOLDED).children())


class SpikingNetwork(FoldedNetwork):
    """The result of `convert`: images (B, ...) to the sum over T of the outputs (B, classes)."""

    def __init__(self, body: nn.Module, graph: fx.Graph, neurons: list[str], time_steps: int, step: int) -> None:
        super().__init__(body, graph, neurons)
        self.time_steps, self.step = time_steps, step

    def emitters(self) -> dict[nn.Module, torch.Tensor]:
        """Return the modules that emit spikes, a neuron or the layer joined to it, and the height of their spikes."""
        layers = self.get_submodule(_LAYERS).children()
        joined = {layer.members[1]: layer for layer in layers if isinstance(layer, _SpikingLayer)}
        return {joined.get(neuron, neuron): neuron.scale for neuron in self.neurons() if isinstance(neuron, StBif)}


def _refresh_after_load(network: FoldedNetwork, _: object) -> None:
    network._refresh(force=True)
