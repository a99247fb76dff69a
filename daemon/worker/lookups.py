"""Finds the valid range of a module's integer inputs: the rows of the tables that they index, as seen in a run."""

import sys
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode  # a TorchDispatchMode imports 900 modules: 140 MiB and seconds
from torch.utils._pytree import tree_leaves, tree_map

from benchd.daemon.measuring.user_inputs import is_mask
from benchd.daemon.worker.structures import Batch, values
from benchd.exporters import doubled

Call = tuple[tuple[Any, ...], dict[str, Any]]

_INDEXING_NAMES = (
    "cross_entropy embedding embedding_bag gather getitem index index_add index_copy index_fill index_put index_reduce "
    "index_select nll_loss one_hot scatter scatter_add scatter_reduce setitem take take_along_dim"
)
# operations that preserve the meaning of a number, or enlarge it, which a trial run then limits
_KEEPING_NAMES = (
    "abs add alias amax and as_strided bitwise_and broadcast_to cat chunk clamp clamp_max clamp_min clip clone concat "
    "concatenate contiguous copy cpu cuda cumsum detach expand expand_as flatten flip fmod gather get getitem hstack "
    "index index_select int long masked_fill max maximum minimum movedim mul multiply narrow pad permute ravel "
    "remainder repeat repeat_interleave reshape roll rsub select short slice sort split split_with_sizes squeeze "
    "stack sub sum swapaxes t take take_along_dim tile to to_copy topk transpose type type_as unbind unflatten "
    "unsafe_view unsqueeze view view_as vstack where"
)
_WITH_PLACES = ("max", "sort", "topk")  # operations that return values, then the positions of the values
_TIMES, _PACKING = ("mul", "multiply"), "pack_padded_sequence"
_INDEXING, _KEEPING = set(_INDEXING_NAMES.split()), set(_KEEPING_NAMES.split())


MOST = 2**20
"""The largest number that is tried with TorchScript, because no table that it might index has more rows."""


def rows(module: nn.Module, ones: Batch, names: Sequence[str]) -> dict[str, tuple[int, int]]:
    """Return, for each named input, the first and last number that keep all its indices within their tables.

    The module first runs on a batch whose open integers are all 1, then with the last numbers, which are lowered if it
    fails. Inputs that do not index a table are left out. TorchScript hides what it calls, so its inputs are tried
    instead.
    """
    runs = _Runs(doubled.copied(module), ones, names)
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        watched = _Watch(dict(zip(names, values(ones), strict=True)))
        try:
            with watched:
                runs.module(*values(ones))
        except Exception as error:  # findings before the error count, and the check will report it
            sys.stderr.write(f"the search for the model's indices stopped early: {error}\n")
            return watched.found
        is_hidden = any(isinstance(part, torch.jit.ScriptModule) for part in module.modules())
        return runs.tried() if is_hidden else runs.fitted(watched.found)


class _Runs:
    """Runs of a module on integers, which it may reject."""

    def __init__(self, module: nn.Module, ones: Batch, names: Sequence[str]) -> None:
        self.module, self._inputs = module, dict(zip(names, values(ones), strict=True))

    def takes(self, numbers: Mapping[str, int]) -> bool:
        """Return whether the module runs with these inputs, each filled with its number."""
        filled = {name: torch.full_like(self._inputs[name], number) for name, number in numbers.items()}
        try:
            self.module(*(self._inputs | filled).values())
        except Exception:  # a user's module may raise anything
            return False
        return True

    def fitted(self, spans: dict[str, tuple[int, int]]) -> dict[str, tuple[int, int]]:
        """Return the spans, with the last numbers lowered to values that the module accepts."""
        if self.takes({name: last for name, (_, last) in spans.items()}):
            return spans
        lasts: dict[str, int] = {}
        for name, (first, last) in spans.items():
            lasts[name] = self._last(name, first, last, lasts)
        return {name: (first, lasts[name]) for name, (first, _) in spans.items()}

    def tried(self) -> dict[str, tuple[int, int]]:
        """Return the spans of the inputs that are all 1 and for which the module rejects a large number."""
        spans: dict[str, tuple[int, int]] = {}
        for name, value in self._inputs.items():
            if _is_whole(value) and bool((value == 1).all()) and not self.takes({name: min(MOST, _most(value))}):
                last = self._last(name, 1, MOST, {other: last for other, (_, last) in spans.items()})
                spans[name] = 0 if self.takes({name: 0}) else 1, last
        return spans

    def _last(self, name: str, first: int, last: int, others: Mapping[str, int]) -> int:
        """Return the largest number from `first` to `last` that the module accepts in combination with the others."""
        refuses = lambda number: not self.takes({**others, name: number})  # noqa: E731 - a key
        return max(first, bisect_left(range(last + 1), True, lo=first + 1, key=refuses) - 1)


