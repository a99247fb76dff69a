"""Which whole numbers a module's inputs may hold: the rows of the tables that they index, seen in one run."""

import copy
import sys
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode  # a TorchDispatchMode imports 900 modules: 140 MiB and seconds
from torch.utils._pytree import tree_leaves, tree_map

from benchd.daemon.worker.structures import Batch, values

Call = tuple[tuple[Any, ...], dict[str, Any]]

_INDEXING_NAMES = (
    "cross_entropy embedding embedding_bag gather getitem index index_add index_copy index_fill index_put index_reduce "
    "index_select nll_loss one_hot scatter scatter_add scatter_reduce setitem take take_along_dim"
)
# what leaves a number what it means, or moves it by a constant
_KEEPING_NAMES = (
    "add alias as_strided bitwise_and and broadcast_to cat chunk clamp clamp_max clamp_min clip clone concat "
    "concatenate contiguous copy cpu cuda detach expand expand_as flatten flip fmod gather get getitem hstack index "
    "index_select int long masked_fill maximum minimum movedim narrow pad permute ravel remainder repeat "
    "repeat_interleave reshape roll rsub select short slice split split_with_sizes squeeze stack sub swapaxes t "
    "take take_along_dim tile to to_copy transpose type type_as unbind unflatten unsafe_view unsqueeze view view_as "
    "vstack where"
)
_INDEXING, _KEEPING = set(_INDEXING_NAMES.split()), set(_KEEPING_NAMES.split())


def rows(module: nn.Module, ones: Batch, names: Sequence[str]) -> dict[str, tuple[int, int]]:
    """Return the first and last number of each named input that keeps all its indices within their tables.

    The module runs once, on a batch whose open whole numbers are all 1. Inputs that index nothing are left out, as are
    those of TorchScript, which does not show what it calls.
    """
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        watched = _Watch(dict(zip(names, values(ones), strict=True)))
        try:
            with watched:
                copy.deepcopy(module)(*values(ones))
        except Exception as error:  # what was seen before it counts, and the check will tell the user
            sys.stderr.write(f"its indices were not followed to the end: {error}\n")
    return watched.found


class _Watch(TorchFunctionMode):
    """Follows whole numbers from the inputs to the tables that they index, and tries which of them each table has."""

    def __init__(self, inputs: Mapping[str, Tensor]) -> None:
        super().__init__()
        self.found: dict[str, tuple[int, int]] = {}
        # by identity, and kept alive, so that no other tensor takes its place
        self._origins = {id(value): (value, {name}) for name, value in inputs.items() if _is_whole(value)}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        call: Call = args, kwargs or {}
        name = getattr(func, "__name__", "").partition(".")[0].strip("_")
        read = call if name not in _INDEXING else args[:1]
        origins = self._of(tree_leaves(read)) if name in _KEEPING else set()
        if name in _INDEXING and (name != "one_hot" or max(args[1:], default=call[1].get("num_classes", -1)) > 0):
            for index in tree_leaves(call):
                call = self._within(func, call, index) if id(index) in self._origins else call
        answer = func(*call[0], **call[1])
        self._origins |= {id(value): (value, origins) for value in tree_leaves(answer) if origins and _is_whole(value)}
        return answer

    def _of(self, parts: Sequence[object]) -> set[str]:
        return set().union(*(self._origins[id(part)][1] for part in parts if id(part) in self._origins))

    def _within(self, func: Any, call: Call, index: Tensor) -> Call:
        """Note which numbers the origins of these indices may hold, and return the call with indices that it takes."""

        def takes(number: int) -> bool:
            args, kwargs = _with(call, index, torch.full_like(index, number))
            try:
                func(*args, **kwargs)
            except (IndexError, RuntimeError, ValueError):
                return False
            return True

        first = next((number for number in (0, 1) if takes(number)), None)
        tried = (2**bits for bits in range(1, torch.iinfo(index.dtype).bits - 1))
        end = next((number for number in tried if not takes(number)), None)
        if first is None or end is None or not index.numel():  # it indexes nothing, such as a mask of bytes
            return call
        last = bisect_left(range(end), True, lo=end // 2, key=lambda number: not takes(number)) - 1
        self._note(index, first, last)
        return _with(call, index, index.clamp(first, last))

    def _note(self, index: Tensor, first: int, last: int) -> None:
        origins = self._of([index])
        top = int(index.max())  # where all origins are 1
        low, high = max(0, 1 + first - top), 1 + (last - top) // len(origins)
        for name in origins:
            lowest, highest = self.found.get(name, (low, high))
            self.found[name] = max(low, lowest), min(high, highest)


def _with(call: Call, old: Tensor, new: Tensor) -> Call:
    changed: Call = tree_map(lambda value: new if value is old else value, call)
    return changed


def _is_whole(value: object) -> bool:
    return isinstance(value, Tensor) and value.dtype != torch.bool and not value.is_floating_point()
