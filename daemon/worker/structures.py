"""Represents inputs and outputs of any structure as named tensors, which can be copied, bound and compared."""

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from benchd.daemon.errors import UnfitModel
from benchd.daemon.records import InputSpec

ONLY = "output"  # the path of an output that is a single tensor
Answers = dict[str, NDArray[Any]]
"""A model's answer by path, in float64 or int64, with items or batches as the first dimension."""
OF_BATCH = " of batch "  # precedes the batch number in the path of an output whose shape differs between batches


@dataclass(frozen=True)
class Tensors:
    """Tensors that belong together: the inputs of a batch by name, or a model's answer by path.

    Its methods apply Tensor's method of the same name to each tensor, so that a step works with either type. `axes`
    contains the batch axis of inputs where it is not the first, None for an input that the batch shares. `lengths` (B,)
    says how much of the axis after the batch each item fills, for inputs whose items differ in length.
    """

    named: dict[str, Tensor]
    axes: Mapping[str, int | None] = field(default_factory=dict)
    lengths: Mapping[str, Tensor] = field(default_factory=dict)

    def each(self, change: Callable[[Tensor], Tensor]) -> "Tensors":
        """Return the tensors with `change` applied to each."""
        return replace(self, named={name: change(tensor) for name, tensor in self.named.items()})

    def to(self, device: torch.device | str, *, non_blocking: bool = False) -> "Tensors":
        """Return the tensors on a device."""
        return self.each(lambda tensor: tensor.to(device, non_blocking=non_blocking))

    def cpu(self) -> "Tensors":
        """Return the tensors in host memory."""
        return self.each(Tensor.cpu)

    def clone(self) -> "Tensors":
        """Return copies of the tensors."""
        return self.each(Tensor.clone)

    def __len__(self) -> int:
        return len(leading(self))

    def __getitem__(self, rows: Any) -> "Tensors":
        return by_item(lambda tensor: tensor[rows], self)


Batch = Tensor | Tensors
"""One tensor with the batch as its first axis, or several that belong together."""
BatchT = TypeVar("BatchT", Tensor, Tensors, Tensor | Tensors)


def dtype_of(spec: InputSpec) -> torch.dtype:
    """Return torch's dtype of an input."""
    dtype: torch.dtype = getattr(torch, spec.dtype or "float32")
    return dtype


def each(batch: Batch, change: Callable[[Tensor], Tensor]) -> Batch:
    """Return the batch with `change` applied to each of its tensors."""
    return batch.each(change) if isinstance(batch, Tensors) else change(batch)


def values(batch: Batch) -> tuple[Tensor, ...]:
    """Return the tensors of a batch in order."""
    return tuple(batch.named.values()) if isinstance(batch, Tensors) else (batch,)


def address(tensor: Tensor) -> int:
    """Return the address of the tensor's memory, which its views share."""
    return tensor.untyped_storage().data_ptr()


def bytes_of(batch: Batch) -> int:
    """Return the size of the batch's tensors in bytes."""
    return sum(value.numel() * value.element_size() for value in values(batch))


def content(tensor: Tensor) -> NDArray[np.uint8]:
    """Return a copy of the bytes of a tensor in host memory, even for types that numpy lacks."""
    # cloned, because a single number counts as contiguous with any stride
    dense = tensor.clone(memory_format=torch.contiguous_format)
    as_bytes: NDArray[np.uint8] = dense.reshape(-1).view(torch.uint8).numpy()
    return as_bytes


def like(batch: BatchT, parts: Iterable[Tensor]) -> BatchT:
    """Return these tensors as a batch with the same form and names."""
    if isinstance(batch, Tensors):
        return replace(batch, named=dict(zip(batch.named, parts, strict=True)))
    (only,) = parts
    return only


def leading(batch: Batch) -> Tensor:
    """Return the first tensor that has a batch, with the batch as its first axis."""
    axes = zip(values(batch), axes_of(batch), strict=True)
    return next(value.movedim(axis, 0) for value, axis in axes if axis is not None)


def by_item(change: Callable[..., Tensor], *batches: BatchT) -> BatchT:
    """Return the first batch with `change` applied to each tensor that has a batch, with the batch as its first axis.

    `change` also gets the same tensor of the other batches.
    """

    def changed(axis: int | None, *same: Tensor) -> Tensor:
        if axis is None:
            return same[0]
        changed = change(*(value.movedim(axis, 0) for value in same))
        return changed.movedim(0, axis).contiguous() if axis else changed

    result = like(batches[0], map(changed, axes_of(batches[0]), *map(values, batches)))
    if not isinstance(result, Tensors):
        return result
    every = [batch.lengths for batch in batches if isinstance(batch, Tensors)]
    return replace(result, lengths={name: change(*(lengths[name] for lengths in every)) for name in result.lengths})


