"""Whole models as other libraries and papers compute them, with our models' weights.

Each takes our plain model, already on its device, and returns a module with the same inputs and outputs. Missing is
raised, with the reason, if a library is not installed or does not run on the device.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from types import SimpleNamespace
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from benchd.kernels.add_rms_norm import add_rms_norm
from benchd.models.snn_onepass import OnePass, PooledLif
from benchd.models.stbif import StBif
from benchd.models.vim import Mixer, Vim
from benchmarks.peers import Missing, needs_cuda, required, spikingjelly

_STATES = 16


class OfficialVim(nn.Module):
    """Vim with mamba-ssm and causal-conv1d: one fused norm per layer, and separate directions, the second one flipped.

    `scan`, `convolve` and `norm` are their selective_scan_fn, causal_conv1d_fn and rms_norm_fn. As in the official code
    (hustvl/Vim, mamba_simple.py), channels are outermost in memory from the in projection on, so that only B, C and the
    flipped second direction are copied.
    """

    def __init__(
        self, model: nn.Module, scan: Callable[..., Any], convolve: Callable[..., Any], norm: Callable[..., Any]
    ) -> None:
        super().__init__()
        self.model = cast("Vim", model)
        self._scan, self._convolve = scan, convolve
        self._norm = partial(norm, residual_in_fp32=True, eps=1e-5)

    def forward(self, images: Tensor) -> Tensor:
        """Return the logits of normalised images."""
        model, residual = self.model, None
        hidden = model._tokens(images)
        for block in model.blocks():
            normed, residual = self._norm(hidden, block.norm.weight, None, residual=residual, prenorm=True)
            hidden = self._mixed(normed, block.mixer)
        normed = self._norm(hidden, model.norm_f.weight, None, residual=residual, prenorm=False)
        return model.head(normed[:, model.class_index])

    def _mixed(self, x: Tensor, mixer: Mixer) -> Tensor:
        xz = (mixer.in_proj.weight @ x.flatten(0, 1).mT).unflatten(1, x.shape[:2]).transpose(0, 1)
        forth = self._direction(xz, mixer.conv1d, mixer.x_proj, mixer.dt_proj, mixer.A_log, mixer.D)
        back = self._direction(xz.flip(-1), mixer.conv1d_b, mixer.x_proj_b, mixer.dt_proj_b, mixer.A_b_log, mixer.D_b)
        return mixer.out_proj((forth + back.flip(-1)).transpose(1, 2) / 2)

    def _direction(
        self, xz: Tensor, conv: nn.Conv1d, x_proj: nn.Linear, dt_proj: nn.Linear, log: Tensor, D: Tensor
    ) -> Tensor:
        """Return the gated scan (B, E, L) of x and z, the halves of xz (B, 2 E, L)."""
        x, z = xz.chunk(2, dim=1)
        u = self._convolve(x, conv.weight.squeeze(1), conv.bias, activation="silu")
        low, B, C = x_proj(u.transpose(1, 2).flatten(0, 1)).split([dt_proj.in_features, _STATES, _STATES], dim=-1)
        delta = (dt_proj.weight @ low.mT).unflatten(1, (len(u), -1)).transpose(0, 1)
        B, C = (tensor.unflatten(0, (len(u), -1)).transpose(1, 2).contiguous() for tensor in (B, C))
        return self._scan(u, delta, -log.float().exp(), B, C, D.float(), z, dt_proj.bias.float(), True)


def official_vim(model: nn.Module) -> OfficialVim:
    """Return Vim as its authors run it; raise Missing without a GPU or their packages."""
    needs_cuda(cast("Vim", model).cls_token)
    scan = required("mamba_ssm.ops.selective_scan_interface").selective_scan_fn
    norm = required("mamba_ssm.ops.triton.layer_norm").rms_norm_fn
    return OfficialVim(model, scan, required("causal_conv1d").causal_conv1d_fn, norm)


def mambapy_vim(scan: str, model: nn.Module) -> OfficialVim:
    """Return Vim with a scan of mambapy's MambaBlock, else in plain PyTorch; raise Missing without the package."""
    return OfficialVim(model, partial(_mambapy, getattr(required("mambapy.mamba").MambaBlock, scan)), _convolved, _norm)


def _mambapy(
    scan: Callable[..., Tensor],
    u: Tensor,
    delta: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor,
    z: Tensor,
    bias: Tensor,
    softplus: bool,
) -> Tensor:
    """Return the gated scan (B, E, L), computed by a method that takes (B, L, ...) and reads its block's sizes."""
    u, delta, B, C, z = (tensor.transpose(1, 2) for tensor in (u, delta, B, C, z))
    block = SimpleNamespace(config=SimpleNamespace(d_inner=A.shape[0], d_state=A.shape[1]))
    y = scan(block, u, functional.softplus(delta + bias) if softplus else delta, A, B, C, D)
    return (y * functional.silu(z)).transpose(1, 2)


