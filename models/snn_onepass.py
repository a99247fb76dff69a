"""OnePass: a small spiking CNN for CIFAR-10 whose LIF neurons process all T time steps in one call.

    conv1 3->64, LIF, avgpool 2, conv2 64->128, LIF, avgpool 2, fc1 8192->256, ReLU, fc2 256->10, mean over T

T is folded into the batch for everything except the neurons, and with repeat encoding conv1 runs once, because its
input is the same at each step. This is exact in eval mode; in training, batch norm sees all steps as one batch.
Architecture: dftorresro/SNN-CIFAR10.
"""

from collections.abc import Mapping
from typing import Any, Literal

import torch
from torch import nn
from torch.nn import functional

from benchd.kernels.exact_conv2d.layer import Grid, SpikeConvolution, require_integers
from benchd.kernels.lif import lif_pool
from benchd.kernels.lif.native import lif_pool_first
from benchd.kernels.op import is_exported, is_hooked
from benchd.kernels.spike_conv2d import skips_zeros_in
from benchd.models.catalog import Kernels
from benchd.models.synapses import Synapses, per_weight
from benchd.models.weights import WeightsError

PUBLISHED_NAMES = {r"^head\.1\.": "fc1.", r"^head\.3\.": "fc2."}
"""Patterns of keys in the source's checkpoints, and our names for them."""

_FRAMES = 128
"""Time steps of images processed together: their currents stay in a CPU's cache, in reused memory."""

_MOST_PERIODS = 64
"""Maximum number of time steps whose currents are kept, to be added up at multiples of the step."""

_COUNTS = Grid(torch.tensor(0.25), 4)  # output of pooled neurons: the number of spikes in a window, 0 to 4


