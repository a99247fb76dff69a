"""The profiled work: one whole step of a workload, and its separate forward and backward passes.

- `forward` runs one batch that is already on the device, in inference mode, and waits for the device.
- `eval` takes a batch from a DataLoader, copies it to the device, runs the model and CrossEntropyLoss, and reads the
  loss.
- `train` runs one batch that is already on the device, the loss and the backward pass, and waits for the device.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import chain, repeat
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from benchd.daemon.errors import Unsupported
from benchd.daemon.profiling.profile import ProfileJob
from benchd.daemon.profiling.trace.trace import END_OF_STEP
from benchd.daemon.records import ModelFacts
from benchd.daemon.worker import backends, building, workload
from benchd.daemon.worker.backends import LayerRun, LoadedModel
from benchd.daemon.worker.profiling.nvtx import named_range
from benchd.daemon.worker.steps import now, wait_for
from benchd.daemon.worker.structures import Batch, cast, cycled, each, first_scores, like, to_train, values
from benchd.daemon.worker.workload import Workload
from benchd.models import catalog
from benchd.models.data import ImageSet

COPY_RANGE = "copy to device"


class Whole(nn.Module):
    """A model that a backend runs as a whole, without modules that could be inspected."""

    def __init__(self, run: Callable[..., Any], model: nn.Module) -> None:
        super().__init__()
        self._run = (run,)  # a tuple, because a compiled model is a module and would become a submodule
        self.class_name = type(model).__name__

    def forward(self, *inputs: Batch) -> Any:
        """Return the model's answer to a batch on the device."""
        return self._run[0](*inputs)


@dataclass(kw_only=True)
class Work:
    """A loaded model, a batch of `images` (B, ...) and `labels` (B,) on the device, and the calls that use them.

    `module` is the model, or a `Whole`; `loss` is called after it by `eval` and `train`. `step` is one whole step.
    `forward` runs `images` and returns the scores; `backward` follows a `forward` of `train`, otherwise it is None.
    `layer_times` is the runtime's own (`LoadedModel`), and `missing` collects the reason for each figure that a method
    cannot provide.
    """

    module: nn.Module
    images: Batch
    device: torch.device
    labels: Tensor | None
    job: ProfileJob
    facts: ModelFacts
    step: Callable[[], None]
    forward: Callable[[], Any]
    backward: Callable[[], None] | None = None
    layer_times: Callable[..., list[list[LayerRun]]] | None = None
    loss: nn.Module = field(default_factory=nn.CrossEntropyLoss)
    missing: dict[str, str] = field(default_factory=dict)

    def timed(self, call: Callable[[], object]) -> int:
        """Return the nanoseconds of a call, from an idle device until the device has finished all of it."""
        begun = now(self.device)
        call()
        return now(self.device) - begun


def open_work(job: ProfileJob) -> Work:
    """Build and load the job's model; raise Unsupported, UsageError or any error of a user's module."""
    device = building.open_device(job)
    built = workload.build(job)
    variant, batch = job.case.variant, job.case.batch_size
    backends.prepare(variant, built.source, device, batch)
    loaded = backends.load(variant, built.source, device, built.example(batch))
    module = loaded.module or Whole(loaded.run, built.source.module)
    run = loaded.run if loaded.module else module
    pool = _pool(built, batch, loaded, run)
    *inputs, labels = (part[:batch].to(device, copy=True) for part in pool.tensors)
    images = like(built.images, inputs)
    loss = nn.CrossEntropyLoss()
    passes: list[Callable[[], Any]] = [partial(_inferred, run, images)]
    if job.workload == "train":
        _refuse_training(job, module)
        training = _Training(run, images, labels, module, loss)
        passes = [training.forward, training.backward]
    evaluation = _evaluation(run, images, pool, loss) if job.workload == "eval" else None
    return Work(
        module=module,
        images=images,
        device=device,
        labels=labels,
        job=job,
        facts=built.facts,
        step=partial(next, evaluation) if evaluation else partial(_step, passes, device),
        forward=passes[0],
        backward=passes[1] if passes[1:] else None,
        layer_times=loaded.layer_times,
        loss=loss,
    )


def _pool(built: Workload, batch: int, loaded: LoadedModel, run: Callable[..., Any]) -> TensorDataset:
    """Return whole batches of images in the model's input dtype, with labels, which are random if the data has none."""
    count = max(1, len(built.images) // batch) * batch
    images = cast(cycled(built.images, count), loaded.dtype)
    with torch.inference_mode():
        classes = first_scores(run(images[:batch].to(loaded.device))).shape[1]
    labels = torch.randint(classes, (count,), generator=torch.Generator().manual_seed(0))
    is_labelled = isinstance(built.dataset, ImageSet) and built.dataset.why_unlabelled(classes) is None
    return TensorDataset(
        *values(images), cycled(built.labels, count) if built.labels is not None and is_labelled else labels
    )


def _refuse_training(job: ProfileJob, module: nn.Module) -> None:
    variant = job.case.variant
    if isinstance(module, Whole):
        raise Unsupported(f"{variant.name} runs the model as a whole, which cannot be trained")
    if variant.kernels == "custom" and not catalog.trains(job.case.model, "custom"):
        raise Unsupported(catalog.TRAINING)


def _step(passes: Sequence[Callable[[], Any]], device: torch.device) -> None:
    """Run the passes and wait for the device, in a range that separates this wait from the model's own."""
    for each_pass in passes:
        each_pass()
    with named_range(END_OF_STEP):
        wait_for(device)


def _inferred(run: Callable[..., Any], images: Batch) -> Any:
    with torch.inference_mode():
        return run(images)


def _evaluation(run: Callable[..., Any], images: Batch, pool: TensorDataset, loss: nn.Module) -> Iterator[None]:
    """Run one whole step in each iteration."""
    device = values(images)[0].device
    loader = DataLoader(pool, len(images), pin_memory=device.type == "cuda")
    for *inputs, labels in chain.from_iterable(repeat(loader)):
        with torch.inference_mode():
            with named_range(COPY_RANGE):
                batch = like(images, inputs).to(device, non_blocking=True)
                wanted = labels.to(device, non_blocking=True)
            loss(first_scores(run(batch)), wanted).item()
        yield


class _Training:
    _lost: Tensor  # the loss of the last forward pass

    def __init__(
        self, run: Callable[..., Any], images: Batch, labels: Tensor, module: nn.Module, loss: nn.Module
    ) -> None:
        self._run, self._labels, self._module, self._loss = run, labels, module.train(), loss
        trains = any(parameter.requires_grad for parameter in module.parameters())
        self._images = images if trains else each(images, to_train)  # the images get gradients, as in a microbenchmark

    def forward(self) -> Tensor:
        self._module.zero_grad(set_to_none=True)
        scores = first_scores(self._run(self._images))
        self._lost = self._loss(scores, self._labels)
        return scores

    def backward(self) -> None:
        torch.autograd.backward(self._lost)
