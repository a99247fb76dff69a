"""A model's answers to some inputs, and the codes that its neurons emit."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from benchd.daemon.worker.backends import LoadedModel
from benchd.daemon.worker.check.agreement import Observation
from benchd.daemon.worker.structures import Batch, Tensors, answered, cast, gathered, of_batch, trimmed
from benchd.daemon.worker.workload import shows_codes


def untold(done: str) -> None:
    """Ignore the progress of an observation."""


def observe(
    loaded: LoadedModel,
    plain: nn.Module,
    images: Batch,
    batch_size: int,
    seed: int,
    rows: Sequence[int] | None = None,
    tell: Callable[[str], None] = untold,
) -> Observation:
    """Run all images batch by batch, and collect the outputs and, if visible, the neurons' codes.

    `plain` reveals which random numbers the model needs, which the loaded form may hide; each image gets the numbers
    for its index in `rows` (by default counted from 0). `tell` is called with the progress before each batch.
    """
    outputs, codes, sizes = [], [], list[int]()
    with torch.inference_mode():
        for inputs in fed(loaded, plain, images, batch_size, seed, rows):
            tell(f"image {sum(sizes) + 1} of {len(images)}")
            with _codes(loaded.module, len(inputs[0])) as by_layer:
                output = loaded.run(*inputs)
            outputs.append(answered(output))
            codes += [np.concatenate(by_layer, axis=1)] if by_layer else []
            sizes.append(len(inputs[0]))
    return Observation(gathered(outputs, sizes), np.concatenate(codes) if codes else None)


def fed(
    loaded: LoadedModel, plain: nn.Module, images: Batch, batch_size: int, seed: int, rows: Sequence[int] | None = None
) -> Iterator[list[Batch]]:
    """Yield the model's inputs for each batch, on its device: the images and any random numbers that it needs."""
    rows = range(len(images)) if rows is None else rows
    for start in range(0, len(images), batch_size):
        batch = trimmed(images[start : start + batch_size])
        inputs = [batch, *uniforms(plain, rows[start : start + batch_size], batch, seed)]
        yield [cast(value, loaded.dtype).to(loaded.device) for value in inputs]


def of_batches(observation: Observation, places: Iterable[int], batch_size: int, count: int) -> Observation:
    """Return the part of an observation of `count` images that belongs to these batches."""
    chosen = list(places)
    outputs = gathered(
        [of_batch(observation.outputs, place, batch_size, count) for place in chosen], [batch_size] * len(chosen)
    )
    rows = [row for place in chosen for row in range(place * batch_size, (place + 1) * batch_size)]
    return Observation(outputs, None if observation.codes is None else observation.codes[rows])


def of_images(observation: Observation, rows: Sequence[int]) -> Observation:
    """Return the part of an observation that belongs to these images, for outputs with a batch dimension."""
    chosen, images = list(rows), max(map(len, observation.outputs.values()))
    outputs = {path: values[chosen] for path, values in observation.outputs.items() if len(values) == images}
    return Observation(outputs, None if observation.codes is None else observation.codes[chosen])


def uniforms(module: nn.Module, rows: Sequence[int], batch: Batch, seed: int) -> list[Tensor]:
    """Return the random numbers of a rate-encoded model, (T, B, ...), the same for the same image in any batch."""
    if getattr(module, "encoding", None) != "rate" or isinstance(batch, Tensors):
        return []
    steps = int(getattr(module, "time_steps"))  # noqa: B009 - the attribute of whichever module encodes by rate
    draws = [torch.Generator().manual_seed(seed + row) for row in rows]
    return [torch.stack([torch.rand(steps, *batch.shape[1:], generator=draw) for draw in draws], dim=1)]


@contextmanager
def _codes(module: nn.Module | None, batch: int) -> Iterator[list[np.ndarray]]:
    """Inside the block, collect the codes (batch, features) of each layer of neurons in forward order."""
    by_layer: list[np.ndarray] = []
    steps = int(getattr(module, "time_steps", 1))

    def keep(neuron: nn.Module, _: object, output: Tensor) -> None:
        codes = torch.round(output / getattr(neuron, "scale", 1.0)).to(torch.int8)
        by_image = codes.reshape(steps, batch, -1).transpose(0, 1).reshape(batch, -1)
        by_layer.append(by_image.cpu().numpy())

    with ExitStack() as hooks:
        neurons: Any = getattr(module, "neurons", None)
        for neuron in neurons() if module and shows_codes(module) else []:
            hooks.callback(neuron.register_forward_hook(keep).remove)
        yield by_layer
