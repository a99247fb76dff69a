"""Launches Triton kernels on the right GPU, and repeats launches."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
import triton
import triton.language as tl
from torch import Tensor

from benchd.kernels import plan
from benchd.kernels.plan import Again, Launch

_LETTERS = {"i32": "i", "i64": "l", "fp32": "f"}  # letters for Triton's number types in torch's launcher


def run(
    kernel: Any, grid: tuple[int, ...], tensors: Sequence[Tensor | None], numbers: tuple[Any, ...], **constants: Any
) -> None:
    """Launch `kernel` as `kernel[grid](*tensors, *numbers, **constants)` would, on the GPU of the first tensor."""
    with torch.cuda.device_of(cast("Tensor", tensors[0])):
        compiled = kernel[grid](*tensors, *numbers, **constants)
    if (now := plan.of_thread.recording) is not None:
        x, y, z = (*grid, 1, 1)[:3]
        now.launches.append(Launch(kernel, compiled, (x, y, z), tensors, numbers, constants))


def repeated(launch: Launch, places: list[tuple[int, int]], device: torch.device) -> Again:
    """Return a call that repeats the launch on a stream with different memory, given by its addresses.

    `places` gives, for each tensor, the index of its address and the offset from it.
    """
    function = _by_torch(launch, places) if launches_by_torch(device) else None
    return function or _by_triton(launch, places)


def _by_triton(launch: Launch, places: list[tuple[int, int]]) -> Again:
    names = launch.kernel.arg_names[len(places) + len(launch.numbers) :]
    start, rest = launch.compiled[launch.grid], (*launch.numbers, *(launch.constants[name] for name in names))

    def again(addresses: list[int], stream: int) -> None:
        start(*[addresses[which] + offset for which, offset in places], *rest, stream=stream)

    return again


def _by_torch(launch: Launch, places: list[tuple[int, int]]) -> Again | None:
    """Return a call using torch.compile's launcher for Triton kernels, or None if it does not support the launch.

    It costs 2 us on the host of an H100, compared with 12 us for Triton's own, which checks each argument's type again.
    """
    compiled, metadata = launch.compiled, launch.compiled.metadata
    scratches = [getattr(metadata, f"{kind}_scratch_size", None) for kind in ("global", "profile")]
    kinds = [compiled.src.signature[name] for name in launch.kernel.arg_names]
    passed = [i for i, kind in enumerate(kinds) if kind != "constexpr"]
    letters = ["O" if kinds[i][0] == "*" else _LETTERS.get(kinds[i], "") for i in passed]
    if any(scratches) or "" in letters or getattr(metadata, "num_ctas", 1) != 1:
        return None
    hidden = [None for size in scratches if size is not None]
    pointers = [places[i] for i in passed if i < len(places)]
    numbers = (*(launch.numbers[i - len(places)] for i in passed if i >= len(places)), *hidden)
    head = (compiled.function, *launch.grid, metadata.num_warps, metadata.shared, "".join(letters) + "O" * len(hidden))
    start = torch._C._StaticCudaLauncher._launch_kernel

    def again(addresses: list[int], stream: int) -> None:
        start(*head, (*[addresses[which] + offset for which, offset in pointers], *numbers), stream)

    again.held = compiled  # type: ignore[attr-defined]  # it unloads the function when nobody holds it
    return again


@functools.cache
def launches_by_torch(device: torch.device) -> bool:
    """Return whether torch's launcher exists and passes its arguments on correctly, which a test launch shows."""
    x, y = torch.full((3,), 1.5, device=device), torch.zeros(2, dtype=torch.float64, device=device)
    with plan.recording() as now:
        run(_probe_kernel, (1,), (x, None, y), (3, 2**40, 16, 0.25), num_warps=1)
    try:
        again = cast("Again", _by_torch(now.launches[0], [(0, 4), (0, 0), (1, 8)]))
        with torch.cuda.device_of(x):
            again([x.data_ptr(), y.data_ptr()], current_stream(device.index))
    except (AttributeError, TypeError, RuntimeError):  # torch without this launcher, or with a different signature
        return False
    wanted = 1.5 * 0.25 + 3 + 2**40 + 16
    return y.tolist() == [wanted, wanted]


@triton.jit
def _probe_kernel(x: Any, nothing: None, y: Any, small: Any, large: Any, even: Any, real: Any) -> None:
    tl.store(y, (tl.load(x) * real).to(tl.float64) + small + large + even)


# CPU-only builds of torch have neither
current_device: Callable[[], int] = getattr(torch._C, "_cuda_getDevice", torch.cuda.current_device)
current_stream: Callable[[int], int] = getattr(torch._C, "_cuda_getCurrentRawStream", abs)


@functools.cache
def architecture(device: torch.device) -> int:
    """Return the compute capability of `device` as a number, 87 for 8.7; 0 for the interpreter."""
    if device.type != "cuda":
        return 0
    major, minor = torch.cuda.get_device_capability(device)
    return 10 * major + minor
