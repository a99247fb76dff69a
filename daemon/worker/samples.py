"""A user's own inputs: the arrays in a file, or the items that a function yields, with any targets among them."""

import hashlib
import re
import sys
import zipfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import safetensors
import safetensors.torch
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from benchd.daemon.errors import UsageError
from benchd.daemon.machine.sysfs import memory_bytes
from benchd.daemon.records import DTYPES, InputSpec
from benchd.daemon.worker import user_module
from benchd.daemon.worker.child import blaming
from benchd.daemon.worker.structures import Batch, Tensors, content, dtype_of
from benchd.exporters.artifacts import sha256_of
from benchd.models import data

TARGETS = "targets"
"""The name of the array with one target per item."""

_UNNAMED = re.compile(r"^arr_(\d+)$")  # numpy's names for unnamed arrays
# limits because a function may yield endlessly, and a small item takes more memory than its numbers
_MEMORY_SHARE = 0.5
_MOST_YIELDED = 200_000


@dataclass(frozen=True)
class StoredItems:
    """All items of a file or a function.

    `inputs` maps each name to (N, ...), or to a single value, without N, that all items share; the name of an only
    input is "". `targets` has one target per item, or none. Items of different lengths are zero-padded, and `lengths`
    (N,) contains their lengths.
    """

    spec: str
    sha256: str
    count: int
    inputs: dict[str, Tensor]
    targets: list[Any]
    lengths: dict[str, Tensor] = field(default_factory=dict)

    preprocessing = "none: the items are fed as they are"

    def __len__(self) -> int:
        return self.count

    def spread(self, count: int) -> list[int]:
        """Return `count` indices spread evenly over the items, or all of them if there are fewer."""
        return data.spread(len(self), count)

    def read(self, indices: Sequence[int]) -> tuple[Batch, list[Any]]:
        """Return these items as a batch, and their targets."""
        rows = torch.tensor(list(indices))
        shared = {name: None for name, value in self.inputs.items() if not value.dim()}
        parts = {name: value if name in shared else value.index_select(0, rows) for name, value in self.inputs.items()}
        of_rows = {name: length.index_select(0, rows) for name, length in self.lengths.items()}
        is_plain = len(parts) == 1 and not of_rows
        batch = next(iter(parts.values())) if is_plain else Tensors(parts, shared, of_rows)
        return batch, [self.targets[i] for i in indices] if self.targets else []

    def taken(self, count: int) -> tuple[Batch, str]:
        """Return `count` items spread evenly, or all if there are fewer, and a description of their source."""
        indices = self.spread(count)
        source = f"{len(indices)} of the {len(self)} items of {self.spec} (SHA-256 {self.sha256[:12]})"
        for length in self.lengths.values():
            return self.read(indices)[0], f"{source}, of lengths {length.min()} to {length.max()}"
        return self.read(indices)[0], source

    def refuse_untargeted(self) -> None:
        """Raise UsageError unless there is a target for each item, which a metric needs."""
        count = sum(target is not None for target in self.targets)
        if count != len(self):
            has = f"{len(self)} items, but targets for {count}" if count else "no targets"
            remedy = f"add an array {TARGETS!r} with one per item, or yield tuples (inputs, target)"
            raise UsageError(f"--metric: {self.spec} has {has}: {remedy}")

    def specs(self) -> list[InputSpec]:
        """Return the inputs of one item, as read by a model that does not declare any."""
        is_only = len(self.inputs) == 1
        return [
            self._said(InputSpec("" if name.isdigit() or (is_only and "." not in name) else name), value)
            for name, value in self.inputs.items()
        ]

    def read_by(self, specs: Sequence[InputSpec]) -> tuple["StoredItems", list[InputSpec]]:
        """Return the items as read by a model with these inputs, and the inputs with details filled in from the items.

        Raises UsageError for an input without items, and for items that do not fit the input's type or shape.
        """
        names = [spec.name or str(place) for place, spec in enumerate(specs)]
        given, lengths = self.inputs, self.lengths
        if len(given) == len(specs) and (len(specs) == 1 or not set(names) & set(given)):
            lengths = {name: lengths[own] for name, own in zip(names, given, strict=True) if own in lengths}
            given = dict(zip(names, given.values(), strict=True))
        if set(given) != set(names):
            raise UsageError(
                f"--inputs {self.spec}: it has {', '.join(self.inputs) or 'one input'}, but the model takes "
                f"{', '.join(names)}"
            )
        values = {name: self._as_read(spec, given[name]) for name, spec in zip(names, specs, strict=True)}
        read = [self._said(spec, values[name]) for name, spec in zip(names, specs, strict=True)]
        return replace(self, inputs=values, lengths=lengths), read

    def _as_read(self, spec: InputSpec, value: Tensor) -> Tensor:
        wanted = dtype_of(spec) if spec.dtype else value.dtype
        shape = list(value.shape[1:]) if value.dim() else []
        if spec.shape and shape != spec.shape:
            raise UsageError(f"--inputs {self.spec}: {spec.name or 'its input'} is {shape}, but the model takes {spec}")
        changed = value.to(wanted)
        if not wanted.is_floating_point and not torch.equal(changed.to(value.dtype), value):
            raise UsageError(f"--inputs {self.spec}: {spec.name or 'its input'} has numbers beyond {spec.dtype}")
        return changed

    def _said(self, spec: InputSpec, value: Tensor) -> InputSpec:
        is_shared = not value.dim()
        return msgspec.structs.replace(
            spec,
            dtype=next(name for name in DTYPES if getattr(torch, name) == value.dtype),
            shape=list(value.shape[0 if is_shared else 1 :]),
            batch_axis=None if is_shared else 0,
            span=None,
            file=self.spec,
            items=0 if is_shared else len(self),
            sha256=self.sha256,
        )