def trimmed(batch: BatchT) -> BatchT:
    """Return a batch cut to its longest item, as padded by a server; unchanged if the lengths are equal."""
    if not isinstance(batch, Tensors) or not batch.lengths:
        return batch
    longest = {name: int(lengths.max()) for name, lengths in batch.lengths.items()}
    parts = {
        name: value[:, : longest.get(name)].contiguous() if name in longest else value
        for name, value in batch.named.items()
    }
    return replace(batch, named=parts, lengths={})


def axes_of(batch: Batch) -> list[int | None]:
    """Return the position of the batch among the axes of each tensor, None for a tensor that the batch shares."""
    return [batch.axes.get(name, 0) for name in batch.named] if isinstance(batch, Tensors) else [0]


def rows_of(batch: BatchT, rows: Tensor) -> BatchT:
    """Return these items of a batch; torch 2.9 cannot index unsigned types with a tensor."""
    return by_item(lambda value: value.index_select(0, rows.to(value.device)), batch)


def cycled(batch: BatchT, stop: int, start: int = 0) -> BatchT:
    """Return the items from `start` to `stop` of a batch that repeats after its last item."""
    return rows_of(batch, torch.arange(start, stop) % len(batch))


def joined(*batches: Batch) -> Batch:
    """Return the items of all batches, one after another, as one batch."""
    return by_item(lambda *parts: torch.cat(parts), *batches)


def rolled(batch: Batch, by: int) -> Batch:
    """Return different items with the same numbers: those of each item are shifted by `by` positions."""
    return by_item(lambda value: value.reshape(len(value), -1).roll(by, dims=1).reshape(value.shape), batch)


def cast(batch: Batch, dtype: torch.dtype) -> Batch:
    """Return the batch with its float32 tensors as `dtype`; other types already suit the model."""
    return each(batch, lambda tensor: tensor.to(dtype) if tensor.dtype == torch.float32 else tensor)


def float_type(dtypes: Iterable[torch.dtype]) -> torch.dtype:
    """Return the dtype for `cast`: float32 if it is among these or none is a float, otherwise the first float."""
    floats = [dtype for dtype in dtypes if dtype.is_floating_point]
    return torch.float32 if torch.float32 in floats or not floats else floats[0]


def spread(run: Callable[..., Any]) -> Callable[..., Any]:
    """Return `run`, which takes separate tensors, as a function of a batch and further arguments."""
    return lambda batch, *others: run(*batch.named.values(), *others)


def by_path(run: Callable[..., Any]) -> Callable[..., Tensors]:
    """Return `run`, whose answer may have any structure, as a function that returns tensors by path."""
    return lambda *inputs: Tensors(tensors(run(*inputs)))


class InTuple(nn.Module):
    """A module with an answer of any structure, wrapped to return a tuple of tensors in the order of their paths."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        """Return the module's answer without repeated tensors, with each complex number as two numbers."""
        answer = list(tensors(self.module(*inputs)).values())
        used = [*inputs, *answer]
        own = [
            value.clone() if any(value is other for other in used[: len(inputs) + place]) else value
            for place, value in enumerate(answer)
        ]
        return tuple(torch.view_as_real(value) if value.is_complex() else value for value in own)


def numbers(value: Tensor) -> NDArray[Any]:
    """Return a copy of a tensor in numpy: floats as float64, each complex number as two, and other types as int64."""
    real = torch.view_as_real(value.resolve_conj()) if value.is_complex() else value
    on_cpu = real.detach().cpu()
    if real.is_floating_point():
        return on_cpu.to(torch.float64, copy=True).numpy()
    return on_cpu.numpy().astype(np.int64)


def answered(output: object) -> Answers:
    """Return a model's answer as numbers by path."""
    return {path: numbers(value) for path, value in tensors(output).items()}