class _Watch(TorchFunctionMode):
    """Traces integers from the inputs to the tables that they index, and finds which ones each table accepts."""

    def __init__(self, inputs: Mapping[str, Tensor]) -> None:
        super().__init__()
        self.found: dict[str, tuple[int, int]] = {}
        # by identity, and kept alive so that no other tensor gets the same id
        followed = {name: value for name, value in inputs.items() if _is_whole(value) and not is_mask(name)}
        self._origins = {id(value): (value, {name}) for name, value in followed.items()}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        call: Call = args, kwargs or {}
        name = getattr(func, "__name__", "").partition(".")[0].strip("_")
        read = call if name not in _INDEXING else args[:1]
        origins = self._of(tree_leaves(read)) if name in _KEEPING else set()
        if name in _TIMES:  # a mask is a factor of an index: 0 or 1
            first, second = (self._of([factor]) for factor in args[:2])
            origins = set() if first & second else first or second
        if name in _INDEXING and (name != "one_hot" or max(args[1:], default=call[1].get("num_classes", -1)) > 0):
            for index in tree_leaves(call):
                call = self._within(func, call, index) if id(index) in self._origins else call
        if name == _PACKING and id(args[1]) in self._origins:  # packing accepts lengths beyond the sequences
            self._note(args[1], 1, args[0].shape[1 if args[2] else 0])
        answer = func(*call[0], **call[1])
        results = tree_leaves(answer)[: 1 if name in _WITH_PLACES else None]
        self._origins |= {id(value): (value, origins) for value in results if origins and _is_whole(value)}
        return answer

    def _of(self, parts: Sequence[object]) -> set[str]:
        return set().union(*(self._origins[id(part)][1] for part in parts if id(part) in self._origins))

    def _within(self, func: Any, call: Call, index: Tensor) -> Call:
        """Record which values are valid for the inputs that `index` comes from; return the call with a valid index."""

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
        if first is None or end is None or not index.numel():  # does not index a table, such as a mask of bytes
            return call
        last = bisect_left(range(end), True, lo=end // 2, key=lambda number: not takes(number)) - 1
        self._note(index, first, last)
        return _with(call, index, index.clamp(first, last))

    def _note(self, index: Tensor, first: int, last: int) -> None:
        origins = self._of([index])
        top = int(index.max())  # the index at which all origins are 1
        low, high = max(0, 1 + first - top), 1 + (last - top) // len(origins)
        for name in origins:
            lowest, highest = self.found.get(name, (low, high))
            self.found[name] = max(low, lowest), min(high, highest)


def _with(call: Call, old: Tensor, new: Tensor) -> Call:
    changed: Call = tree_map(lambda value: new if value is old else value, call)
    return changed


def _most(value: Tensor) -> int:
    return int(torch.iinfo(value.dtype).max)


def _is_whole(value: object) -> bool:
    return isinstance(value, Tensor) and value.dtype != torch.bool and not value.is_floating_point()