def _convolved(x: Tensor, weight: Tensor, bias: Tensor, activation: str) -> Tensor:
    padded = functional.pad(x, (weight.shape[1] - 1, 0))
    convolved = functional.conv1d(padded, weight[:, None], bias, groups=len(weight))
    return getattr(functional, activation)(convolved)


def _norm(
    x: Tensor, weight: Tensor, bias: None, *, residual: Tensor | None, prenorm: bool, residual_in_fp32: bool, eps: float
) -> Any:
    results = add_rms_norm(x, residual, weight, eps=eps, implementation="torch")
    return results if prenorm else results[0]


class SpikingJellyOnePass(nn.Module):
    """OnePass with spikingjelly's multi-step LIF neurons."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = _repeating(model)
        self._lif = spikingjelly("lif_multi_step")

    def forward(self, images: Tensor) -> Tensor:
        """Return the logits for images in [0, 1]; each image's current is computed once."""
        steps = self.model.time_steps
        pooled = self._fired(self.model.conv1(images).expand(steps, -1, -1, -1, -1), self.model.lif1)
        current = self.model.conv2(pooled).unflatten(0, (steps, -1))
        return _head(self.model, self._fired(current, self.model.lif2))

    def _fired(self, current: Tensor, neurons: PooledLif) -> Tensor:
        """Return the pooled spikes (T B, C, H, W) of `current` (T, B, C, H, W)."""
        v = torch.zeros_like(current[0], dtype=torch.float32)
        tau = 1 / (1 - neurons.decay)
        spikes, _, _ = self._lif(current, v, tau, decay_input=False, v_threshold=neurons.threshold)
        return functional.avg_pool2d(spikes.flatten(0, 1), 2)


class _SpikingJellyStBif(nn.Module):
    """spikingjelly's SpikeZIP neurons in place of one of our layers, starting from their initial state."""

    def __init__(self, ours: StBif) -> None:
        super().__init__()
        self.scale, self._fire = ours.scale, spikingjelly("stbif_multi_step")
        self._bounds = [float(ours.pos_max), float(ours.neg_min)]

    def forward(self, current: Tensor) -> Tensor:
        """Return scale times the codes for `current` (T, B, ...)."""
        q = torch.full_like(current[0], 0.5, dtype=torch.float32)
        bounds = (q.new_tensor(bound) for bound in self._bounds)
        return self._fire(current, q, torch.zeros_like(q), self.scale.detach().to(q.dtype), *bounds)[0]


def spikingjelly_stbif_net(model: nn.Module) -> nn.Module:
    """Return the converted net with spikingjelly's neurons; raise Missing without the package."""
    for name, module in list(model.named_modules()):
        if isinstance(module, StBif):
            model.set_submodule(name, _SpikingJellyStBif(module))
    return model


class SteppedOnePass(nn.Module):
    """OnePass as it is usually written: layer by layer at each time step, with five operations per neuron."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = _repeating(model)

    def forward(self, images: Tensor) -> Tensor:
        """Return the logits for images in [0, 1]."""
        model = self.model
        v1 = v2 = torch.zeros((), device=images.device)
        logits = []
        for _ in range(model.time_steps):
            spikes, v1 = _fire(model.conv1(images), v1, model.lif1)
            spikes, v2 = _fire(model.conv2(functional.avg_pool2d(spikes, 2)), v2, model.lif2)
            logits.append(model.fc2(model.fc1(functional.avg_pool2d(spikes, 2).flatten(1)).relu()))
        return torch.stack(logits).mean(0)


def _repeating(model: nn.Module) -> OnePass:
    one_pass = cast("OnePass", model)
    if one_pass.encoding != "repeat" or one_pass.batch_norm or one_pass.lif1.reset != "zero":
        raise Missing("written for the catalog's defaults: encoding repeat, no batch norm, reset to zero")
    return one_pass


def _head(model: OnePass, pooled: Tensor) -> Tensor:
    steps: Tensor = model.fc2(model.fc1(pooled.flatten(1)).relu())
    return steps.unflatten(0, (model.time_steps, -1)).mean(0)


def _fire(current: Tensor, v: Tensor, neurons: PooledLif) -> tuple[Tensor, Tensor]:
    v = neurons.decay * v + current
    spikes = (v >= neurons.threshold).to(v.dtype)
    return spikes, torch.where(spikes.bool(), torch.zeros_like(v), v)


Build = Callable[[nn.Module], nn.Module]
_VIM: Mapping[str, Build] = {
    "mamba-ssm + causal-conv1d": official_vim,
    "mambapy, sequential": partial(mambapy_vim, "selective_scan_seq"),
    "mambapy, pscan": partial(mambapy_vim, "selective_scan"),
}
PEERS: Mapping[str, Mapping[str, Build]] = {
    "vim_tiny": _VIM,
    "vim_small": _VIM,
    "vim_base": _VIM,
    "snn_onepass": {"spikingjelly": SpikingJellyOnePass, "step by step": SteppedOnePass},
    "snn_stbif_resnet18": {"spikingjelly": spikingjelly_stbif_net},
}
