"""Random rounding to a number format: of weights, of inputs, and of the results of each torch operation."""

import random
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode  # a TorchDispatchMode imports 900 modules: 140 MiB and seconds

EXPONENT = 0x7FF0000000000000  # the bits of a float64 that encode its power of two
MANTISSA = 52  # bits of a float64 after the point
# how many numbers to round together: torch would split more among threads, and these stay in a core's cache
TOGETHER = 2**15
# how many random numbers to draw; they are reused from different offsets, because drawing takes most of the time
POOL = 2**17
NEGLIGIBLE = 2.0**-100  # formats that keep their precision down to here need no special treatment of small numbers
# functions that runtimes compute with an absolute error; for example, ONNX Runtime's sigmoid is off by up to 1.2e-7
FLAT, FLAT_STEP = {"erf", "gelu", "sigmoid", "silu", "tanh"}, 2.0**-22


class Rounding(TorchFunctionMode):
    """Rounds the result of each operation randomly to one of the two nearest numbers of a format.

    The format has `bits` of precision, and a spacing of `smallest` around 0; unless it is `floating`, all numbers in a
    tensor are spaced like the largest ones. Representable numbers are unchanged, so that integers stay integers;
    results that an operation writes in place may be rounded twice.
    """

    def __init__(self, bits: float, smallest: float, seed: int, device: torch.device, *, floating: bool = True) -> None:
        super().__init__()
        self._relative, self._smallest, self._floating = 2.0 ** (1 - bits), smallest, floating
        self._draw = torch.Generator(device).manual_seed(seed)
        # how many of a float64's bits the format lacks, if its bits are an integer, and random numbers below that
        self._dropped = MANTISSA + 1 - int(bits) if floating and bits == int(bits) else 0
        size = POOL if self._dropped else 0
        self._pool = _integers(torch.randint(1 << self._dropped, (size,), generator=self._draw, device=device))
        self._start = random.Random(seed)  # noqa: S311 - noise, not a secret

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the operation and round its result, in place if it was written in place; a view is not rounded."""
        answer = func(*args, **kwargs or {})
        numbers = list(_floats(answer))
        name = getattr(func, "__name__", "").removesuffix(".default")
        if not numbers or name == "requires_grad_":  # it does not write any numbers
            return answer
        is_in_place = (name.endswith("_") and not name.endswith("__")) or name.startswith("__i")
        given = () if is_in_place else {_memory(value) for value in _floats((args, kwargs))}
        least = FLAT_STEP if name.rstrip("_") in FLAT else 0.0
        for value in numbers:
            if is_in_place or _memory(value) not in given:
                self.rounded(value, least, in_place=True)
        return answer

    def rounded(self, exact: Tensor, least: float = 0.0, *, in_place: bool = False) -> Tensor:
        """Return the tensor with each number rounded, in steps of at least `least`."""
        if exact.is_complex():
            parts = torch.view_as_real(exact.resolve_conj())
            return torch.view_as_complex(self.rounded(parts.contiguous(), least))
        if not exact.is_floating_point():
            return exact
        wide = exact.detach().to(self._draw.device, torch.float64, copy=not in_place).contiguous()
        largest = None if self._floating or not wide.numel() else wide.abs().amax()
        flat = wide.view(-1)
        if least == 0.0 and self._dropped:
            self._cut(flat)
        else:
            for part in flat.split(TOGETHER):
                part.copy_(self._to_steps(part, part if largest is None else largest, least))
        return exact.copy_(wide) if in_place else wide.to(exact.device, exact.dtype)

    def _cut(self, flat: Tensor) -> None:
        """Round numbers: add random bits to the last bits, then cut those off."""
        numbers, near_zero = _integers(flat.view(torch.int64)), self._smallest / self._relative
        for start in range(0, len(numbers), TOGETHER):
            part = numbers[start : start + TOGETHER]
            drawn = self._start.randrange(POOL - len(part) + 1)
            if near_zero > NEGLIGIBLE:
                exact = flat[start : start + TOGETHER]
                are_small = (exact.abs() < near_zero) & (exact != 0)
                small = self._to_steps(exact[are_small], exact[are_small], 0.0)
            part += self._pool[drawn : drawn + len(part)]
            part &= -1 << self._dropped
            if near_zero > NEGLIGIBLE:
                exact[are_small] = small

    def _to_steps(self, part: Tensor, sized: Tensor, least: float) -> Tensor:
        power = (sized.view(torch.int64) & EXPONENT).view(torch.float64)
        step = (power * self._relative).clamp(min=max(self._smallest, least))
        by_chance = torch.rand(part.shape, generator=self._draw, dtype=torch.float64, device=part.device)
        return torch.where(part.isfinite(), (part / step + by_chance).floor() * step, part)


def _integers(numbers: Tensor) -> Any:
    """Return a CPU tensor as an array that shares its memory, because numpy adds integers five times as fast."""
    return numbers.numpy() if numbers.device.type == "cpu" else numbers


def _floats(values: Any) -> Iterator[Tensor]:
    """Yield the floating-point tensors in an operation's arguments or results."""
    if isinstance(values, Tensor):
        if values.is_floating_point() or values.is_complex():
            yield values
    elif isinstance(values, dict):
        yield from _floats(tuple(values.values()))
    elif isinstance(values, tuple | list) and not isinstance(values, torch.Size):
        for value in values:
            yield from _floats(value)


def _memory(value: Tensor) -> int:
    return value.untyped_storage().data_ptr()
