"""Vision Mamba (Vim): a bidirectional selective scan over image patches, class token in the middle.

    tokens = patches of the image, row by row, the class token at index patches // 2, plus pos_embed
    for each block:  residual += hidden;  hidden = mixer(rms_norm(residual))
    logits = head(rms_norm(residual + hidden) at the class token)

B images, L tokens, E = 2 dim inner channels, N = 16 states, R = ceil(dim / 16). Parameter names and shapes are those of
the official checkpoints (hustvl/Vim, `..._with_midclstok_div2`; Zhu et al., ICML 2024), which load strictly. What the
official code computes is kept, how is not, and each of these is exact: activations stay (B, L, E) and nothing is
flipped; both directions share one gate, and halving their sum is halving C and D, which it is linear in; the last block
computes what its class token can see.
"""

import math
from collections.abc import Mapping
from typing import Any, Literal, NamedTuple, cast

import torch
from torch import nn
from torch.nn import functional

from benchd.kernels.causal_conv1d import causal_conv1d
from benchd.kernels.selective_scan import selective_scan_pair

DIMS = {"vim_tiny": 192, "vim_small": 384, "vim_base": 768}
DEPTH = 24
_STATES, _WIDTH, _EXPAND = 16, 4, 2
_IMPLEMENTATIONS = {"torch": "torch", "custom": "auto"}


class RmsNorm(nn.Module):
    """x / sqrt(mean(x^2) + 1e-5) * weight over the last dimension: statistics in the dtype of x, result in weight's."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the normalised x (..., dim), x being at least float32."""
        return functional.rms_norm(x, x.shape[-1:], self.weight.to(x.dtype), 1e-5).to(self.weight.dtype)


class _Directions(NamedTuple):
    """What the scan reads, made of the parameters of both directions, forward first."""

    x_proj: torch.Tensor  # (2, E, R + 2 N), the columns of C halved
    dt_proj: torch.Tensor  # (2, R, E)
    dt_bias: torch.Tensor  # (2, E)
    A: torch.Tensor  # (2, E, N) = -exp(A_log), at least float32
    D: torch.Tensor  # (2, E), halved


