"""Records the operations that a module runs in torch, and finds the first one at which two runs diverge."""

from collections.abc import Callable
from difflib import SequenceMatcher
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

KEPT, KEPT_BYTES = 4096, 256 * 2**20  # maximum number and bytes of results per run: matching two runs takes a second
HALF = (torch.float16, torch.bfloat16)


class Operation(NamedTuple):
    """An operation that ran: its name in torch, and the type and the values (in float32) of a result."""

    name: str
    dtype: torch.dtype
    result: Tensor

    def __str__(self) -> str:
        """Return the operation's name, with the type of its result if that is half precision."""
        return f"`{self.name}`" + (f" in {str(self.dtype).removeprefix('torch.')}" if self.dtype in HALF else "")


def parting(one: Callable[[], object], other: Callable[[], object], share: float) -> Operation | None:
    """Return the operation of the first run from which on the results of the other run differ; None if there is none.

    Results differ by more than `share` of the largest value. An operation that the other run lacks counts if it is in
    half precision, or if results differ after it, because number formats have different kernels.
    """
    first, second = _ran(one), _ran(other)
    names, others = ([(operation.name, operation.result.shape) for operation in side] for side in (first, second))
    pairs: dict[int, Operation] = {}
    for block in SequenceMatcher(None, names, others, autojunk=False).get_matching_blocks():
        pairs |= {block.a + place: second[block.b + place] for place in range(block.size)}
    alone: Operation | None = None
    for place, operation in enumerate(first):
        pair = pairs.get(place)
        if pair is None and operation.dtype in HALF:
            return operation
        if pair is not None and _differ(operation.result, pair.result, share):
            return alone or operation
        alone = operation if pair is None else None
    return None


def _differ(result: Tensor, other: Tensor, share: float) -> bool:
    unlike = (result != other) & ~(result.isnan() & other.isnan())
    largest = other[other.isfinite()].abs().amax() if other.isfinite().any() else torch.ones(())
    return bool(unlike.any()) and not (result - other)[unlike].abs().amax() <= share * largest


def _ran(run: Callable[[], object]) -> list[Operation]:
    """Return the first operations of a run, in order, up to the number that is kept."""
    recorder = _Recorder()
    with recorder:
        run()
    return recorder.operations


class _Recorder(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.operations: list[Operation] = []
        self._bytes = 0

    def __torch_dispatch__(
        self, function: Any, types: object, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run the operation."""
        output = function(*args, **kwargs or {})
        for value in tree_leaves(output):
            name = function.overloadpacket.__name__
            if isinstance(value, Tensor) and name != "detach":  # detach only passes an answer on
                self._keep(name, value)
        return output

    def _keep(self, name: str, value: Tensor) -> None:
        self._bytes += 4 * value.numel()
        if self._bytes <= KEPT_BYTES and len(self.operations) < KEPT:
            real = torch.view_as_real(value.resolve_conj()) if value.is_complex() else value
            result = real.detach().to("cpu", torch.float32, copy=True)
            self.operations.append(Operation(name, value.dtype, result))
