"""Quantised ResNet-18 and its conversion to a spiking net of ST-BIF neurons.

Its `Quantiser`s return codes 0..P times a learnable scale, P = level//2 - 1. `convert` turns it into a network that
receives 1/step of its input's charge at each t < step = P, spikes for T steps and sums its output over T:

    Quantiser      -> ST-BIF neuron with threshold = scale and tracer bounds 0..P
    Conv/Linear+BN -> folded weight W g / sigma; folded bias / step, injected at t < step
    MaxPool        -> pool of the running sum, differenced over t
    the stem has one input, so it runs once; the layers after the last neuron run on the sum

In exact arithmetic the sum equals the QANN's output for T >= step + L (P - 1), with L neuron layers on the longest
path: the input ends at step - 1, and each layer may need P - 1 further steps to settle. At level 8 that is 37 for the
ResNet. Sources: learned step size quantisation (LSQ, ICLR 2020), SpikeZIP-TF (ICML 2024), torchvision's ResNet.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import nn

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
    """Return `calibrated_qann`; with `kernels` "custom" and "custom-int8", its `fold`, which has the same keys."""
    qann = calibrated_qann(level=level, width=width)
    return qann if kernels == "torch" else fold(qann, name, kernels)


def calibrated_qann(*, level: int, width: int = 64) -> QuantisedResNet18:
    """Return the quantised ResNet-18 in eval mode with random weights, calibrated on seeded random images.

    Weights and images come from torch's global generator. Batch-norm statistics and quantiser scales are set from the
    calibration images, so that no layer is silent or saturated.
    """
    model = QuantisedResNet18(level, width)
    hooks = [quantiser.register_forward_pre_hook(_initialise_scale) for quantiser in model.neurons()]
    random_weights.calibrate(model, torch.randn(_CALIBRATION_IMAGES, *model.input_shape))
    for hook in hooks:
        hook.remove()
    return model


def _initialise_scale(quantiser: Quantiser, inputs: tuple[torch.Tensor, ...]) -> None:
    """Set LSQ's initial step size from the first batch."""
    quantiser.scale.copy_(2 * inputs[0].abs().mean() / math.sqrt(quantiser.pos_max))


def build_snn(*, name: str, kernels: Kernels, level: int, time_steps: int, width: int = 64) -> SpikingNetwork:
    """Return the spiking ResNet-18 in eval mode: `convert` of `calibrated_qann`, with the QANN's state-dict keys.

    Raises ValueError if time_steps < step = level//2 - 1, and benchd.kernels.dispatch.Unavailable if `kernels` other
    than "torch" have no implementation on the default device.
    """
    if kernels == "custom-int8":
        require_integers(name, kernels)
    return convert(calibrated_qann(level=level, width=width), time_steps, kernels=kernels)


def fold(qann: QuantisedResNet18, name: str, kernels: Kernels = "custom") -> FoldedNetwork:
    """Return `qann` in eval mode with folded batch norms and integer convolutions of codes.

    With `kernels` "custom-int8" the weights are int8. `qann` is unchanged; `name` is the model's name in errors. Raises
    benchd.kernels.dispatch.Unavailable if the default device is not a CPU or lacks the instructions.
    """
    require_integers(name, kernels)
    return FoldedNetwork(copy.deepcopy(qann).to(memory_format=torch.channels_last), kernels).eval()


def shape_from(state: Mapping[str, torch.Tensor], options: Mapping[str, Any]) -> dict[str, int]:
    """Return no arguments for `build`; raise WeightsError for a checkpoint with a different stem or width."""
    stem, width = state.get("conv1.weight"), options["width"]
    if stem is None or stem.dim() != 4 or stem.shape == (width, 3, 7, 7):
        return {}
    mismatch = f"conv1.weight is {tuple(stem.shape)} instead of {(width, 3, 7, 7)}"
    if stem.shape[1:] == (3, 7, 7):
        raise WeightsError(f"{mismatch}; pass --option width={len(stem)}")
    raise WeightsError(f"{mismatch}: only a 7x7 stem with stride 2 and a max pool is supported")


def convert(qann: QuantisedResNet18, time_steps: int, *, kernels: Kernels = "torch") -> SpikingNetwork:
    """Return the spiking form of `qann` over `time_steps` steps, in its dtype and on its device, in eval mode.

    `qann` is unchanged. The result has the same parameter and state-dict names. Batch norm uses the running statistics
    even in training. With `kernels` "custom", bias and shortcut are added in the neurons' kernel; with "custom-int8",
    the weights applied to spikes are also int8. Raises ValueError if time_steps < step, and
    benchd.kernels.dispatch.Unavailable if the `kernels` cannot run on the default device.
    """
    implementation, step = _implementation(kernels), qann.relu.pos_max
    if time_steps < step:
        raise ValueError(f"time_steps {time_steps} is less than step {step}: part of the input would never arrive")
    body = copy.deepcopy(qann)
    if implementation != "torch":
        body = body.to(memory_format=torch.channels_last)
    return SpikingNetwork(body, kernels, implementation, time_steps, step).eval()


