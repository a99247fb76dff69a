"""Vision Mamba (Vim): a bidirectional selective scan over image patches, with the class token in the middle.

    tokens = patches of the image, row by row, the class token at index patches // 2, plus pos_embed
    for each block:  residual += hidden;  hidden = mixer(rms_norm(residual))
    logits = head(rms_norm(residual + hidden) at the class token)

B images, L tokens, E = 2 dim inner channels, N = 16 states, R = ceil(dim / 16). Parameter names and shapes are those of
the official checkpoints (hustvl/Vim, `..._with_midclstok_div2`; Zhu et al., ICML 2024), which load strictly. The result
is that of the official code, computed differently, where each change is exact: activations stay (B, L, E) and nothing
is flipped; both directions share a gate, and halving their sum is done by halving C and D, in which it is linear; the
last block computes only what its class token depends on. Without gradients, values derived from parameters are kept
between calls.
"""

import math
import re
from collections.abc import Callable, Mapping
from functools import partial
from itertools import count
from typing import Any, NamedTuple, TypeVar, cast
from weakref import WeakValueDictionary

import torch
from torch import nn
from torch.nn import functional

from benchd.kernels import plan
from benchd.kernels.add_rms_norm import add_rms_norm
from benchd.kernels.causal_conv1d import causal_conv1d_pair
from benchd.kernels.compiler import threads
from benchd.kernels.dispatch import Unavailable, chosen
from benchd.kernels.op import is_exported, is_hooked, is_observed, is_watched, op
from benchd.kernels.packed_linear import PackedLinear
from benchd.kernels.selective_scan import Form, bidirectional_scan, delta_projection, selective_scan_pair
from benchd.kernels.vim_layer import in_conv, out_norm, steps, takes
from benchd.models.catalog import NO_INT8, Kernels
from benchd.models.vim_layers import EPS, STATES, Layers, Weights, split_columns
from benchd.models.weights import WeightsError

_WIDTH, _EXPAND = 4, 2
_IMAGENET_CLASSES = 1000  # the option's default, which a checkpoint's number replaces
_IN_C = ("auto", "native")  # implementations that use our C kernels on a CPU
_TOGETHER = 800  # maximum number of tokens processed together, which stay in a cache; a single image may have more
_PLAIN = {nn.Linear, nn.Conv1d}
_PACKED = (torch.float32, torch.bfloat16)  # dtypes of the packed layers' inputs and outputs
# models by the number with which compiled code refers to them
_MODELS: "WeakValueDictionary[int, Vim]" = WeakValueDictionary()
_NUMBERS = count()
Result = TypeVar("Result")