def open_samples(text: str) -> StoredItems:
    """Return the items of FILE.npz, FILE.safetensors or FILE.py:FUNCTION; raise UsageError if they are unusable."""
    option = f"--inputs {Path(text).name}"
    lengths: dict[str, Tensor] = {}
    if reader := _READERS.get(Path(text).suffix):
        arrays = reader(text, option)
        targets = arrays.pop(TARGETS, None)
        sha256 = sha256_of(Path(text))
    else:
        with blaming(option, Path(text).parent):
            items = list(_yielded(text, option))
        (arrays, lengths), targets = _gathered([inputs for inputs, _ in items], option), [target for _, target in items]
        targets = None if all(target is None for target in targets) else targets
        read = [*arrays.values(), *lengths.values()]
        sha256 = hashlib.sha256(b"".join(content(value).tobytes() for value in read)).hexdigest()
    values = {name: _fed(value, f"{option}: {name or 'its input'}") for name, value in arrays.items()}
    counts = {name: len(value) for name, value in values.items() if value.dim()}
    if not counts or min(counts.values()) == 0:
        raise UsageError(f"{option}: no items; the first axis of an array counts them")
    if len(set(counts.values())) > 1:
        details = ", ".join(f"{name} {count}" for name, count in counts.items())
        raise UsageError(f"{option}: its arrays have different numbers of items ({details})")
    count, targets = next(iter(counts.values())), [] if targets is None else list(targets)
    if targets and len(targets) != count:
        raise UsageError(f"{option}: {count} items, but {len(targets)} targets; give one per item")
    return StoredItems(Path(text).name, sha256, count, values, targets, lengths)


def _npz(path: str, option: str) -> dict[str, Any]:
    try:
        with Path(path).open("rb") as opened, np.load(opened, allow_pickle=False) as file:
            return {
                _UNNAMED.sub(r"\1", name): torch.from_numpy(np.ascontiguousarray(file[name])) for name in file.files
            }
    except OSError as error:
        raise UsageError(f"{option}: {error.strerror or error}") from error
    except (ValueError, TypeError, KeyError, zipfile.BadZipFile) as error:
        raise UsageError(f"{option}: not a complete .npz file of numbers ({error})") from error


def _safetensors(path: str, option: str) -> dict[str, Any]:
    try:
        return dict(safetensors.torch.load_file(path))
    except OSError as error:
        raise UsageError(f"{option}: {error.strerror or error}") from error
    except safetensors.SafetensorError as error:
        raise UsageError(f"{option}: not a complete .safetensors file ({error})") from error


def _npy(path: str, option: str) -> dict[str, Any]:
    """Return the only input of a shipped folder."""
    return {"0": torch.from_numpy(np.load(path, allow_pickle=False))}


_READERS = {".npz": _npz, ".npy": _npy, ".safetensors": _safetensors}