def _implementation(kernels: Kernels) -> str:
    if kernels == "torch":
        return "torch"
    # fails here, not during the run, if the kernel is missing or does not compile
    stbif_block(torch.zeros(1, 1, 1), threshold=1.0, pos_max=1, neg_min=0, implementation="auto")
    return "auto"


def _encoded(charge: torch.Tensor, time_steps: int, step: int) -> torch.Tensor:
    """Return charge / step for t < step and zeros after, (T*B, ...)."""
    share = charge / step
    # images keep their layout because they are concatenated, not stacked
    return torch.cat([share] * step + [torch.zeros_like(share)] * (time_steps - step))


def _steps(folded: torch.Tensor, time_steps: int) -> torch.Tensor:
    """Return (T*B, ...) as (T, B, ...)."""
    return folded.unflatten(0, (time_steps, -1))


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

    def __init__(self, synapses: _FoldedLayer, neuron: Any, time_steps: int) -> None:
        super().__init__()
        synapses.adds_bias = False
        # a tuple keeps them out of this module's children, so that the state dict contains them once
        self.members: tuple[_FoldedLayer, StBif] = synapses, neuron
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
        self._sizes: Any = pool.kernel_size, pool.stride, pool.padding

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        """Return (T, B, C, H', W') for `values` (T, B, C, H, W)."""
        if self.implementation != "torch":
            kernel_size, stride, padding = self._sizes
            pooled = max_pool_delta(
                values, kernel_size=kernel_size, stride=stride, padding=padding, implementation=self.implementation
            )
            return pooled.contiguous() if _goes_by_planes(pooled) else pooled
        pooled = _steps(self.pool(running_sums(values).flatten(0, 1)), len(values))
        return torch.cat([pooled[:1], pooled.diff(dim=0)]).to(values.dtype)