def gathered(answers: Sequence[Answers], sizes: Sequence[int]) -> Answers:
    """Return the answers to batches of these sizes by path, item by item if possible, otherwise batch by batch.

    If the shape differs between batches, for example with the number of detected boxes, each batch has its own path.
    """
    joined: Answers = {}
    for path in dict.fromkeys(path for answer in answers for path in answer):
        places = [place for place, answer in enumerate(answers) if path in answer]
        parts = [answers[place][path] for place in places]
        is_everywhere = len(places) == len(sizes)
        if is_everywhere and _lead(parts, sizes) and len({part.shape[1:] for part in parts}) == 1:
            joined[path] = np.concatenate(parts)
        elif is_everywhere and len({part.shape for part in parts}) == 1:
            joined[path] = np.stack(parts)
        else:
            joined |= {f"{path}{OF_BATCH}{place}": part[None] for place, part in zip(places, parts, strict=True)}
    return joined


def _lead(parts: Sequence[NDArray[Any]], sizes: Sequence[int]) -> bool:
    return all(part.shape[:1] == (size,) for part, size in zip(parts, sizes, strict=True))


def of_batch(outputs: Answers, place: int, batch_size: int, count: int) -> Answers:
    """Return the part of a result of `gathered` for `count` items that belongs to one batch."""
    parts: Answers = {}
    for path, value in outputs.items():
        name, _, number = path.partition(OF_BATCH)
        if number:
            parts |= {name: value[0]} if int(number) == place else {}
        else:
            parts[path] = value[place * batch_size : (place + 1) * batch_size] if len(value) == count else value[place]
    return parts


def same_sizes(one: NDArray[Any], other: NDArray[Any]) -> bool:
    """Return whether two answers to a batch have the same sizes, except for axes of length 1.

    For a batch of one, `of_batch` cannot tell whether the batch is an output's first dimension.
    """
    return one.squeeze().shape == other.squeeze().shape


def to_train(value: Tensor) -> Tensor:
    """Return an input that receives a gradient, if its type allows one."""
    return value.detach().requires_grad_(value.is_floating_point())


def first_scores(output: object) -> Tensor:
    """Return the first floating-point output as float32 (B, classes), for a loss.

    Raises UnfitModel if there is none whose first dimension is the batch.
    """
    floats = (part for part in tensors(output).values() if part.is_floating_point() and part.dim())
    scores = next(floats, None)
    if scores is None:
        raise UnfitModel("a loss needs an output (B, classes) of floats, but this model returns none")
    return scores.flatten(1).float() if scores.dim() > 1 else scores[:, None].float()


def tensors(output: object) -> dict[str, Tensor]:
    """Return each tensor of a model's answer by path: `logits`, `boxes[0]`, `0`, or `output` for a single tensor.

    Numbers become 0-dimensional tensors, and None is left out. Raises UnfitModel for anything other than tensors,
    numbers, None, or tuples, lists, dicts and dataclasses of them, and if nothing is left.
    """
    if isinstance(output, Tensors):
        return output.named
    by_path: dict[str, Tensor] = {}
    for path, value in _leaves(output, ""):
        if path in by_path:
            raise UnfitModel(f"the model returns two values with the path {path}: give them different names")
        by_path[path] = value
    if not by_path:
        raise UnfitModel("the model returns nothing: return tensors, or tuples, lists, dicts and dataclasses of them")
    return by_path


def _leaves(value: object, path: str) -> Iterator[tuple[str, Tensor]]:
    if value is None:
        return
    if isinstance(value, Tensor) and value.layout == torch.strided and not value.is_quantized:
        yield path or ONLY, value
    elif isinstance(value, int | float):  # includes bool
        yield path or ONLY, torch.tensor(value)
    else:
        for inner, part in _parts(value, path):
            yield from _leaves(part, inner)


def _parts(value: Any, path: str) -> Iterator[tuple[str, object]]:
    """Yield the path and the value of each part of a structure."""
    if isinstance(value, tuple) and hasattr(value, "_asdict"):
        value = value._asdict()
    elif dataclasses.is_dataclass(value) and not isinstance(value, Mapping):
        value = {member.name: getattr(value, member.name) for member in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        yield from ((f"{path}.{name}" if path else str(name), part) for name, part in value.items())
    elif isinstance(value, tuple | list):
        yield from ((f"{path}[{place}]" if path else str(place), part) for place, part in enumerate(value))
    else:
        kind = f"{type(value).__module__}.{type(value).__qualname__}".removeprefix("builtins.")
        kind = f"a {value.layout} tensor" if isinstance(value, Tensor) and not value.is_quantized else kind
        raise UnfitModel(
            f"the model returns {kind}{f' at {path}' if path else ''}: return dense tensors, numbers, or tuples, "
            "lists, dicts and dataclasses of them"
        )