class Mixer(nn.Module):
    """One bidirectional Mamba layer, (B, L, dim) to (B, L, dim); `_b` marks the parameters of the backward scan."""

    def __init__(self, dim: int, implementation: str) -> None:
        super().__init__()
        inner, self.rank, self.implementation = _EXPAND * dim, math.ceil(dim / 16), implementation
        self.in_proj = nn.Linear(dim, 2 * inner, bias=False)
        self.conv1d, self.conv1d_b = (nn.Conv1d(inner, inner, _WIDTH, groups=inner) for _ in range(2))
        self.x_proj, self.x_proj_b = (nn.Linear(inner, self.rank + 2 * _STATES, bias=False) for _ in range(2))
        self.dt_proj, self.dt_proj_b = (nn.Linear(self.rank, inner) for _ in range(2))
        self.A_log, self.A_b_log = (nn.Parameter(torch.empty(inner, _STATES)) for _ in range(2))
        self.D, self.D_b = (nn.Parameter(torch.ones(inner)) for _ in range(2))
        self.out_proj = nn.Linear(inner, dim, bias=False)
        self._kept: tuple[object, _Directions] | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the mixed tokens of x (B, L, dim)."""
        u, z = self.in_proj(x).chunk(2, dim=-1)
        y = self._scanned(u, u)
        mixed: torch.Tensor = self.out_proj((y[0] + y[1]) * functional.silu(z))
        return mixed

    def token(self, x: torch.Tensor, index: int) -> torch.Tensor:
        """Return what `forward` does at the token `index` < L / 2 alone, (B, dim); no scan goes on beyond it."""
        to_u, to_z = self.in_proj.weight.chunk(2)
        u = functional.linear(x, to_u)
        y = self._scanned(u[:, : u.shape[1] - index], u[:, index:])
        mixed: torch.Tensor = self.out_proj(
            (y[0, :, index] + y[1, :, 0]) * functional.silu(functional.linear(x[:, index], to_z))
        )
        return mixed

    def _scanned(self, u: torch.Tensor, u_b: torch.Tensor) -> torch.Tensor:
        """Return half of each direction's scan, (2, B, L, E), before the gate; u and u_b (B, L, E) leave in_proj."""
        weights = self._directions()
        u = torch.stack((self._convolved(u, self.conv1d), self._convolved(u_b, self.conv1d_b, reverse=True)))
        low = torch.bmm(u.flatten(1, 2), weights.x_proj)
        delta, B, C = low.split([self.rank, _STATES, _STATES], dim=-1)
        batch = u.shape[1:3]
        return selective_scan_pair(
            u,
            torch.bmm(delta, weights.dt_proj).unflatten(1, batch),
            weights.A,
            B.unflatten(1, batch),
            C.unflatten(1, batch),
            weights.D,
            weights.dt_bias,
            delta_softplus=True,
            implementation=self.implementation,
        )

    def _convolved(self, u: torch.Tensor, conv: nn.Conv1d, *, reverse: bool = False) -> torch.Tensor:
        return causal_conv1d(u, conv.weight.squeeze(1), conv.bias, reverse=reverse, implementation=self.implementation)

    def _directions(self) -> _Directions:
        """Return the scan's weights; without gradients, those of the last call while no parameter has changed."""
        if torch.is_grad_enabled() or torch.compiler.is_compiling() or self.A_log.is_inference():
            return self._derived()
        sources: tuple[torch.Tensor, ...] = (
            self.x_proj.weight,
            self.x_proj_b.weight,
            self.dt_proj.weight,
            self.dt_proj_b.weight,
        )
        sources += (self.dt_proj.bias, self.dt_proj_b.bias, self.A_log, self.A_b_log, self.D, self.D_b)
        key = [(source.data_ptr(), source._version, source.dtype, source.device) for source in sources]
        if self._kept is None or self._kept[0] != key:
            self._kept = key, self._derived()
        return self._kept[1]

    def _derived(self) -> _Directions:
        x_proj = torch.stack((self.x_proj.weight, self.x_proj_b.weight))
        x_proj = torch.cat((x_proj[:, :-_STATES], x_proj[:, -_STATES:] / 2), dim=1)
        logs = torch.stack((self.A_log, self.A_b_log))
        return _Directions(
            x_proj.mT,
            torch.stack((self.dt_proj.weight, self.dt_proj_b.weight)).mT,
            torch.stack((self.dt_proj.bias, self.dt_proj_b.bias)),
            -logs.to(torch.promote_types(logs.dtype, torch.float32)).exp(),
            torch.stack((self.D, self.D_b)) / 2,
        )


class Block(nn.Module):
    """The norm and the mixer of one layer, under the names of the checkpoints."""

    def __init__(self, dim: int, implementation: str) -> None:
        super().__init__()
        self.norm = RmsNorm(dim)
        self.mixer = Mixer(dim, implementation)


class PatchEmbedding(nn.Module):
    """Images (B, 3, H, W) to patches (B, rows * columns, dim), row by row."""

    def __init__(self, dim: int, patch_size: int, stride: int) -> None:
        super().__init__()
        self.proj = nn.Conv2d(3, dim, patch_size, stride)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Return the patches of the images."""
        patches: torch.Tensor = self.proj(images)
        return patches.flatten(2).transpose(1, 2)


class Vim(nn.Module):
    """The network; `build` makes the catalogued ones. Images (B, 3, image_size, image_size) to logits (B, classes).

    The residual stream and the statistics of the norms are float32 for half-precision weights. Raises ValueError for
    images of another shape or a patch larger than the image.
    """

    def __init__(
        self,
        dim: int,
        depth: int,
        *,
        patch_size: int = 16,
        stride: int = 16,
        num_classes: int = 1000,
        image_size: int = 224,
        implementation: str = "torch",
    ) -> None:
        super().__init__()
        if patch_size > image_size:
            raise ValueError(f"patch_size={patch_size} is larger than the image, {image_size} pixels")
        patches = ((image_size - patch_size) // stride + 1) ** 2
        self.input_shape = (3, image_size, image_size)
        self.class_index = patches // 2
        self.patch_embed = PatchEmbedding(dim, patch_size, stride)
        self.cls_token = nn.Parameter(torch.empty(1, 1, dim))
        self.pos_embed = nn.Parameter(torch.empty(1, patches + 1, dim))
        self.layers = nn.ModuleList(Block(dim, implementation) for _ in range(depth))
        self.norm_f = RmsNorm(dim)
        self.head = nn.Linear(dim, num_classes)
        _initialise(self)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Return the logits of normalised images."""
        if images.shape[1:] != self.input_shape:
            raise ValueError(f"images must be (batch, {str(self.input_shape)[1:]}, not {tuple(images.shape)}")
        tokens = self._tokens(images)
        residual = tokens.to(torch.promote_types(tokens.dtype, torch.float32))
        *blocks, last = self.blocks()
        for block in blocks:
            residual = residual + block.mixer(block.norm(residual))
        seen = residual[:, self.class_index] + last.mixer.token(last.norm(residual), self.class_index)
        logits: torch.Tensor = self.head(self.norm_f(seen))
        return logits

    def blocks(self) -> list[Block]:
        """Return the layers in forward order."""
        return cast("list[Block]", list(self.layers))

    def _tokens(self, images: torch.Tensor) -> torch.Tensor:
        patches = self.patch_embed(images)
        before, after = patches[:, : self.class_index], patches[:, self.class_index :]
        return torch.cat((before, self.cls_token.expand(images.shape[0], -1, -1), after), dim=1) + self.pos_embed


