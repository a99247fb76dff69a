"""What an op launches for arguments of one signature, repeated without looking at them again.

A plan is recorded with stand-ins for the arguments: tensors alike, each in storage of its own, so that the address that
a launch gets says whose it is. A later call allocates the results and one workspace, and makes the launches again with
its own addresses. Everything else that a launch depends on is in the signature.
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
Again = Callable[[list[int], int], None]  # makes a launch with these addresses on a stream
_PLAIN = (Tensor, nn.Parameter)
_UNIT = 256  # bytes: pieces of a workspace are aligned as torch's allocator aligns what it hands out


class Launch(NamedTuple):
    """A launch that was made: of what, and with what."""

    kernel: Any
    compiled: Any
    grid: tuple[int, int, int]
    tensors: Sequence[Tensor | None]
    numbers: tuple[Any, ...]
    constants: dict[str, Any]


class Recording(NamedTuple):
    """What was launched, and the memory between these launches."""

    launches: list[Launch]
    workspace: list[Tensor]


class _OfThread(threading.local):
    recording: Recording | None = None


of_thread = _OfThread()


@contextmanager
def recording() -> Iterator[Recording]:
    """Record what this thread launches inside."""
    now = of_thread.recording = Recording([], [])
    try:
        yield now
    finally:
        of_thread.recording = None


def workspace(memory: Tensor) -> Tensor:
    """Return memory, unwritten, in which one launch leaves something to the next: a recording knows it from copies."""
    if (now := of_thread.recording) is not None:
        now.workspace.append(memory)
    return memory


def signature(given: Sequence[Any]) -> list[Any]:
    """Return what a call depends on, but for the numbers in its tensors; one of a subclass stands for itself."""
    return [
        (each.shape, each.stride(), each.dtype, each.device, each.data_ptr() & 15) if each.__class__ in _PLAIN else each
        for each in given
    ]


def is_plain(signed: Sequence[Any]) -> bool:
    """Return whether a signature has all its tensors described: those of a compiler have no memory."""
    return not any(isinstance(each, Tensor) for each in signed)


def planned(function: Callable[[Given], Made], given: Given, held: Sequence[Tensor] = ()) -> Callable[[Given], Made]:
    """Return what computes `function`, of Triton kernels, for arguments alike: its plan, or itself if it has none.

    `held` are tensors that it reads beside its arguments, which stay where they are. There is no plan while a graph is
    captured, which would hold the launches of the recording too.
    """
    device = next(each.device for each in given if isinstance(each, Tensor))
    if INTERPRETED or torch.cuda.is_current_stream_capturing():
        return function
    return recorded(function, given, device, held) or function


@dataclass(frozen=True, slots=True)
class Plan(Generic[Given, Made]):
    """The launches of a function; `results` are the shape, stride and dtype of each, `is_tuple` says how it returns."""

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
        """Return what the function returns; nothing is checked."""
        if self.current_device() != self.index:
            with torch.cuda.device(self.index):
                return self(given)
        device = self.device
        made = [torch.empty_strided(*sizes, dtype=dtype, device=device) for *sizes, dtype in self.results]
        addresses = [0, *[each.data_ptr() for each in given if each.__class__ in _PLAIN]]
        addresses += [each.data_ptr() for each in made]
        if self.workspace_bytes:
            memory = torch.empty((self.workspace_bytes,), dtype=torch.uint8, device=device)
            addresses.append(memory.data_ptr())
        stream = self.current_stream(self.index)
        for launch in self.launches:
            launch(addresses, stream)
        return tuple(made) if self.is_tuple else made[0]  # type: ignore[return-value]


def recorded(
    function: Callable[[Given], Made], given: Given, device: torch.device, held: Sequence[Tensor] = ()
) -> Plan[Given, Made] | None:
    """Return the plan of a function; None if a copy of an argument is launched, or a result is of no launch."""
    from benchd.kernels import launch  # noqa: PLC0415 - it imports Triton, which is not everywhere

    stand_ins = [_stand_in(each) if isinstance(each, Tensor) else each for each in given]
    with recording() as now:
        made = function(type(given)(*stand_ins))
    results: tuple[Tensor, ...] = made if isinstance(made, tuple) else (made,)  # type: ignore[assignment]
    owners = [*(each for each in stand_ins if isinstance(each, Tensor)), *results]
    # by storage: which of a call's addresses, and what is there; the first is 0, for tensors that stay
    places = {_storage(each): (0, 0) for each in held}
    places |= {_storage(each): (1 + which, each.data_ptr()) for which, each in enumerate(owners)}
    between = {_storage(each): each for each in now.workspace if _storage(each) not in places}
    offsets, size = _arranged(between, now.launches)
    places |= {place: (1 + len(owners), place - offset) for place, offset in offsets.items()}
    launched = {_storage(each) for one in now.launches for each in one.tensors if each is not None}
    if not launched <= set(places) or any(each.numel() and _storage(each) not in launched for each in results):
        return None
    again = [
        launch.repeated(each, [(0, 0) if one is None else _place(one, places) for one in each.tensors], device)
        for each in now.launches
    ]
    return Plan(
        [(each.shape, each.stride(), each.dtype) for each in results], isinstance(made, tuple), size, again,
        device, device.index or 0, launch.current_device, launch.current_stream, held,
    )  # fmt: skip


def _arranged(memory: dict[int, Tensor], launches: Sequence[Launch]) -> tuple[dict[int, int], int]:
    """Return at which byte of a workspace each memory lies from its first launch to its last, and all its bytes."""
    spans: dict[int, list[int]] = {}
    for number, launch in enumerate(launches):
        for storage in {_storage(each) for each in launch.tensors if each is not None} & set(memory):
            spans.setdefault(storage, [number, number])[1] = number
    taken: list[tuple[int, int, int]] = []  # from byte, to byte, and the last launch that needs it
    offsets = {}
    for storage, (first, last) in sorted(spans.items(), key=lambda span: span[1]):
        size = -(-memory[storage].untyped_storage().nbytes() // _UNIT) * _UNIT
        start = 0
        for begin, end, until in sorted(taken):
            if until >= first:
                if begin - start >= size:
                    break
                start = max(start, end)
        taken.append((start, start + size, last))
        offsets[storage] = start
    return offsets, max((end for _, end, _ in taken), default=0)


def _stand_in(tensor: Tensor) -> Tensor:
    """Return zeros laid out and aligned as the tensor is, in storage of their own."""
    if not tensor.numel():
        return tensor.new_empty(tensor.shape).as_strided(tensor.shape, tensor.stride())
    skip = (tensor.data_ptr() & 15) // tensor.element_size()
    last = sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.new_zeros(skip + last + 1).as_strided(tensor.shape, tensor.stride(), skip)


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _place(tensor: Tensor, places: dict[int, tuple[int, int]]) -> tuple[int, int]:
    """Return which address a tensor is at, and how many bytes behind it."""
    which, start = places[_storage(tensor)]
    return which, tensor.data_ptr() - start
