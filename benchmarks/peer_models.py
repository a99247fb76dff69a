"""Whole models as other people's libraries and papers compute them, with the weights of ours.

Each takes our plain model, built and on its device, and returns a module of the same inputs and outputs. A library that
is not there, or does not run on the device, raises Missing with the reason.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from benchd.models.snn_onepass import OnePass, PooledLif
from benchd.models.vim import Mixer, Vim
from benchmarks.peers import Missing, needs_cuda, required

_STATES = 16


class OfficialVim(nn.Module):
    """Vim on mamba-ssm and causal-conv1d: a fused norm a layer, each direction by itself, the second one flipped."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = cast("Vim", model)
        needs_cuda(self.model.cls_token)
        self._scan = required("mamba_ssm.ops.selective_scan_interface").selective_scan_fn
        self._norm = required("mamba_ssm.ops.triton.layer_norm").rms_norm_fn
        self._convolve = required("causal_conv1d").causal_conv1d_fn

    def forward(self, images: Tensor) -> Tensor:
        """Return the logits of normalised images."""
        model, residual = self.model, None
        hidden = model._tokens(images)
        for block in model.blocks():
            normed, residual = self._normed(hidden, residual, block.norm.weight)
            hidden = self._mixed(normed, block.mixer)
        normed, _ = self._normed(hidden, residual, model.norm_f.weight)
        logits: Tensor = model.head(normed[:, model.class_index])
        return logits

    def _normed(self, hidden: Tensor, residual: Tensor | None, weight: Tensor) -> tuple[Tensor, Tensor]:
        found = self._norm(hidden, weight, None, residual=residual, prenorm=True, residual_in_fp32=True, eps=1e-5)
        return cast("tuple[Tensor, Tensor]", found)

    def _mixed(self, x: Tensor, mixer: Mixer) -> Tensor:
        u, z = mixer.in_proj(x).transpose(1, 2).chunk(2, dim=1)
        forth = self._direction(u, z, mixer.conv1d, mixer.x_proj, mixer.dt_proj, mixer.A_log, mixer.D)
        flipped = (u.flip(-1), z.flip(-1))
        back = self._direction(*flipped, mixer.conv1d_b, mixer.x_proj_b, mixer.dt_proj_b, mixer.A_b_log, mixer.D_b)
        mixed: Tensor = mixer.out_proj(((forth + back.flip(-1)) / 2).transpose(1, 2))
        return mixed

    def _direction(
        self, u: Tensor, z: Tensor, conv: nn.Conv1d, x_proj: nn.Linear, dt_proj: nn.Linear, log: Tensor, D: Tensor
    ) -> Tensor:
        u = self._convolve(u.contiguous(), conv.weight.squeeze(1), conv.bias, activation="silu")
        low, B, C = x_proj(u.transpose(1, 2)).split([dt_proj.in_features, _STATES, _STATES], dim=-1)
        delta = (low @ dt_proj.weight.mT).transpose(1, 2).contiguous()
        B, C = (each.transpose(1, 2).contiguous() for each in (B, C))
        y: Tensor = self._scan(
            u, delta, -log.float().exp(), B, C, D.float(), z.contiguous(), dt_proj.bias.float(), True
        )
        return y


class SpikingJellyOnePass(nn.Module):
    """OnePass with spikingjelly's multi-step LIF neurons, on the back end that its version takes by itself."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = _repeating(model)
        neurons = required("spikingjelly.activation_based.neuron")
        self._reset = required("spikingjelly.activation_based.functional").reset_net
        tau = 1 / (1 - self.model.lif1.decay)
        self.neurons = nn.ModuleList(
            neurons.LIFNode(tau=tau, decay_input=False, v_reset=0.0, step_mode="m").to(self.model.fc2.weight.device)
            for _ in range(2)
        )

    def forward(self, images: Tensor) -> Tensor:
        """Return the logits of images in [0, 1]; the image's current is computed once."""
        self._reset(self)
        current = self.model.conv1(images).expand(self.model.time_steps, -1, -1, -1, -1).contiguous()
        pooled = functional.avg_pool2d(self.neurons[0](current).flatten(0, 1), 2)
        current = self.model.conv2(pooled).unflatten(0, (self.model.time_steps, -1))
        pooled = functional.avg_pool2d(self.neurons[1](current).flatten(0, 1), 2)
        return _head(self.model, pooled)


class SteppedOnePass(nn.Module):
    """OnePass as it is usually written: layer by layer at each time step, five operations a neuron."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = _repeating(model)

    def forward(self, images: Tensor) -> Tensor:
        """Return the logits of images in [0, 1]."""
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
    logits: Tensor = steps.unflatten(0, (model.time_steps, -1)).mean(0)
    return logits


def _fire(current: Tensor, v: Tensor, neurons: PooledLif) -> tuple[Tensor, Tensor]:
    v = neurons.decay * v + current
    spikes = (v >= neurons.threshold).to(v.dtype)
    return spikes, torch.where(spikes.bool(), torch.zeros_like(v), v)


Build = Callable[[nn.Module], nn.Module]
_VIM: Mapping[str, Build] = {"mamba-ssm + causal-conv1d": OfficialVim}
PEERS: Mapping[str, Mapping[str, Build]] = {
    "vim_tiny": _VIM,
    "vim_small": _VIM,
    "vim_base": _VIM,
    "snn_onepass": {"spikingjelly": SpikingJellyOnePass, "step by step": SteppedOnePass},
}


def of(model: str) -> Mapping[str, Build]:
    """Return the peers of a catalogued model by name."""
    return PEERS.get(model, {})