@torch.no_grad()
def _initialise(model: Vim) -> None:
    """Draw the published initial values: A = -(1..N), D = 1, and steps of a zero input log-uniform in [0.001, 0.1]."""
    for module in model.modules():
        if isinstance(module, nn.Linear):
            nn.init.trunc_normal_(module.weight, std=0.02)
            if module.bias is not None:
                nn.init.zeros_(module.bias)
    for embedding in (model.cls_token, model.pos_embed):
        nn.init.trunc_normal_(embedding, std=0.02)
    for block in model.blocks():
        _initialise_mixer(block.mixer, len(model.layers))


def _initialise_mixer(mixer: Mixer, depth: int) -> None:
    # one residual sum a layer: its variance would grow with the depth
    mixer.out_proj.weight /= math.sqrt(depth)
    for logs in (mixer.A_log, mixer.A_b_log):
        logs.copy_(torch.arange(1, _STATES + 1).log())
    for dt_proj in (mixer.dt_proj, mixer.dt_proj_b):
        nn.init.uniform_(dt_proj.weight, -(mixer.rank**-0.5), mixer.rank**-0.5)
        steps = torch.empty_like(dt_proj.bias).uniform_(math.log(1e-3), math.log(0.1)).exp()
        dt_proj.bias.copy_(steps + torch.log(-torch.expm1(-steps)))


def build(
    *,
    name: str,
    kernels: Literal["torch", "custom"],
    patch_size: int,
    stride: int,
    scan: Literal["serial", "two_level"],
    num_classes: int = 1000,
    image_size: int = 224,
) -> Vim:
    """Return vim_tiny, vim_small or vim_base in eval mode with random weights; the options are the catalog's.

    `scan` is a choice of the custom kernels on a GPU: plain PyTorch and C run their one best exact form for both.
    `kernels` "custom" is for inference. Raises ValueError for a patch larger than the image and
    benchd.kernels.dispatch.Unavailable where `kernels` "custom" cannot run on the default device.
    """
    implementation = _IMPLEMENTATIONS[kernels]
    _try(implementation)
    return Vim(
        DIMS[name],
        DEPTH,
        patch_size=patch_size,
        stride=stride,
        num_classes=num_classes,
        image_size=image_size,
        implementation=implementation,
    ).eval()


def _try(implementation: str) -> None:
    """Run both ops once on the default device: what cannot run is refused at build time, by name."""
    one = torch.zeros(2, 1, 1, 1)
    causal_conv1d(one[0], one[0, 0], implementation=implementation)
    selective_scan_pair(one, one, one[:, 0], one, one, implementation=implementation)


def shape_from(state: Mapping[str, torch.Tensor], options: Mapping[str, Any]) -> dict[str, int]:
    """Return the arguments of `build` that a checkpoint fixes: num_classes and image_size, where its keys say.

    The positions fix the patches a side; of the image sizes that give as many, 224 is preferred, then the smallest.
    """
    shape = {}
    head, positions = state.get("head.weight"), state.get("pos_embed")
    if head is not None and head.dim() == 2:
        shape["num_classes"] = len(head)
    if positions is not None and positions.dim() == 3 and positions.shape[1] > 1:
        patch_size, stride = options["patch_size"], options["stride"]
        side = math.isqrt(positions.shape[1] - 1)
        usual = (224 - patch_size) // stride + 1 == side
        shape["image_size"] = 224 if usual else (side - 1) * stride + patch_size
    return shape
