"""The launches of an op for arguments of one signature, repeated without inspecting them again.

A plan is recorded with stand-ins for the arguments: similar tensors, each in its own storage, so that a launch's
addresses identify the arguments. A later call allocates the results and one workspace, and repeats the launches with
its own addresses. The signature contains everything else that a launch depends on.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Generic, NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from benchd.kernels.dispatch import INTERPRETED

Given = TypeVar("Given", bound=tuple[Any, ...])
Made = TypeVar("Made")
Again = Callable[[list[int], int], None]  # repeats a launch with these addresses on a stream
_PLAIN = (Tensor, nn.Parameter)
_UNIT = 256  # bytes: alignment of pieces of a workspace, as in torch's allocator


class Launch(NamedTuple):
    """A launch that was made: the kernel and its arguments."""

    kernel: Any
    compiled: Any
    grid: tuple[int, int, int]
    tensors: Sequence[Tensor | None]
    numbers: tuple[Any, ...]
    constants: dict[str, Any]


class Recording(NamedTuple):
    """The recorded launches, and the memory passed between them."""

    launches: list[Launch]
    workspace: list[Tensor]


class _OfThread(threading.local):
    recording: Recording | None = None


of_thread = _OfThread()


@contextmanager
def recording() -> Iterator[Recording]:
    """Record the launches of this thread within the block."""
    now = of_thread.recording = Recording([], [])
    try:
        yield now
    finally:
        of_thread.recording = None


def workspace(memory: Tensor) -> Tensor:
    """Return uninitialised memory that one launch passes to the next, which a recording can distinguish from copies."""
    if (now := of_thread.recording) is not None:
        now.workspace.append(memory)
    return memory


def signature(given: Sequence[Any]) -> list[Any]:
    """Return everything that a call depends on except its tensors' values; a tensor subclass is included as it is."""
    return [
        (arg.shape, arg.stride(), arg.dtype, arg.device, arg.data_ptr() & 15) if arg.__class__ in _PLAIN else arg
        for arg in given
    ]


def is_plain(signed: Sequence[Any]) -> bool:
    """Return whether a signature describes all its tensors; a compiler's tensors have no memory."""
    return not any(isinstance(entry, Tensor) for entry in signed)


def planned(function: Callable[[Given], Made], given: Given, held: Sequence[Tensor] = ()) -> Callable[[Given], Made]:
    """Return a function for similar arguments: the plan of `function`, or `function` itself if it cannot be planned.

    `held` are tensors that it reads in addition to its arguments, and whose memory does not move. No plan is made while
    a CUDA graph is captured, because the graph would include the launches of the recording.
    """
    device = next(arg.device for arg in given if isinstance(arg, Tensor))
    if INTERPRETED or torch.cuda.is_current_stream_capturing():
        return function
    return recorded(function, given, device, held) or function


@dataclass(frozen=True, slots=True)
class Plan(Generic[Given, Made]):
    """The launches of a function; `results` gives each result's shape, stride and dtype, `is_tuple` how it returns."""

    results: list[tuple[torch.Size, tuple[int, ...], torch.dtype]]
    is_tuple: bool
    workspace_bytes: int
    launches: list[Again]
    device: torch.device
    index: int
    current_device: Callable[[], int]
    current_stream: Callable[[int], int]
    held: Sequence[Tensor]

    def __call__(self, given: Given) -> Made:
        """Return the function's results, without any checks."""
        if self.current_device() != self.index:
            with torch.cuda.device(self.index):
                return self(given)
        device = self.device
        results = [torch.empty_strided(*sizes, dtype=dtype, device=device) for *sizes, dtype in self.results]
        addresses = [0, *[arg.data_ptr() for arg in given if arg.__class__ in _PLAIN]]
        addresses += [result.data_ptr() for result in results]
        if self.workspace_bytes:
            memory = torch.empty((self.workspace_bytes,), dtype=torch.uint8, device=device)
            addresses.append(memory.data_ptr())
        stream = self.current_stream(self.index)
        for launch in self.launches:
            launch(addresses, stream)
        return tuple(results) if self.is_tuple else results[0]  # type: ignore[return-value]


def recorded(
    function: Callable[[Given], Made], given: Given, device: torch.device, held: Sequence[Tensor] = ()
) -> Plan[Given, Made] | None:
    """Return the plan of a function, or None if a launch uses a copy of an argument or a result is from no launch."""
    from benchd.kernels import launch  # noqa: PLC0415 - it imports Triton, which is not everywhere

    stand_ins = [_stand_in(arg) if isinstance(arg, Tensor) else arg for arg in given]
    with recording() as now:
        returned = function(type(given)(*stand_ins))
    results: tuple[Tensor, ...] = returned if isinstance(returned, tuple) else (returned,)  # type: ignore[assignment]
    owners = [*(stand_in for stand_in in stand_ins if isinstance(stand_in, Tensor)), *results]
    # by storage: the index of a call's address, and the offset; index 0 is address 0, for tensors that do not move
    places = {_storage(tensor): (0, 0) for tensor in held}
    places |= {_storage(owner): (1 + which, owner.data_ptr()) for which, owner in enumerate(owners)}
    between = {_storage(tensor): tensor for tensor in now.workspace if _storage(tensor) not in places}
    offsets, size = _arranged(between, now.launches)
    places |= {place: (1 + len(owners), place - offset) for place, offset in offsets.items()}
    launched = {_storage(tensor) for call in now.launches for tensor in call.tensors if tensor is not None}
    if not launched <= set(places) or any(result.numel() and _storage(result) not in launched for result in results):
        return None
    again = [
        launch.repeated(call, [(0, 0) if tensor is None else _place(tensor, places) for tensor in call.tensors], device)
        for call in now.launches
    ]
    return Plan(
        [(result.shape, result.stride(), result.dtype) for result in results], isinstance(returned, tuple), size, again,
        device, device.index or 0, launch.current_device, launch.current_stream, held,
    )  # fmt: skip


def _arranged(memory: dict[int, Tensor], launches: Sequence[Launch]) -> tuple[dict[int, int], int]:
    """Return each memory's offset in a workspace, reserved from its first launch to its last, and the total bytes."""
    spans: dict[int, list[int]] = {}
    for number, launch in enumerate(launches):
        for storage in {_storage(tensor) for tensor in launch.tensors if tensor is not None} & set(memory):
            spans.setdefault(storage, [number, number])[1] = number
    reserved: list[tuple[int, int, int]] = []  # first byte, end byte, and the last launch that needs them
    offsets = {}
    for storage, (first, last) in sorted(spans.items(), key=lambda span: span[1]):
        size = -(-memory[storage].untyped_storage().nbytes() // _UNIT) * _UNIT
        start = 0
        for begin, end, until in sorted(reserved):
            if until >= first:
                if begin - start >= size:
                    break
                start = max(start, end)
        reserved.append((start, start + size, last))
        offsets[storage] = start
    return offsets, max((end for _, end, _ in reserved), default=0)


def _stand_in(tensor: Tensor) -> Tensor:
    """Return zeros with the layout and alignment of the tensor, in their own storage."""
    if not tensor.numel():
        return tensor.new_empty(tensor.shape).as_strided(tensor.shape, tensor.stride())
    skip = (tensor.data_ptr() & 15) // tensor.element_size()
    last = sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.new_zeros(skip + last + 1).as_strided(tensor.shape, tensor.stride(), skip)


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _place(tensor: Tensor, places: dict[int, tuple[int, int]]) -> tuple[int, int]:
    """Return the index of a tensor's address, and its offset from it in bytes."""
    which, start = places[_storage(tensor)]
    return which, tensor.data_ptr() - start