class PooledLif(nn.Module):
    """LIF neurons with 2x2-averaged spikes: currents (T, B, C, H, W) to (T, B, C, H//2, W//2)."""

    scale = 0.25

    def __init__(self, decay: float, threshold: float, reset: Literal["zero", "subtract"], implementation: str) -> None:
        super().__init__()
        self.decay, self.threshold, self.reset, self.implementation = decay, threshold, reset, implementation

    def forward(
        self, current: torch.Tensor, synapses: "SpikeConv2d | None" = None, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Return the pooled spikes for `current`, which contains first spikes if `synapses` are given.

        `bias` (C,) is added to the current.
        """
        if synapses is not None:
            return synapses.by_period(current, self.decay, self.threshold)
        return lif_pool(
            current,
            decay=self.decay,
            threshold=self.threshold,
            reset=self.reset,
            bias=bias,
            implementation=self.implementation,
        )

    def first(self, current: torch.Tensor) -> torch.Tensor:
        """Return the pooled first spikes of neurons that receive the same `current` at all steps, on a CPU."""
        return lif_pool_first(current[0], len(current), decay=self.decay, threshold=self.threshold)


class SpikeConv2d(nn.Conv2d):
    """A convolution of pooled spikes, by our kernels if they support it, else by plain PyTorch."""

    def __init__(self, in_channels: int, out_channels: int, kernel_size: int, padding: int, per_weight: int) -> None:
        super().__init__(in_channels, out_channels, kernel_size, padding=padding)
        self._sides, self._convolve = padding, SpikeConvolution(None, per_weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the layer's output for `x` (N, C, H, W)."""
        if not self._convolve.suits(x, self.weight):
            return super().forward(x)
        return self._convolve(x, self.weight, self.bias, padding=self._sides, grid=_COUNTS)

    def by_period(self, first: torch.Tensor, decay: float, threshold: float) -> torch.Tensor:
        """Return the layer's pooled output spikes for first spikes (T, B, C, H, W), which our kernels must support."""
        bias = self.weight.new_zeros(self.out_channels) if self.bias is None else self.bias
        return self._convolve.by_period(
            first, self.weight, bias, padding=self._sides, grid=_COUNTS, decay=decay, threshold=threshold
        )


class SpikeLinear(nn.Linear):
    """A linear layer on feature maps of pooled spikes (N, C, H, W), by our kernels if they support it."""

    def __init__(self, channels: int, side: int, out_features: int, per_weight: int) -> None:
        super().__init__(channels * side * side, out_features)
        self._convolve = SpikeConvolution((out_features, channels, side, side), per_weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the layer's output (N, out) for `x` (N, C, H, W)."""
        if not self._convolve.suits(x, self.weight):
            # with channels-last feature maps and weights in another order, copy the smaller tensor
            on_gpu = x.device.type == "cuda" and not is_exported()
            copies_weight = on_gpu and not x.is_contiguous() and len(x) > self.out_features
            return self.pixels_first(x) if copies_weight else super().forward(x.flatten(1))
        # one window as large as the feature map: channels-last input need not be flattened in the weight's order
        return self._convolve(x, self.weight, self.bias, grid=_COUNTS).flatten(1)

    def pixels_first(self, x: torch.Tensor) -> torch.Tensor:
        """Return the result of `forward` using features ordered (H, W, C): a channels-last `x` is not copied."""
        weight = self.weight.unflatten(1, x.shape[1:])
        return functional.linear(_pixels_first(x), _pixels_first(weight), self.bias)


def _pixels_first(pictures: torch.Tensor) -> torch.Tensor:
    """Return (N, C, H, W) as (N, H W C)."""
    return pictures.permute(0, 2, 3, 1).flatten(1)


class OnePass(nn.Module):
    """The network; use `build` to create it. Images (B, 3, 32, 32) in [0, 1] to logits (B, 10), the mean over T."""

    input_shape = (3, 32, 32)

    def __init__(
        self,
        time_steps: int,
        encoding: Literal["repeat", "rate"],
        p_scale: float,
        batch_norm: bool,
        neurons: tuple[PooledLif, PooledLif],
        kernels: Kernels,
    ) -> None:
        super().__init__()
        self.time_steps, self.encoding, self.p_scale = time_steps, encoding, p_scale
        custom, digits = kernels != "torch", per_weight(kernels)
        self.conv1 = nn.Conv2d(3, 64, 3, padding=1)
        self.conv2 = SpikeConv2d(64, 128, 3, 1, digits) if custom else nn.Conv2d(64, 128, 3, padding=1)
        if batch_norm:
            self.bn1 = nn.BatchNorm2d(64)
            self.bn2 = nn.BatchNorm2d(128)
        self.batch_norm = batch_norm
        self.lif1, self.lif2 = neurons
        self.flatten = nn.Identity() if custom else nn.Flatten()
        self.fc1 = SpikeLinear(128, 8, 256, digits) if custom else nn.Linear(128 * 8 * 8, 256)
        self.fc2 = nn.Linear(256, 10)

    def neurons(self) -> list[nn.Module]:
        """Return the modules whose outputs are `scale` times counts of spikes (T, B, ...), in forward order."""
        return [self.lif1, self.lif2]

    def synapses(self) -> list[Synapses]:
        """Return the layers with weights in forward order."""
        return [
            Synapses(self.conv1, self.conv1, "spikes" if self.encoding == "rate" else "values"),
            Synapses(self.conv2, self.conv2, "counts"),
            Synapses(self.fc1, self.fc1, "counts"),
            Synapses(self.fc2, self.fc2, "values"),
        ]

    def forward(self, images: torch.Tensor, uniforms: torch.Tensor | None = None) -> torch.Tensor:
        """Return logits (B, 10); `uniforms` (T, B, 3, 32, 32), for rate encoding only, default to torch.rand."""
        return self.encoded(self.encode(images, uniforms))

    def encode(self, images: torch.Tensor, uniforms: torch.Tensor | None = None) -> torch.Tensor:
        """Return the input of `encoded`: spikes (T, B, 3, 32, 32) with rate encoding, else the images unchanged."""
        if self.encoding == "rate":
            return _rate_coded(images, self.time_steps, self.p_scale, uniforms)
        if uniforms is not None:
            raise ValueError('uniforms are for encoding="rate"; this model uses "repeat"')
        return images

    def encoded(self, inputs: torch.Tensor) -> torch.Tensor:
        """Return logits (B, 10) for the output of `encode`: the deterministic part of the network."""
        spikes = self._spikes_by_period if self._has_periods(inputs) else self._spikes
        if not self._goes_in_groups(inputs):
            return self._read_out(spikes(inputs))
        by_image = 0 if self.encoding == "repeat" else 1
        groups = inputs.split(max(1, _FRAMES // self.time_steps), by_image)
        logits = [self._read_out(spikes(group)) for group in groups]
        return logits[0] if len(logits) == 1 else torch.cat(logits)

    def _goes_in_groups(self, inputs: torch.Tensor) -> bool:
        """Return whether our kernels run on a CPU, and no hook observes values between the layers."""
        if is_exported() or torch.is_grad_enabled() or inputs.device.type != "cpu":
            return False
        return isinstance(self.conv2, SpikeConv2d) and not is_hooked(*self.children())

    def _has_periods(self, inputs: torch.Tensor) -> bool:
        """Return whether our CPU kernels can use the periods of lif1's neurons, and no hook observes conv2."""
        if not skips_zeros_in(inputs) or inputs.dtype != torch.float32:
            return False
        steady = self.encoding == "repeat" and self.lif1.reset == "zero" and not self.batch_norm
        steady = steady and self.time_steps <= _MOST_PERIODS
        return steady and isinstance(self.conv2, SpikeConv2d) and not is_hooked(self.conv2)

    def _spikes(self, inputs: torch.Tensor) -> torch.Tensor:
        """Return the pooled spikes of lif2, (T, B, 128, 8, 8)."""
        spikes = self._fired(self.lif1, *self._stem(inputs))
        current, bias = self._received(self.conv2, spikes.flatten(0, 1), self.lif2)
        if self.batch_norm:
            current = self.bn2(current)
        return self._fired(self.lif2, current.unflatten(0, (self.time_steps, -1)), bias)

    def _spikes_by_period(self, images: torch.Tensor) -> torch.Tensor:
        """Return the result of `_spikes`, from a convolution of first spikes: see `benchd.kernels.lif.native`."""
        current, _ = self._stem(images)  # already includes the bias
        if is_hooked(self.lif1):
            self.lif1(current)  # only to run the hooks
        return self.lif2(self.lif1.first(current), self.conv2)

    def _read_out(self, spikes: torch.Tensor) -> torch.Tensor:
        hidden = self.fc1(self.flatten(spikes.flatten(0, 1))).relu()
        return self.fc2(hidden).unflatten(0, (self.time_steps, -1)).mean(0)

    def _stem(self, inputs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return the current of lif1, (T, B, 64, 32, 32), and a bias (64,) still to be added."""
        is_still = self.encoding == "repeat"
        current, bias = self._received(self.conv1, inputs if is_still else inputs.flatten(0, 1), self.lif1)
        if self.batch_norm:
            current = self.bn1(current)
        if is_still:
            return current.expand(self.time_steps, *current.shape), bias
        return current.unflatten(0, (self.time_steps, -1)), bias

    def _received(
        self, layer: nn.Conv2d, x: torch.Tensor, neurons: nn.Module
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return the layer's output for `x`, and its bias if the following neurons must add it.

        They add it with our GPU kernels, unless a hook observes the layer or neurons: cuDNN adds a bias in a separate
        kernel, which reads and writes the whole output. On a CPU it takes no time.
        """
        is_custom = x.device.type == "cuda" and isinstance(self.conv2, SpikeConv2d) and not self.batch_norm
        if is_custom and type(layer) in {nn.Conv2d, SpikeConv2d} and not is_hooked(layer, neurons):
            return layer._conv_forward(x, layer.weight, None), layer.bias
        return layer(x), None

    @staticmethod
    def _fired(neurons: nn.Module, current: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        return neurons(current) if bias is None else neurons(current, bias=bias)


def _rate_coded(images: torch.Tensor, time_steps: int, p_scale: float, uniforms: torch.Tensor | None) -> torch.Tensor:
    """Return Bernoulli spikes, (T, *images.shape): 1 where u < clamp(p_scale * image, 0, 1), else 0."""
    shape = (time_steps, *images.shape)
    if uniforms is None:
        uniforms = torch.rand(shape, dtype=images.dtype, device=images.device)
    elif uniforms.shape != shape:
        raise ValueError(f"rate encoding: uniforms must be (T, B, ...) = {shape}, not {tuple(uniforms.shape)}")
    return (uniforms < (p_scale * images).clamp(0, 1)).to(images.dtype)


def build(
    *,
    name: str,
    kernels: Kernels,
    time_steps: int,
    decay: float,
    threshold: float,
    reset: Literal["zero", "subtract"],
    encoding: Literal["repeat", "rate"],
    p_scale: float,
    batch_norm: bool,
) -> OnePass:
    """Return OnePass in eval mode with PyTorch's default random weights; the options are the catalog's.

    `kernels` "custom" is for inference: its neurons pool their spikes in one kernel. With "custom-int8" the weights of
    conv2 and fc1, which read spikes, are int8. Raises benchd.kernels.dispatch.Unavailable if they cannot run on the
    default device.
    """
    implementation = "torch" if kernels == "torch" else "auto"
    first, second = (PooledLif(decay, threshold, reset, implementation) for _ in range(2))
    if kernels == "custom-int8":
        require_integers(name, kernels)
    if kernels != "torch":
        # fails here, not during the run, if the kernel is missing or does not compile
        first(torch.zeros(1, 1, 1, 2, 2))
    model = OnePass(time_steps, encoding, p_scale, batch_norm, (first, second), kernels)
    # channels-last weights make convolutions and neurons run channels-last: a fifth faster on a CPU at batch 64
    return model.eval().to(memory_format=torch.channels_last)


def shape_from(state: Mapping[str, torch.Tensor], options: Mapping[str, Any]) -> dict[str, int]:
    """Return no arguments for `build`; raise WeightsError unless checkpoint and net agree on having batch norm."""
    has_norms = "bn1.weight" in state
    if has_norms != options["batch_norm"]:
        norms = "has batch norms" if has_norms else "has no batch norms"
        raise WeightsError(f"it {norms}; pass --option batch_norm={str(has_norms).lower()}")
    return {}