def _yielded(text: str, option: str) -> Iterator[tuple[dict[str, Tensor], Any]]:
    """Yield each item of a function as its named inputs and its target; a tuple is (inputs, target)."""
    function = function_of(text, option)
    items = function() if callable(function) and not hasattr(function, "__getitem__") else function
    if not isinstance(items, Iterable) and not hasattr(items, "__getitem__"):
        raise UsageError(f"{option}: it returned {type(items).__name__}; yield the inputs of one item at a time")
    size, limit = 0, _MEMORY_SHARE * memory_bytes()
    for number, item in enumerate(_one_by_one(items)):
        if number == _MOST_YIELDED:
            raise UsageError(f"{option}: it yields more than {number:,} items; end it after a few hundred")
        pair = item if isinstance(item, tuple) else (item, None)
        if len(pair) != 2:
            raise UsageError(
                f"{option}: it yields {len(pair)} values; yield a tuple (inputs, target), or a list of inputs"
            )
        inputs, target = pair
        named = dict(_leaves(inputs, "", option))
        size += sum(value.numel() * value.element_size() for value in named.values())
        if size > limit:
            raise UsageError(f"{option}: it yields more than {limit / 2**30:.3g} GiB; end it after a few hundred items")
        yield named, target


def _one_by_one(items: Any) -> Iterator[Any]:
    """Yield the items of an iterable, or of a data set up to its length."""
    if hasattr(items, "__len__") and hasattr(items, "__getitem__") and not isinstance(items, Mapping):
        return (items[i] for i in range(len(items)))
    return iter(items)


def _leaves(value: Any, path: str, option: str) -> Iterator[tuple[str, Tensor]]:
    """Yield each tensor of an item by name: `audio`, `batch.audio`, `0` in a list, or "" for the item itself."""
    if isinstance(value, Mapping):
        for name, part in value.items():
            yield from _leaves(part, f"{path}.{name}" if path else str(name), option)
    elif isinstance(value, list) and any(isinstance(part, Tensor | np.ndarray) for part in value):
        if path:
            raise UsageError(f"{option}: {path} is a list within the inputs; yield a dict there, or a tensor")
        for place, part in enumerate(value):
            yield from _leaves(part, str(place), option)
    else:
        try:
            yield path, torch.as_tensor(value)
        except (TypeError, ValueError, RuntimeError) as error:
            raise UsageError(f"{option}: {path or 'an item'} is {type(value).__name__}, not numbers") from error


def _gathered(items: Sequence[Mapping[str, Tensor]], option: str) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return the named inputs of all items, zero-padded to the longest, and the lengths of those that differ."""
    gathered: dict[str, Tensor] = {}
    lengths: dict[str, Tensor] = {}
    for name in items[0] if items else ():
        parts = [item.get(name) for item in items]
        first = items[0][name].shape
        other = next(
            (
                i
                for i, part in enumerate(parts)
                if part is None or part.shape[1:] != first[1:] or part.dim() != len(first)
            ),
            None,
        )
        if other is not None:
            part = parts[other]
            sizes = "missing" if part is None else list(part.shape)
            raise UsageError(
                f"{option}: {name or 'the input'} is {list(items[0][name].shape)} in item 0 and {sizes} in item "
                f"{other}; items may differ only in their first axis"
            )
        present = [part for part in parts if part is not None]
        if len({part.shape for part in present}) > 1:
            lengths[name] = torch.tensor([len(part) for part in present])
            gathered[name] = pad_sequence(present, batch_first=True)
        else:
            gathered[name] = torch.stack(present)
    return gathered, lengths


def _fed(value: Tensor, label: str) -> Tensor:
    """Return numbers in an input's type, floats as float32; raise UsageError for other types."""
    if value.is_floating_point():
        if value.isnan().any():
            raise UsageError(f"{label}: it has values that are not numbers (NaN)")
        return value.float()
    if all(getattr(torch, name) != value.dtype for name in DTYPES):
        raise UsageError(f"{label}: its numbers are {value.dtype}; use one of {', '.join(DTYPES)}")
    return value


def function_of(text: str, option: str) -> Any:
    """Return the function FILE.py:FUNCTION, whose file is not part of the model's code; raise UsageError if absent."""
    where, _, name = text.rpartition(":")
    with blaming(option, Path(where).parent):
        source = user_module.imported(where, "", option)
    del sys.modules[source.__name__]
    if not hasattr(source, name):
        raise UsageError(f"{option}: {Path(where).name} has no {name!r}")
    return getattr(source, name)