class _FoldedLayer(nn.Module):
    """A convolution with folded batch norm and, given (T, step), its bias as a schedule over T.

    The parameters stay with their original layers. `weight` and `bias` are derived from them by `refresh` for
    inference, and again in each call that autograd records. Inputs are codes of `sender`, if any.
    """

    weight: torch.Tensor
    bias: torch.Tensor

    def __init__(
        self,
        layer: nn.Conv2d,
        norm: nn.BatchNorm2d,
        sender: Quantiser | StBif | None,
        schedule: tuple[int, int] | None,
        kernels: Kernels,
    ) -> None:
        super().__init__()
        self.adds_bias = True
        self._convolve = SpikeConvolution(None, per_weight(kernels))
        self._is_custom, self._by_planes = kernels != "torch", False
        self._stride, self._padding = layer.stride[0], int(layer.padding[0])
        # tuples keep them out of this module's children, so that the state dict contains them once
        self._sources = (layer, norm)
        self._senders: tuple[Quantiser | StBif, ...] = () if sender is None else (sender,)
        self._schedule = schedule
        # each with its storage, offset and version: while a storage is kept, no other can have its address
        self._derived_from: list[tuple[torch.Tensor, torch.UntypedStorage, int | torch.SymInt, int | None]] = []
        self.register_buffer("weight", None, persistent=False)
        self.register_buffer("bias", None, persistent=False)

    def refresh(self, *, force: bool) -> None:
        """Derive weight and bias again if forced, or if a tensor they come from was replaced or written to."""
        tensors = self._tensors()
        by_planes = self._is_custom and _goes_by_planes(tensors[0])
        if force or by_planes != self._by_planes or not self._is_derived_from(tensors):
            self._by_planes = by_planes
            # ordinary tensors even in inference mode, which they may outlive
            with torch.inference_mode(False), torch.no_grad():
                self.weight, self.bias = self._derive()
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
        # the storage first: a tensor whose data was replaced in inference mode no longer has a version
        return len(self._derived_from) == len(tensors) and all(
            tensor is source
            and tensor.untyped_storage()._cdata == storage._cdata
            and tensor.storage_offset() == offset
            and (version is None or tensor._version == version)
            for tensor, (source, storage, offset, version) in zip(tensors, self._derived_from, strict=True)
        )

    @property
    def scheduled(self) -> bool:
        """Whether the layer runs T steps, with a bias for each."""
        return self._schedule is not None

    @property
    def layer(self) -> nn.Conv2d:
        """The convolution that this layer replaces."""
        return self._sources[0]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the layer's output for `x`, (T*B, ...) with a schedule and (B, ...) without one."""
        weight, bias = self._derive() if _learns() else (self.weight, self.bias)
        if self._schedule is None:
            return self._apply_layer(x, weight, bias)
        y = self._apply_layer(x, weight, None)
        if self.adds_bias:
            _steps(y, self._schedule[0]).add_(bias)
        return y

    def bias_by_step(self) -> torch.Tensor:
        """Return the bias schedule as (T, out), derived again if autograd records."""
        return (self._derive()[1] if _learns() else self.bias).flatten(1)

    def suits(self, x: torch.Tensor) -> bool:
        """Return whether the spike kernels can convolve `x`."""
        # torch 2.9 cannot trace bool() of a tuple
        return self._is_custom and len(self._senders) > 0 and self._convolve.suits(x, self.weight)

    def _apply_layer(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        if self.suits(x):
            return self.convolved(x, bias)
        return self._sources[0]._conv_forward(x.contiguous() if self._by_planes else x, weight, bias)

    def convolved(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """Return the layer's output, contiguous channels-last, for codes `x` that it `suits`, with bias (out,)."""
        (sender,) = self._senders
        # a neuron emits at most one spike per step, and the pool of a running sum changes by at most one
        grid = Grid(sender.scale, 1 if self._schedule else sender.pos_max)
        return self._convolve(x, self.weight, bias, stride=self._stride, padding=self._padding, grid=grid)

    def _tensors(self) -> list[torch.Tensor]:
        # avoids attribute look-up, which costs as much as the comparison
        (layer, norm), names = self._sources, ("running_mean", "running_var")
        own: list[Any] = [layer._parameters["weight"], norm._parameters["weight"], norm._parameters["bias"]]
        return own + [norm._buffers[name] for name in names]

    def _derive(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the folded weight and the bias (out,), or its schedule (T, 1, out, 1, 1), in the weight's dtype."""
        layer, norm = self._sources
        dtype, wide = layer.weight.dtype, torch.promote_types(layer.weight.dtype, torch.float32)
        mean, variance = (value.to(wide) for value in (norm.running_mean, norm.running_var) if value is not None)
        gain = (variance + norm.eps).rsqrt() * norm.weight.to(wide)
        bias = gain * -mean + norm.bias.to(wide)
        if self._schedule is not None:
            bias = _scheduled(bias, *self._schedule)[:, None, :, None, None]
        weight = (layer.weight.to(wide) * gain.view(-1, 1, 1, 1)).to(dtype)
        if self._by_planes:  # contiguous() would do nothing for channels-last 1x1 weights
            weight = weight.clone(memory_format=torch.contiguous_format)
        return weight, bias.to(dtype)


def _goes_by_planes(tensor: torch.Tensor) -> bool:
    """Return whether cuDNN convolves `tensor` in planes, as (N, C, H, W): float32 without autocast.

    It converts channels-last input and output of each layer: 13 % of the spiking ResNet-18's time on an H100.
    """
    return tensor.is_cuda and tensor.dtype == torch.float32 and not torch.is_autocast_enabled("cuda")


def _scheduled(bias: torch.Tensor, time_steps: int, step: int) -> torch.Tensor:
    """Return (T, out): bias / step while the input arrives, then 0."""
    arrives = torch.arange(time_steps, device=bias.device) < step
    return torch.where(arrives[:, None], bias / step, 0.0)


class FoldedNetwork(nn.Module):
    """A quantised ResNet-18 with folded batch norms, and the base of its spiking form."""

    relu: nn.Module
    maxpool: nn.Module
    avgpool: nn.Module
    fc: nn.Linear

    def __init__(self, qann: QuantisedResNet18, kernels: Kernels, schedule: tuple[int, int] | None = None) -> None:
        super().__init__()
        self.input_shape = qann.input_shape
        # the QANN's children under their own names, for the same state dict
        for name, child in qann.named_children():
            self.add_module(name, child)
        folded = {
            name: _FoldedLayer(layer, norm, sender, schedule if sender else None, kernels)
            for name, layer, norm, sender in _convolutions(qann)
        }
        self._folded = nn.ModuleDict(folded)
        self._blocks = [
            (block, folded[f"{name}_conv1"], folded.get(f"{name}_downsample"), folded[f"{name}_conv2"])
            for name, block in _named_blocks(qann)
        ]
        self.register_load_state_dict_post_hook(_refresh_after_load)  # type: ignore[no-untyped-call]
        self._refresh(force=True)

    def neurons(self) -> list[nn.Module]:
        """Return the layers of neurons, whose outputs are scale * codes (B, ...) or (T, B, ...), in forward order."""
        return [module for module in self.modules() if isinstance(module, (Quantiser, StBif))]

    def synapses(self) -> list[Synapses]:
        """Return the layers with weights in forward order."""
        folded = [Synapses(f, f.layer, "spikes" if f.scheduled else "values") for f in self._folded_layers()]
        return [*folded, Synapses(self.fc, self.fc, "values")]

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Return the outputs, summed over T; compiled and exported graphs do not refresh the folded weights."""
        if not torch.compiler.is_compiling() and not torch.is_grad_enabled():
            self._refresh(force=False)
        return self.fc(torch.flatten(self.avgpool(self._features(self._folded["conv1"](images))), 1))

    def _features(self, x: torch.Tensor) -> torch.Tensor:
        """Return the last neurons' output, summed over T, for the first convolution's."""
        x = self._passed(self.maxpool, self._passed(self.relu, x))
        for block, first, shortcut, second in self._blocks:
            inner = self._passed(block.relu, first(x))
            x = self._passed(block.relu2, second(inner) + (x if shortcut is None else shortcut(x)))
        return x

    def _passed(self, layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
        """Return the output of neurons or a pool."""
        return layer(x)

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
        for folded in self._folded_layers():
            folded.refresh(force=force)

    def _folded_layers(self) -> Iterator[_FoldedLayer]:
        return self._folded.values()  # type: ignore[return-value]


def _named_blocks(qann: QuantisedResNet18) -> Iterator[tuple[str, _Block]]:
    for name, module in qann.named_modules():
        if isinstance(module, _Block):
            yield name.replace(".", "_"), module


def _convolutions(
    qann: QuantisedResNet18,
) -> Iterator[tuple[str, nn.Conv2d, nn.BatchNorm2d, Quantiser | None]]:
    """Yield name, layer, batch norm and sender of each convolution, in forward order; the stem reads images."""
    yield "conv1", qann.conv1, qann.bn1, None
    sender = qann.relu
    for name, block in _named_blocks(qann):
        yield f"{name}_conv1", block.conv1, block.bn1, sender
        downsample: Any = block.downsample
        if downsample is not None:
            yield f"{name}_downsample", downsample[0], downsample[1], sender
        yield f"{name}_conv2", block.conv2, block.bn2, block.relu
        sender = block.relu2


class SpikingNetwork(FoldedNetwork):
    """The result of `convert`: images (B, ...) to the sum over T of the outputs (B, classes)."""

    def __init__(
        self, qann: QuantisedResNet18, kernels: Kernels, implementation: str, time_steps: int, step: int
    ) -> None:
        for name, module in list(qann.named_modules()):
            if isinstance(module, Quantiser):
                qann.set_submodule(name, StBif(module, implementation))
        qann.set_submodule("maxpool", _MaxPoolOfSum(qann.maxpool, implementation))
        super().__init__(qann, kernels, (time_steps, step))
        self.time_steps, self.step = time_steps, step
        self._joined = [
            (_SpikingLayer(first, block.relu, time_steps), shortcut, _SpikingLayer(second, block.relu2, time_steps))
            for block, first, shortcut, second in (self._blocks if implementation != "torch" else [])
        ]
        self._layers = nn.ModuleList(layer for first, _, second in self._joined for layer in (first, second))

    def _features(self, x: torch.Tensor) -> torch.Tensor:
        x = _encoded(x, self.time_steps, self.step)
        if self._joined:
            x = self._passed(self.maxpool, self._passed(self.relu, x))
            for first, shortcut, second in self._joined:
                x = second(first(x), x if shortcut is None else shortcut(x))
        else:
            x = super()._features(x)
        return _steps(x, self.time_steps).sum(0)

    def _passed(self, layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return torch.flatten(layer(_steps(x, self.time_steps)), 0, 1)

    def emitters(self) -> dict[nn.Module, torch.Tensor]:
        """Return the modules that emit spikes, a neuron or the layer joined to it, and the height of their spikes."""
        joined = {layer.members[1]: layer for first, _, second in self._joined for layer in (first, second)}
        return {joined.get(neuron, neuron): neuron.scale for neuron in self.neurons() if isinstance(neuron, StBif)}


def _refresh_after_load(network: FoldedNetwork, _: object) -> None:
    network._refresh(force=True)