class RmsNorm(nn.Module):
    """x / sqrt(mean(x^2) + 1e-5) * weight for x = residual + hidden, at least float32; result in the weight's dtype."""

    def __init__(self, dim: int, implementation: str) -> None:
        super().__init__()
        self.implementation = implementation
        self.weight = nn.Parameter(torch.ones(dim))

    def forward(self, hidden: torch.Tensor, residual: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the normalised sum (..., dim) and the sum, the next residual."""
        return add_rms_norm(hidden, residual, self.weight, eps=EPS, implementation=self.implementation)


class Mixer(nn.Module):
    """One bidirectional Mamba layer, (B, L, dim) to (B, L, dim); `_b` marks the parameters of the backward scan."""

    def __init__(self, dim: int, implementation: str, scan: Form) -> None:
        super().__init__()
        inner, self.rank, self.implementation, self.scan = _EXPAND * dim, math.ceil(dim / 16), implementation, scan
        self.in_proj = nn.Linear(dim, 2 * inner, bias=False)
        self.conv1d, self.conv1d_b = (nn.Conv1d(inner, inner, _WIDTH, groups=inner) for _ in range(2))
        self.x_proj, self.x_proj_b = (nn.Linear(inner, self.rank + 2 * STATES, bias=False) for _ in range(2))
        self.dt_proj, self.dt_proj_b = (nn.Linear(self.rank, inner) for _ in range(2))
        self.A_log, self.A_b_log = (nn.Parameter(torch.empty(inner, STATES)) for _ in range(2))
        self.D, self.D_b = (nn.Parameter(torch.ones(inner)) for _ in range(2))
        self.out_proj = nn.Linear(inner, dim, bias=False)

    def forward(self, x: torch.Tensor, weights: Weights) -> torch.Tensor:
        """Return the mixed tokens for x (B, L, dim), with the layer's own weights."""
        u, z = weights.in_proj(x).chunk(2, dim=-1)
        u = self._convolved(u, weights)
        low, B, C = self._projected(u, weights)
        y = bidirectional_scan(
            u,
            low,
            weights.dt_proj,
            weights.dt_bias,
            weights.A,
            B,
            C,
            weights.D,
            z,
            form=self.scan,
            implementation=self.implementation,
        )
        return weights.out_proj(y)

    def token(self, x: torch.Tensor, weights: Weights, index: int) -> torch.Tensor:
        """Return the result of `forward` only for the token `index` < L / 2, (B, dim), where both scans end."""
        to_u, to_z = self.in_proj.weight.chunk(2)
        u = self._convolved(functional.linear(x, to_u), weights)
        u = torch.stack((u[0, :, : u.shape[2] - index], u[1, :, index:]))
        low, B, C = self._projected(u, weights)
        delta = delta_projection(low, weights.dt_proj, weights.dt_bias, implementation=self.implementation)
        y = selective_scan_pair(
            u, delta, weights.A, B, C, weights.D, form=self.scan, implementation=self.implementation
        )
        gate = functional.silu(functional.linear(x[:, index], to_z))
        return self.out_proj((y[0, :, index] + y[1, :, 0]) * gate)

    def fused(
        self, normed: torch.Tensor, residual: torch.Tensor, weights: Weights, norm: torch.Tensor, index: int | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the sum of mixed tokens and residual, normalised with the next norm's weight, and the sum itself.

        For all tokens (B, L, dim) or, with an `index` < L / 2, only that token (B, 1, dim). Four launches on a GPU.
        """
        how, x_proj = self.implementation, cast("partial[torch.Tensor]", weights.x_proj).keywords["mat2"]
        in_proj, out_proj = (cast("nn.Linear", product).weight for product in (weights.in_proj, weights.out_proj))
        u, z = in_conv(normed, in_proj, weights.conv, weights.conv_bias, implementation=how)
        delta, B, C = steps(u, x_proj, weights.dt_proj, weights.dt_bias, STATES, implementation=how)
        if index is not None:
            u, delta, B, C = (_seen(tensor, index) for tensor in (u, delta, B, C))
        y = selective_scan_pair(u, delta, weights.A, B, C, weights.D, form=self.scan, implementation=how)
        if index is not None:  # the last token of each scan
            between, *strides = y.stride()
            y = y.as_strided((2, len(z), 1, z.shape[2]), (between - index * strides[1], *strides), index * strides[1])
            z, residual = z[:, index : index + 1], residual[:, index : index + 1]
        return out_norm(y, z, out_proj, residual, norm, eps=EPS, implementation=how)

    def _convolved(self, u: torch.Tensor, weights: Weights) -> torch.Tensor:
        return causal_conv1d_pair(u, weights.conv, weights.conv_bias, implementation=self.implementation)

    def _projected(self, u: torch.Tensor, weights: Weights) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return low (2, B, L, R), B and C (2, B, L, N) for u (2, B, L, E)."""
        return split_columns(weights.x_proj(u.flatten(1, 2)).unflatten(1, u.shape[1:3]), self.rank)

    def weights(self) -> Weights:
        """Return the weights used in the computation, differentiable with respect to the parameters."""
        x_proj = torch.stack((self.x_proj.weight, self.x_proj_b.weight)).mT
        low, B, C = x_proj.split([self.rank, STATES, STATES], dim=-1)
        logs = torch.stack((self.A_log, self.A_b_log))
        return Weights(
            self.in_proj,
            torch.stack((self.conv1d.weight, self.conv1d_b.weight)).squeeze(2),
            torch.stack(cast("tuple[torch.Tensor, ...]", (self.conv1d.bias, self.conv1d_b.bias))),
            partial(torch.bmm, mat2=functional.pad(torch.cat((B, C / 2, low), dim=-1), (0, -self.rank % 16))),
            torch.stack((self.dt_proj.weight, self.dt_proj_b.weight)),
            torch.stack((self.dt_proj.bias, self.dt_proj_b.bias)),
            -logs.to(torch.promote_types(logs.dtype, torch.float32)).exp(),
            torch.stack((self.D, self.D_b)) / 2,
            self.out_proj,
        )

    def packed(self, weights: Weights) -> Weights:
        """Return the weights for our CPU kernels: packed for products, float32 otherwise."""
        weight = self.in_proj.weight
        if self.implementation not in _IN_C or weight.device.type != "cpu" or weight.dtype not in _PACKED:
            return weights
        small = {name: getattr(weights, name).float() for name in ("conv", "conv_bias", "dt_bias", "D")}
        # a vector of the scan is one column of several channels
        small |= {name: getattr(weights, name).float().mT.contiguous().mT for name in ("dt_proj", "A")}
        in_proj, out_proj = PackedLinear(self.in_proj.weight), PackedLinear(self.out_proj.weight)
        x_proj = PackedLinear(cast("partial[torch.Tensor]", weights.x_proj).keywords["mat2"].mT)
        return weights._replace(**small, in_proj=in_proj, x_proj=x_proj, out_proj=out_proj)


class Block(nn.Module):
    """The norm and the mixer of one layer, under the names of the checkpoints."""

    def __init__(self, dim: int, implementation: str, scan: Form) -> None:
        super().__init__()
        self.norm = RmsNorm(dim, implementation)
        self.mixer = Mixer(dim, implementation, scan)


class PatchEmbedding(nn.Module):
    """Images (B, 3, H, W) to patches (B, rows * columns, dim), row by row.

    With our GPU kernels, non-overlapping patches are one matrix product: cuDNN's convolution takes 6 % of Vim tiny's
    time for an image in half precision on an H100.
    """

    def __init__(self, dim: int, patch_size: int, stride: int, implementation: str) -> None:
        super().__init__()
        self.proj = nn.Conv2d(3, dim, patch_size, stride)
        self._is_custom = implementation != "torch"

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Return the images' patches."""
        if self._is_custom and images.device.type == "cuda" and self._is_product():
            return self.product(images)
        return self.proj(images).flatten(2).transpose(1, 2)

    def _is_product(self) -> bool:
        """Return whether the patches do not overlap and no hook observes the layer."""
        layer = self.proj
        plain = type(layer) is nn.Conv2d and layer.groups == 1 and not is_hooked(layer)
        return plain and layer.kernel_size == layer.stride and (layer.padding, layer.dilation) == ((0, 0), (1, 1))

    def product(self, images: torch.Tensor) -> torch.Tensor:
        """Return the patches, which must not overlap, by a matrix product."""
        height, width = self.proj.stride
        rows, columns = images.shape[2] // height, images.shape[3] // width
        cropped = images[:, :, : rows * height, : columns * width]
        pixels = cropped.unflatten(3, (columns, width)).unflatten(2, (rows, height)).permute(0, 2, 4, 1, 3, 5)
        return functional.linear(pixels.flatten(3).flatten(1, 2), self.proj.weight.flatten(1), self.proj.bias)


class Vim(nn.Module):
    """The network; `build` creates a catalogued one. Images (B, 3, image_size, image_size) to logits (B, classes).

    The residual stream and the statistics of the norms are float32 even with half-precision weights. Raises ValueError
    for images of a different shape or a patch larger than the image.
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
        scan: Form = "serial",
    ) -> None:
        super().__init__()
        if patch_size > image_size:
            raise ValueError(f"patch_size={patch_size} is larger than the image, {image_size} pixels")
        patches = _side(patch_size, stride, image_size) ** 2
        self.input_shape, self.num_classes = (3, image_size, image_size), num_classes
        self.class_index = patches // 2
        self.patch_embed = PatchEmbedding(dim, patch_size, stride, implementation)
        self.cls_token = nn.Parameter(torch.empty(1, 1, dim))
        self.pos_embed = nn.Parameter(torch.empty(1, patches + 1, dim))
        self.layers = nn.ModuleList(Block(dim, implementation, scan) for _ in range(depth))
        self.norm_f = RmsNorm(dim, implementation)
        self.head = nn.Linear(dim, num_classes)
        self._kept: _DerivedValues | None = None
        self._frozen: list[Weights] | None = None
        self._enrol()
        _initialise(self)

    def _enrol(self) -> None:
        self._number = next(_NUMBERS)
        _MODELS[self._number] = self

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Return the logits of normalised images."""
        if images.shape[1:] != self.input_shape:
            raise ValueError(f"images must be (batch, {str(self.input_shape)[1:]}, not {tuple(images.shape)}")
        tokens = self._tokens(images)
        if self._is_one_op(tokens):
            given = [parameter for block in self.blocks()[:-1] for parameter in block.parameters()]
            hidden, residual = _layers_op["native"](tokens, given, self._number)
            return self._logits(hidden, residual, self.blocks()[-1].mixer.weights())
        weights = self._weights()
        if (derived := self._kept) is not None and self._is_fused(tokens, derived) and derived.weights is weights:
            return self.head(self._fused(tokens, derived)[:, 0])
        if (derived := self._callable(tokens, weights)) is None:
            return self._logits(*self._through(tokens, weights), weights[-1])
        logits = self._called(tokens, derived, partial(self._logits, its=derived.weights[-1]))
        return logits[0] if len(logits) == 1 else torch.cat(logits)

    def _is_one_op(self, tokens: torch.Tensor) -> bool:
        """Return whether this is compiled code on a CPU, where all layers except the last are one op of our kernels.

        Separate ops would lack packed weights and shared memory, and take 1.5 times as long.
        """
        if not torch.compiler.is_compiling() or is_exported() or self._frozen is not None or len(self.layers) < 2:
            return False
        if torch.is_grad_enabled() or torch.is_autocast_enabled("cpu") or tokens.device.type != "cpu":
            return False
        return self.blocks()[0].mixer.implementation in _IN_C and tokens.dtype in _PACKED

    def layered(self, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return hidden tokens and residual (B, L, dim) after all layers except the last, for compiled code."""
        weights = self._weights()
        if (derived := self._callable(tokens, weights)) is None:
            hidden, residual = self._through(tokens, weights)
            return hidden.to(tokens.dtype), cast("torch.Tensor", residual)
        copies = self._called(tokens, derived, lambda hidden, residual: (hidden.clone(), residual.clone()))
        hiddens, residuals = zip(*copies, strict=True)
        return (hiddens[0], residuals[0]) if len(hiddens) == 1 else (torch.cat(hiddens), torch.cat(residuals))

    def given(self, tokens: torch.Tensor, parameters: list[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the result of `layered` with `parameters` in place of the layers' own."""
        blocks = enumerate(self.blocks()[:-1])
        names = [f"model.layers.{i}.{name}" for i, block in blocks for name, _ in block.named_parameters()]
        values = dict(zip(names, parameters, strict=True))
        return torch.func.functional_call(_AllButLast(self), values, (tokens,))

    def _called(
        self, tokens: torch.Tensor, derived: "_DerivedValues", finish: Callable[[torch.Tensor, torch.Tensor], Result]
    ) -> list[Result]:
        """Return the result of `finish` on hidden tokens and residual after `Layers`, for each part of the batch."""
        results = []
        for part in tokens.tensor_split(-(-len(tokens) // max(1, _TOGETHER // tokens.shape[1]))):
            key = part.shape, threads()
            layers = derived.layers.pop(key, None) or self._prepared(part, derived.weights)
            results.append(finish(*layers(part)))
            derived.layers[key] = layers
        return results

    def _through(self, hidden: torch.Tensor, weights: list[Weights]) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return the hidden tokens after all layers except the last, and the residual, if any."""
        residual = None
        for block, its in zip(self.blocks()[:-1], weights[:-1], strict=True):
            normed, residual = block.norm(hidden, residual)
            hidden = block.mixer(normed, its)
        return hidden, residual

    def _is_fused(self, tokens: torch.Tensor, derived: "_DerivedValues") -> bool:
        """Return whether each layer runs as four launches on a GPU: in half precision, with no hooks in between."""
        if not tokens.numel() or torch.compiler.is_compiling() or is_exported() or torch.is_autocast_enabled("cuda"):
            return False
        plain = type(self.norm_f) is RmsNorm and not is_hooked(*derived.modules, self.norm_f)
        return tokens.dtype == derived.fused_dtype and plain

    def _fused(self, tokens: torch.Tensor, derived: "_DerivedValues") -> torch.Tensor:
        """Return the normalised class token (B, 1, dim) after all layers; launches are prepared once per input size."""
        given = _Tokens(tokens.contiguous())
        if is_observed():
            return self._through_fused(given, derived.weights)
        key = tuple(plan.signature((*given, self.norm_f.weight)))
        if (planned := derived.plans.get(key)) is None:
            function = partial(self._through_fused, weights=derived.weights)
            constants = [*self.parameters(), *(tensor for its in derived.weights for tensor in _tensors(its))]
            with torch.inference_mode(False), torch.no_grad():
                planned = derived.plans[key] = plan.planned(function, given, constants)
        return planned(given)

    def _through_fused(self, given: "_Tokens", weights: list[Weights]) -> torch.Tensor:
        blocks = self.blocks()
        normed, residual = blocks[0].norm(given.tokens, None)
        following = [*(block.norm.weight for block in blocks[1:]), self.norm_f.weight]
        for block, its, norm in zip(blocks, weights, following, strict=True):
            index = self.class_index if block is blocks[-1] else None
            normed, residual = block.mixer.fused(normed, residual, its, norm, index)
        return normed

    def _logits(self, hidden: torch.Tensor, residual: torch.Tensor | None, its: Weights) -> torch.Tensor:
        last = self.blocks()[-1]
        normed, residual = last.norm(hidden, residual)
        hidden = last.mixer.token(normed, its, self.class_index)
        normed, _ = self.norm_f(hidden, residual[:, self.class_index])
        return self.head(normed)

    def _callable(self, tokens: torch.Tensor, weights: list[Weights]) -> "_DerivedValues | None":
        """Return the kept values if the layers' C kernels may be called directly, without ops, else None."""
        derived = None if torch.compiler.is_compiling() or is_exported() else self._kept
        if derived is None or derived.weights is not weights or derived.dtype != tokens.dtype or not tokens.numel():
            return None
        return None if torch.is_autocast_enabled("cpu") or is_watched(*derived.modules) else derived

    def _prepared(self, tokens: torch.Tensor, weights: list[Weights]) -> Layers:
        with torch.inference_mode(False), torch.no_grad():  # ordinary tensors: they may outlive inference mode
            norms = [block.norm.weight.detach() for block in self.blocks()[:-1]]
            return Layers(norms, weights[:-1], tokens)

    def blocks(self) -> list[Block]:
        """Return the layers in forward order."""
        return cast("list[Block]", list(self.layers))

    def __getstate__(self) -> dict[str, Any]:
        # a copy derives its own values, because oneDNN's layouts cannot be copied
        return self.__dict__ | {"_kept": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore a copy, with its own number for compiled code."""
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self._enrol()

    def freeze(self) -> None:
        """Derive the layers' weights once and for all, for tracing; later changes have no effect."""
        with torch.no_grad():
            self._frozen = [block.mixer.weights() for block in self.blocks()]

    def _weights(self) -> list[Weights]:
        """Return the layers' weights; without gradients, reuse those from the last call if nothing has changed."""
        if self._frozen is not None:
            return self._frozen
        blocks = self.blocks()
        if torch.is_grad_enabled() or torch.compiler.is_compiling():
            return [block.mixer.weights() for block in blocks]
        if self._kept is None or not self._kept.is_current(blocks):
            self._kept = self._derived(blocks)
        if self._kept is None or is_hooked(*self._kept.products):  # packed products are not modules
            return [block.mixer.weights() for block in blocks]
        return self._kept.weights

    def _derived(self, blocks: list[Block]) -> "_DerivedValues | None":
        """Return the values derived from the current parameters, or None if changes could not be detected."""
        sources = [p for block in blocks for p in _parameters(block)]
        # inference tensors have no version, and parametrised or replaced layers hold their parameters elsewhere
        if any(p.is_inference() for p in sources) or not all(map(_is_plain, blocks)):
            return None
        # ordinary tensors even in inference mode, which they may outlive
        with torch.inference_mode(False), torch.no_grad():
            detached = [p.detach() for p in sources]
            weights = [block.mixer.packed(block.mixer.weights()) for block in blocks]
            modules = tuple(self.layers.modules())
            products = tuple(layer for block in blocks for layer in (block.mixer.in_proj, block.mixer.out_proj))
            members = [(owner, name, value) for module in modules for owner in (module._modules, module._parameters)
                       for name, value in owner.items()]  # fmt: skip
            dtypes = _callable_dtype(detached, weights), self._fused_dtype(detached)
            return _DerivedValues(
                members, sources, _versions(sources), detached, weights, modules, products, *dtypes, {}, {}
            )

    def _fused_dtype(self, parameters: list[torch.Tensor]) -> torch.dtype | None:
        """Return the common dtype of all parameters if the kernels of `vim_layer` support it here, else None."""
        implementation = self.blocks()[0].mixer.implementation
        on_gpu = implementation != "torch" and chosen(implementation, parameters[0].device) == "triton"
        dtype, *others = {p.dtype for p in (*parameters, self.norm_f.weight)}
        fits = on_gpu and not others and takes(dtype, len(self.norm_f.weight), parameters[0].device)
        return dtype if fits else None

    def _tokens(self, images: torch.Tensor) -> torch.Tensor:
        patches = self.patch_embed(images)
        before, after = patches[:, : self.class_index], patches[:, self.class_index :]
        return torch.cat((before, self.cls_token.expand(images.shape[0], -1, -1), after), dim=1) + self.pos_embed


class _AllButLast(nn.Module):
    """The layers of a model except the last, callable on their own."""

    def __init__(self, model: Vim) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.model.layered(tokens)


class _Tokens(NamedTuple):
    tokens: torch.Tensor


class _LayersInput(NamedTuple):
    tokens: torch.Tensor
    parameters: list[torch.Tensor]
    model: int


@op("vim_layers")
def _layers_op(given: _LayersInput) -> tuple[torch.Tensor, torch.Tensor]:
    new, shape = given.tokens.new_empty, given.tokens.shape
    return new(shape), new(shape, dtype=torch.float32)


@_layers_op.computes("native")
def _layered(given: _LayersInput) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute the layers, with the model's kept values if compiled code passes its own parameters."""
    tokens, parameters, model = given
    network = _MODELS[model]
    own = [parameter for block in network.blocks()[:-1] for parameter in _parameters(block)]
    is_own = len(own) == len(parameters) and all(
        ours is theirs or ours.data_ptr() == theirs.data_ptr() for ours, theirs in zip(own, parameters, strict=True)
    )
    return network.layered(tokens) if is_own else network.given(tokens, parameters)


class _DerivedValues(NamedTuple):
    """Values derived from parameters, valid while these do not change."""

    # all modules and parameters of the layers, and where they are stored
    members: list[tuple[dict[str, Any], str, Any]]
    sources: list[torch.Tensor]
    versions: list[tuple[int, int]]
    held: list[torch.Tensor]  # keeps the parameters' memory, so that no other tensor gets their addresses
    weights: list[Weights]
    modules: tuple[nn.Module, ...]  # the layers' modules
    products: tuple[nn.Module, ...]  # the in_proj and out_proj layers, which run unpacked if nothing is packed
    dtype: torch.dtype | None  # the dtype of tokens that `Layers` support, if any
    fused_dtype: torch.dtype | None  # the dtype of tokens that the fused GPU launches support, if any
    # plans of the fused launches, by tokens and last norm
    plans: dict[tuple[Any, ...], Callable[["_Tokens"], torch.Tensor]]
    # prepared layers by token shape and number of threads; removed while in use
    layers: dict[tuple[torch.Size, int], Layers]

    def is_current(self, blocks: list[Block]) -> bool:
        """Return whether the layers still have the same, unchanged parameters."""
        same = len(blocks) == len(self.weights) and all(owner.get(name) is value for owner, name, value in self.members)
        return same and _versions(self.sources) == self.versions


def _tensors(weights: Weights) -> list[torch.Tensor]:
    """Return the tensors derived from parameters."""
    x_proj = cast("partial[torch.Tensor]", weights.x_proj).keywords["mat2"]
    return [x_proj, *(weight for weight in weights if isinstance(weight, torch.Tensor))]


def _seen(both: torch.Tensor, index: int) -> torch.Tensor:
    """Return the part of (2, B, L, n) that token `index` < L / 2 depends on, by direction: (2, B, L - index, n)."""
    _, batch, length, columns = both.shape
    between, image, token, column = both.stride()
    return both.as_strided((2, batch, length - index, columns), (between + index * token, image, token, column))


def _versions(parameters: list[torch.Tensor]) -> list[tuple[int, int]]:
    return [(p.data_ptr(), p._version) for p in parameters]


def _parameters(block: Block) -> list[torch.Tensor]:
    """Return the block's parameters from its layers' dictionaries, in a tenth of the time of `parameters()`."""
    owners = (block.norm, block.mixer, *block.mixer._modules.values())
    return [p for owner in owners if owner is not None for p in owner._parameters.values() if p is not None]


def _is_plain(block: Block) -> bool:
    """Return whether the mixer's layers are plain `nn.Linear` and `nn.Conv1d`."""
    return all(type(layer) in _PLAIN for layer in block.mixer._modules.values())


def _callable_dtype(parameters: list[torch.Tensor], weights: list[Weights]) -> torch.dtype | None:
    """Return the common dtype of all parameters if `Layers` support it, else None."""
    dtype, *others = {p.dtype for p in parameters}
    products = [product for its in weights for product in (its.in_proj, its.x_proj, its.out_proj)]
    fits = all(isinstance(product, PackedLinear) and product.suits(dtype) for product in products)
    return dtype if fits and not others and len(weights) > 1 else None


@torch.no_grad()
def _initialise(model: Vim) -> None:
    """Draw the published initial values: A = -(1..N), D = 1, and steps for zero input log-uniform in [0.001, 0.1]."""
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
    # otherwise the residual's variance would grow with the depth, because it is a sum over all layers
    mixer.out_proj.weight /= math.sqrt(depth)
    for logs in (mixer.A_log, mixer.A_b_log):
        logs.copy_(torch.arange(1, STATES + 1).log())
    for dt_proj in (mixer.dt_proj, mixer.dt_proj_b):
        nn.init.uniform_(dt_proj.weight, -(mixer.rank**-0.5), mixer.rank**-0.5)
        steps = torch.empty_like(dt_proj.bias).uniform_(math.log(1e-3), math.log(0.1)).exp()
        dt_proj.bias.copy_(steps + torch.log(-torch.expm1(-steps)))


def build(*, name: str, kernels: Kernels, scan: Form, **sizes: int) -> Vim:
    """Return a Vim in eval mode with random weights; the options are the catalog's, and `sizes` all except `scan`.

    `scan` only affects the custom kernels on a GPU: plain PyTorch and C have a single best exact form. `kernels`
    "custom" is for inference. Raises ValueError for a patch larger than the image and
    benchd.kernels.dispatch.Unavailable if `kernels` "custom" cannot run on the default device.
    """
    if kernels == "custom-int8":
        raise Unavailable(f"{name} has no int8 kernels: {NO_INT8}")
    implementation = "torch" if kernels == "torch" else "auto"
    _try(implementation, scan)
    return Vim(**sizes, implementation=implementation, scan=scan).eval()


def _try(implementation: str, scan: Form) -> None:
    """Run a layer once on the default device, so that an unsupported one fails when it is built."""
    with torch.no_grad():
        block = Block(1, implementation, scan).requires_grad_(False)
        block.mixer(block.norm(torch.zeros(1, 1, 1), None)[0], block.mixer.weights())


def shape_from(state: Mapping[str, torch.Tensor], options: Mapping[str, Any]) -> dict[str, int]:
    """Return the arguments of `build` that a checkpoint determines: num_classes, if it has a head.

    Raises WeightsError if the number of classes, dim, depth or patch_size differs from the option, or the positions do
    not fit the options: their number does not show whether the image is larger or the patches are closer together.
    """
    sizes = _sizes_of(state)
    differing = {name: size for name, size in sizes.items() if size != options[name]}
    problems = [
        f"it has {name}={size}, not {options[name]}: pass --option {name}={size}" for name, size in differing.items()
    ]
    positions = state.get("pos_embed")
    if positions is not None and positions.dim() == 3:
        problems += _other_positions(positions.shape[1] - 1, {**options, **sizes})
    if problems:
        raise WeightsError("; ".join(problems))
    head = state.get("head.weight")
    if head is None or head.dim() != 2:
        return {}
    if options["num_classes"] not in {_IMAGENET_CLASSES, len(head)}:
        raise WeightsError(
            f"num_classes={options['num_classes']}, but head.weight has {len(head)}; leave num_classes out"
        )
    return {"num_classes": len(head)}


def _sizes_of(state: Mapping[str, torch.Tensor]) -> dict[str, int]:
    """Return the options determined by the checkpoint's tensors: dim, patch_size and depth."""
    patch, layers = state.get("patch_embed.proj.weight"), [re.match(r"layers\.(\d+)\.", key) for key in state]
    has_patch = patch is not None and patch.dim() == 4 and patch.shape[2] == patch.shape[3]
    sizes = {"dim": patch.shape[0], "patch_size": patch.shape[2]} if patch is not None and has_patch else {}
    return sizes | ({"depth": 1 + max(int(layer[1]) for layer in layers if layer)} if any(layers) else {})


def _other_positions(patches: int, options: Mapping[str, Any]) -> list[str]:
    """Return why the options do not give this number of patches, with options that do; empty if they do."""
    patch_size, stride, image_size = options["patch_size"], options["stride"], options["image_size"]
    own = _side(patch_size, stride, image_size)
    if patches == own**2:
        return []
    side = math.isqrt(max(0, patches))
    wanted = f"patch_size={patch_size}, stride={stride} and image_size={image_size} make {own}x{own}+1"
    if side**2 != patches or not side:
        return [f"pos_embed has {patches + 1} positions, and {wanted}; no option gives a count that is not N x N + 1"]
    return [f"pos_embed has {side}x{side}+1 positions, and {wanted}; {_advice(side, patch_size, stride, image_size)}"]


def _side(patch_size: int, stride: int, image_size: int) -> int:
    """Return the number of patches in a row of the image."""
    return (image_size - patch_size) // stride + 1 if patch_size <= image_size else 0


def _advice(side: int, patch_size: int, stride: int, image_size: int) -> str:
    """Return options that give `side` patches per side: a different stride, if possible, or image size."""
    larger = f"pass --option image_size={(side - 1) * stride + patch_size}"
    closer = (image_size - patch_size) // max(1, side - 1)
    if closer < 1 or _side(patch_size, closer, image_size) != side:
        return larger
    return f"pass --option stride={closer}, which gives {image_size} pixels, or {larger.removeprefix('pass ')}"
