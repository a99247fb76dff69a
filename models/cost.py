"""The minimum work of one run of a catalogued model, by formula: operations, exponentials, bytes; torch-free.

    matrix_flops       2 per multiply-add of the convolutions, linear layers and projections. Convolutions are counted
                       as direct, including the taps on padding, as every counter does
    elementwise_flops  the other additions, multiplications, divisions and comparisons
    exponentials       those of the scan, softplus and SiLU; softplus' logarithm counts as one, because the same unit
                       of a GPU computes it
    bytes              each parameter once, the images, the logits, and the values passed from one fused step to the
                       next, written once and read by each step that needs them

The fused steps, and the values passed between them, for any precision:

    Vision Mamba   patch embedding; each layer except the last; the last layer and the head, for the class token only.
                   The residual stream is passed on in float32
    OnePass        conv1, LIF and pool; conv2, LIF and pool; the head. Spike counts are passed on, one byte per pooled
                   value and time step
    ResNet-18      stem and its pool; each convolution with batch norm, shortcut and neurons; pool and fc. Codes are
                   passed on, one byte per value, and per time step in the spiking net

Whatever is the same at every time step counts once: OnePass' conv1 on a repeated image, stem and fc of the ST-BIF net.

Training is forward and backward without an optimiser. Each figure is a minimum on its own: operations and exponentials
assume that all values of the forward pass were kept, bytes that only the passed values were.

    matrix_flops       three times the forward's, minus the gradient that the image does not need
    elementwise_flops  three times the forward's
    exponentials       the forward's: the derivatives use the same values
    bytes              parameters twice and their gradients once; images and passed values read again; a gradient for
                       each value passed between steps, written and read; the logits and their gradient
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from benchd.models import catalog
from benchd.models.catalog import OptionValue

BYTES = {"fp32": 4, "fp16": 2, "bf16": 2, "amp": 4}
SILU, NORM, LIF, QUANTISER, ST_BIF = 2, 5, 5, 7, 9  # elementwise operations per value, without exponentials


@dataclass(frozen=True)
class Cost:
    """The minimum work of one run of a batch; `parameters_bytes` is the part of `bytes` for parameters."""

    matrix_flops: int
    elementwise_flops: int
    exponentials: int
    bytes: int
    parameters_bytes: int

    @property
    def flops(self) -> int:
        """Return all floating-point operations except exponentials."""
        return self.matrix_flops + self.elementwise_flops


@dataclass(frozen=True, kw_only=True)
class _Forward:
    """The forward pass of one image. `first_flops` is the part of `matrix_flops` with the image as input.

    `written` and `read` count the values passed between steps, of `width` bytes each.
    """

    parameters: int = 0
    matrix_flops: int = 0
    first_flops: int = 0
    elementwise_flops: int
    exponentials: int = 0
    inputs: int
    outputs: int
    written: int = 0
    read: int = 0
    width: int = 0


def parameters(model: str, options: Mapping[str, OptionValue]) -> int:
    """Return the number of parameters of the catalogued model."""
    return _forward(model, options).parameters


def cost(
    model: str,
    options: Mapping[str, OptionValue],
    batch_size: int,
    precision: Literal["fp32", "fp16", "bf16", "amp"],
    direction: Literal["inference", "training"],
) -> Cost:
    """Return the cost of one run of the catalogued model on a batch; raises UsageError if it is unknown.

    The model is as in the catalog: weights with a different number of classes make it a different model. Omitted
    `options` have their defaults.
    """
    forward = _forward(model, options)
    training = direction == "training"
    return Cost(
        matrix_flops=batch_size
        * ((3 * forward.matrix_flops - forward.first_flops) if training else forward.matrix_flops),
        elementwise_flops=batch_size * forward.elementwise_flops * (3 if training else 1),
        exponentials=batch_size * forward.exponentials,
        bytes=(_training_bytes if training else _inference_bytes)(forward, batch_size, BYTES[precision]),
        parameters_bytes=forward.parameters * BYTES[precision] * (3 if training else 1),
    )


def _inference_bytes(forward: _Forward, batch_size: int, number: int) -> int:
    image = number * (forward.inputs + forward.outputs) + forward.width * (forward.written + forward.read)
    return number * forward.parameters + batch_size * image


def _training_bytes(forward: _Forward, batch_size: int, number: int) -> int:
    # in a model without parameters, the input is learned, so its gradient is written
    images = number * forward.inputs * (2 if forward.parameters else 3)
    crossing = forward.width * (forward.written + 2 * forward.read) + number * 2 * forward.read
    return 3 * number * forward.parameters + batch_size * (images + crossing + 2 * number * forward.outputs)


def _forward(model: str, options: Mapping[str, OptionValue]) -> _Forward:
    entry = catalog.entry(model)
    return _FORMULAS[entry.cost](entry.resolve(options))


_STATES, _TAPS = 16, 4


def _vim(options: Mapping[str, Any]) -> _Forward:
    dim, depth, patch, side = options["dim"], options["depth"], options["patch_size"], options["image_size"]
    inner, rank, patch_numbers, classes = 2 * dim, -(-dim // 16), 3 * patch**2, options["num_classes"]
    patches = ((side - patch) // options["stride"] + 1) ** 2
    tokens = depth * (patches + 1)
    # the last layer: its scans meet at the class token, the only token that passes its gate
    scanned = 2 * (tokens - patches - 1) + patches + 2
    gated = tokens - patches
    low = rank + 2 * _STATES
    embedding = 2 * patches * dim * patch_numbers
    layer = dim + 3 * dim * inner + 2 * inner * (_TAPS + 1 + low + rank + 1 + _STATES + 1)
    return _Forward(
        parameters=dim * (patch_numbers + 1 + 1 + patches + 1) + depth * layer + dim + (dim + 1) * classes,
        # in_proj for u and z, out_proj; x_proj and dt_proj
        matrix_flops=embedding + 2 * inner * (dim * (tokens + 2 * gated) + scanned * (low + rank)) + 2 * dim * classes,
        first_flops=embedding,
        # norms and residual; the short convolution; the scan with its softplus; sum of the directions and gate
        elementwise_flops=NORM * dim * (tokens + 1)
        + inner * scanned * (2 * _TAPS + SILU + 6 * _STATES + 5)
        + inner * gated * (SILU + 2),
        exponentials=inner * (scanned * (_STATES + 2 + 1) + gated),
        inputs=3 * side**2,
        outputs=classes,
        written=tokens * dim,
        read=tokens * dim,
        width=4,
    )


def _onepass(options: Mapping[str, Any]) -> _Forward:
    steps, repeats = options["time_steps"], options["encoding"] == "repeat"
    conv1, conv2, fc = 64 * 27, 128 * 64 * 9, 8192 * 256 + 256 * 10
    stem = 2 * conv1 * 32**2 * (1 if repeats else steps)
    pooled = steps * (64 * 16**2 + 128 * 8**2)
    return _Forward(
        parameters=conv1 + conv2 + fc + (64 + 128) * (3 if options["batch_norm"] else 1) + 256 + 10,
        matrix_flops=stem + 2 * steps * (conv2 * 16**2 + fc),
        first_flops=stem,
        elementwise_flops=4 * pooled * LIF + steps * (256 + 10),
        inputs=3 * 32**2,
        outputs=10,
        written=pooled,
        read=pooled,
        width=1,
    )


# input and output channels as multiples of the width, and the side for 32x32 images
_STAGES = ((1, 1, 8), (1, 2, 4), (2, 4, 2), (4, 8, 1))


def _resnet(options: Mapping[str, Any]) -> _Forward:
    first = options["width"]
    steps, neuron = (options["time_steps"], ST_BIF) if "time_steps" in options else (1, QUANTISER)
    stem, pooled, fc = first * 3 * 49, first * 8**2, 8 * first * 10
    weights, norms, products, numbers = 0, first, 0, 0
    for before, width, side in ((first * before, first * width, side) for before, width, side in _STAGES):
        # two blocks of two convolutions; where the width changes, a fifth one is in the shortcut
        changes = before != width
        convolutions = 9 * before * width + 27 * width**2 + changes * before * width
        weights += convolutions
        norms += (4 + changes) * width
        products += convolutions * side**2
        numbers += width * side**2
    return _Forward(
        parameters=stem + weights + fc + 10 + 2 * norms + 17,
        matrix_flops=2 * (stem * 16**2 + steps * products + fc),
        first_flops=2 * stem * 16**2,
        # the neurons with their bias, the comparisons of the pool, the additions of the shortcuts
        elementwise_flops=steps * (neuron * (first * 16**2 + 4 * numbers) + 8 * pooled + 2 * numbers),
        inputs=3 * 32**2,
        outputs=10,
        # the output of a block's first half is read once, that of a block by the next block and its shortcut, the last
        # one's by the head
        written=steps * (pooled + 4 * numbers),
        read=steps * (2 * pooled + 6 * numbers - 8 * first),
        width=1,
    )


def _square(options: Mapping[str, Any]) -> _Forward:
    numbers = options["size"] ** 2
    return _Forward(elementwise_flops=numbers, inputs=numbers, outputs=numbers)


_FORMULAS: Mapping[str, Callable[[Mapping[str, Any]], _Forward]] = {
    "vim": _vim,
    "onepass": _onepass,
    "resnet": _resnet,
    "square": _square,
}
