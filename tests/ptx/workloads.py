"""The ops as our models call them: between them they launch every Triton kernel that ships."""

from collections.abc import Callable, Iterable, Iterator
from functools import partial

import torch

from benchd.kernels.add_rms_norm import add_rms_norm
from benchd.kernels.causal_conv1d import causal_conv1d, causal_conv1d_pair
from benchd.kernels.lif import lif_pool
from benchd.kernels.selective_scan import bidirectional_scan
from benchd.kernels.stbif import max_pool_delta, stbif_block

Launch = tuple[int, Callable[[], object]]  # with its number of images
TOKENS, DIM, CHANNELS, STATES, RANK = 197, 192, 384, 16, 12  # Vim tiny
STEPS = 8
PRECISIONS = {"fp16": torch.float16, "fp32": torch.float32}


def launches(precisions: Iterable[str] = PRECISIONS) -> Iterator[Launch]:
    """Yield the ops that launch what ships, as the models call them, and how many images that is for.

    The second batch of an op is one that takes the other cut of a kernel on each architecture.
    """
    for dtype in map(PRECISIONS.__getitem__, precisions):
        yield from _vim(dtype)
        yield from _onepass(dtype)
        yield from _stbif(dtype)


def _numbers(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.rand(shape, generator=torch.Generator().manual_seed(0)).sub(0.3).to(dtype)


def _vim(dtype: torch.dtype) -> Iterator[Launch]:
    numbers = partial(_numbers, dtype=dtype)
    for residual in (_numbers(1, TOKENS, DIM), None):
        yield 1, partial(add_rms_norm, numbers(1, TOKENS, DIM), residual, numbers(DIM), implementation="triton")
    for batch in (1, 4):
        x = numbers(batch, TOKENS, 2 * CHANNELS)[..., :CHANNELS]
        taps, bias = numbers(2, CHANNELS, 4), numbers(2, CHANNELS)
        yield batch, partial(causal_conv1d_pair, x, taps, bias, implementation="triton")
        for reverse in (False, True):
            yield batch, partial(causal_conv1d, x, taps[0], bias[0], reverse=reverse, implementation="triton")
    for batch, form in ((1, "serial"), (32, "serial"), (1, "two_level")):
        columns = numbers(2, batch, TOKENS, 3 * STATES)
        yield (
            batch,
            partial(
                bidirectional_scan,
                numbers(2, batch, TOKENS, CHANNELS),
                columns[..., 2 * STATES :][..., :RANK],
                numbers(2, CHANNELS, RANK),
                numbers(2, CHANNELS),
                -_numbers(2, CHANNELS, STATES).abs(),
                columns[..., :STATES],
                columns[..., STATES : 2 * STATES],
                numbers(2, CHANNELS),
                numbers(batch, TOKENS, 2 * CHANNELS)[..., CHANNELS:],
                form=form,
                implementation="triton",
            ),
        )


def _frames(batch: int, channels: int, side: int, dtype: torch.dtype, last: bool = True) -> torch.Tensor:
    layout = torch.channels_last if last else torch.contiguous_format
    frames = _numbers(STEPS * batch, channels, side, side, dtype=dtype).contiguous(memory_format=layout)
    return frames.unflatten(0, (STEPS, batch))


def _onepass(dtype: torch.dtype) -> Iterator[Launch]:
    for batch in (1, 8):
        first, second = _frames(batch, 64, 32, dtype), _frames(batch, 128, 16, dtype)
        for current in (first[0].expand(first.shape), first, second):
            bias = _numbers(current.shape[2], dtype=dtype)
            yield batch, partial(lif_pool, current, decay=0.95, bias=bias, implementation="triton")


def _stbif(dtype: torch.dtype) -> Iterator[Launch]:
    neuron = {"threshold": torch.tensor([0.5]), "pos_max": 3, "neg_min": 0, "implementation": "triton"}
    bias = _numbers(STEPS, 64, dtype=dtype)
    for batch in (1, 16):
        for last in (True, False):
            current, residual = (_frames(batch, 64, 8, dtype, last) for _ in range(2))
            for terms in {}, {"bias": bias}, {"bias": bias, "residual": residual}:
                yield batch, partial(_learn, partial(stbif_block, **terms, **neuron), current)
        pool = partial(max_pool_delta, kernel_size=3, stride=2, padding=1, implementation="triton")
        yield batch, partial(_learn, pool, _frames(batch, 64, 16, dtype))


def _learn(op: Callable[[torch.Tensor], torch.Tensor], current: torch.Tensor) -> None:
    """Call an op, and in float32, as in training, the gradients of it."""
    spikes = op(current.requires_grad_(current.dtype == torch.float32))
    if spikes.requires_grad:
        spikes.sum().backward()
