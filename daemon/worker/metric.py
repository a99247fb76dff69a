"""Computes the user's metric of a variant's and plain fp32's answers to the same items, with the drop's interval."""

import copy
import hashlib
import inspect
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from benchd.daemon.errors import UsageError
from benchd.daemon.measuring.protocol import Job
from benchd.daemon.measuring.user_inputs import named_metric
from benchd.daemon.records import Accuracy, Variant
from benchd.daemon.verdicts import accuracy
from benchd.daemon.worker.backends import LoadedModel
from benchd.daemon.worker.check.observe import fed
from benchd.daemon.worker.child import blaming
from benchd.daemon.worker.samples import StoredItems, function_of
from benchd.daemon.worker.structures import ONLY, Tensors, content, cycled, tensors, values
from benchd.daemon.worker.top1 import parts, refuse_calibrated
from benchd.daemon.worker.workload import Workload
from benchd.models.data import ImageSet

MOST_DRAWS, FEWEST_DRAWS = 1000, 200
DRAWING_S = 60.0  # time limit for the draws of a slow metric, of which there are at least FEWEST_DRAWS
_ALONE = torch.empty(0)  # the form of an answer that is a single tensor, or a list


@dataclass(frozen=True)
class Metric:
    """A metric: its name, the function that compares answers with targets, and the user's `file` that defines it."""

    name: str
    better: Literal["higher", "lower"]
    judge: Callable[[Any, Any], Any]
    file: str

    @property
    def option(self) -> str:
        """Return the option that names this metric."""
        return f"--metric {Path(self.file).name}:{self.name}"

    def of(self, answers: Any, targets: Any) -> float:
        """Return the metric of these answers, a finite number; raise UsageError for anything else.

        The metric may change its arguments.
        """
        count = len(targets)
        with blaming(self.option, Path(self.file).parent):
            given = self.judge(answers, targets)
        if isinstance(given, Mapping):
            raise UsageError(f"{self.option}: it returns {', '.join(map(str, given))}; return one of these numbers")
        try:
            number = float(given)
        except (TypeError, ValueError, RuntimeError) as error:
            raise UsageError(f"{self.option}: it returned {type(given).__name__}, not a number") from error
        if not math.isfinite(number):
            raise UsageError(f"{self.option}: it returned {number:g} for {count} items; return a finite number")
        return number


def open_metric(text: str) -> Metric:
    """Return the metric given as FILE.py:FUNCTION[:higher|lower]; raise UsageError if it is not a metric."""
    place, better = named_metric(text)
    file, _, name = place.rpartition(":")
    option = f"--metric {Path(place).name}"
    scorer = function_of(place, option)
    if not hasattr(scorer, "update") or inspect.isclass(scorer):
        with blaming(option, Path(file).parent):
            scorer = scorer() if _needs_nothing(scorer) else scorer
    if hasattr(scorer, "update") and hasattr(scorer, "compute"):
        return Metric(name, better, _of_object(scorer), file)
    if not callable(scorer):
        kind = type(scorer).__name__
        raise UsageError(f"{option}: {kind} is not a function of answers and targets, and has no update and compute")
    return Metric(name, better, scorer, file)


def _needs_nothing(function: Any) -> bool:
    """Return whether the function can be called without arguments, like one that returns a metric object."""
    try:
        inspect.signature(function).bind()
    except (TypeError, ValueError):
        return False
    return True


def _of_object(state: Any) -> Callable[[Any, Any], Any]:
    """Return an object with `update` and `compute` as a function; each call uses a fresh copy of the object."""

    def judge(answers: Any, targets: Any) -> Any:
        fresh = copy.deepcopy(state)
        fresh.update(answers, targets)
        return fresh.compute()

    return judge


@dataclass(frozen=True)
class PerItem:
    """Answers to all items, or their targets: by path (N, ...), or a list of N where sizes differ between items.

    `form` is an answer as the model returned it, whose tensors stand for the paths.
    """

    by_path: Mapping[str, Tensor | list[Any]]
    form: Any = _ALONE

    def taken(self, rows: Sequence[int]) -> Any:
        """Return a copy of the answers to these items, in the model's own form."""
        index = torch.tensor(rows)
        parts = {
            path: part.index_select(0, index)
            if isinstance(part, Tensor)
            else [copy.deepcopy(part[row]) for row in rows]
            for path, part in self.by_path.items()
        }
        return _filled(self.form, parts)


def measure(
    workload: Workload,
    dataset: ImageSet | StoredItems,
    loaded: LoadedModel,
    reference: Callable[[], LoadedModel],
    job: Job,
    go_on: Callable[[int], None],
) -> Accuracy:
    """Return the job's metric on `dataset`, whose items have targets; `reference` loads plain fp32.

    `go_on` receives the progress in percent. Raises UsageError if the metric cannot judge the answers.
    """
    metric = open_metric(str(job.inputs.metric))
    requested, size = job.inputs.accuracy, job.case.batch_size
    indices = dataset.spread(len(dataset) if requested == "full" else int(requested or 0))
    count, is_reference = len(indices), job.case.variant == Variant()

    def run(model: LoadedModel, start: int, end: int, forms: Sequence[Any] = ()) -> tuple[list[Any], list[Any], str]:
        return _run(
            workload, dataset, model, indices, job, forms, lambda part: go_on(start + part * (end - start) // 100)
        )

    forms, expected, sha256 = run(reference(), 0, 20)
    theirs, targets = _joined(forms, size), PerItem({ONLY: _stacked(expected)})
    ours = theirs if is_reference else _joined(run(loaded, 20, 40, forms)[0], size)

    def judged(answers: PerItem) -> float:
        return metric.of(answers.taken(range(count)), targets.taken(range(count)))

    value, again = judged(ours), judged(ours)
    if again != value:
        raise UsageError(f"{metric.option}: it returned {value:.6g} and {again:.6g} for the same answers")
    drawn = list(_drawn(metric, ours, theirs, targets, count, lambda part: go_on(40 + part * 60 // 100)))
    return accuracy.of_metric(
        metric=metric.name,
        better=metric.better,
        value=value,
        reference=value if is_reference else judged(theirs),
        drawn=drawn,
        images=count,
        is_identical=is_reference or _are_same(ours, theirs),
        data=f"{count} of the {len(dataset)} items of {dataset.spec}",
        data_sha256=sha256,
    )


def _drawn(
    metric: Metric, ours: PerItem, theirs: PerItem, targets: PerItem, count: int, go_on: Callable[[int], None]
) -> Iterator[tuple[float, float]]:
    """Yield the metric of both models on resamples of `count` items; a resample on which it is undefined is left out.

    Raises UsageError if it is undefined on half of the resamples.
    """
    draw, draws, start = np.random.default_rng(0), MOST_DRAWS, time.monotonic()
    undefined = 0
    for number in range(MOST_DRAWS):
        if number >= draws:
            return
        rows = draw.integers(count, size=count).tolist()
        try:
            yield metric.of(ours.taken(rows), targets.taken(rows)), metric.of(theirs.taken(rows), targets.taken(rows))
        except UsageError:  # for example because this resample lacks a class
            undefined += 1
            if 2 * undefined > FEWEST_DRAWS:
                raise
        each_s = (time.monotonic() - start) / (number + 1)
        draws = min(MOST_DRAWS, max(FEWEST_DRAWS, int(DRAWING_S / each_s)))
        go_on(min(99, 100 * number // draws))


def _run(
    workload: Workload,
    dataset: ImageSet | StoredItems,
    model: LoadedModel,
    indices: list[int],
    job: Job,
    forms: Sequence[Any],
    go_on: Callable[[int], None],
) -> tuple[list[Any], list[Any], str]:
    """Return the answer to each batch, the items' targets, and a hash of all data that was read.

    `forms` are the batches' answers in the model's own form, for a model that gives them by path.
    """
    size, digest = job.case.batch_size, hashlib.sha256()
    answers: list[Any] = []
    targets: list[Any] = []
    for start, part in parts(indices, size):
        batch, expected = dataset.read(part)
        refuse_calibrated(batch, workload.source.calibrated, dataset.spec)
        for value in values(batch):
            digest.update(content(value).tobytes())
        digest.update(repr(expected).encode())
        padded = cycled(batch, -(-len(part) // size) * size)
        with torch.inference_mode():
            for inputs in fed(model, workload.plain, padded, size, job.case.seed + start):
                answers.append(_copied(model.run(*inputs), forms[len(answers)] if forms else None))
        targets += list(expected)
        go_on(100 * (start + len(part)) // len(indices))
    return answers, targets, digest.hexdigest()


def _copied(output: Any, form: Any) -> Any:
    """Return an answer on the CPU with floats as float32; one by path is put in the form, or becomes a dict."""
    by_path = tensors(output)
    if isinstance(output, Tensors):
        output = by_path if form is None else form
    # copied, because a runtime may write its next answer to the same memory
    on_cpu = {path: value.detach().to("cpu", copy=True) for path, value in by_path.items()}
    return _filled(
        output, {path: value.float() if value.is_floating_point() else value for path, value in on_cpu.items()}
    )


def _filled(form: Any, parts: Mapping[str, Any]) -> Any:
    """Return a copy of an answer of any form with these parts in place of its tensors, by path."""
    replaced = tensors(form)
    return copy.deepcopy(form, {id(value): parts[path] for path, value in replaced.items()})


def _joined(batches: Sequence[Any], size: int) -> PerItem:
    """Return the answers to batches of `size` items as answers to the items.

    A list of one dict per item, as detectors return, remains one. Raises UsageError for an answer without items.
    """
    by_batch = [tensors(batch) for batch in batches]
    have_items = all(value.shape[:1] == (size,) for by_path in by_batch for value in by_path.values())
    is_list = all(isinstance(batch, list) and len(batch) == size for batch in batches)
    if is_list and not (have_items and all(isinstance(part, Tensor) for batch in batches for part in batch)):
        return PerItem({ONLY: [item for batch in batches for item in batch]})
    joined: dict[str, Tensor | list[Any]] = {}
    for path in by_batch[0]:
        each = [by_path[path] for by_path in by_batch]
        if other := [value for value in each if value.shape[:1] != (size,)]:
            raise UsageError(
                f"--metric: the module's {path} is {list(other[0].shape)} for a batch of {size}: leave out of its "
                "answer whatever does not have the items as its first axis"
            )
        same = len({value.shape for value in each}) == 1
        joined[path] = torch.cat(each) if same else [item for value in each for item in value]
    return PerItem(joined, batches[0])


def _stacked(targets: Sequence[Any]) -> Tensor | list[Any]:
    """Return targets of equal shape as a tensor (N, ...), others as a list."""
    if all(isinstance(target, int | float | Tensor | np.ndarray) for target in targets):
        as_tensors = [torch.as_tensor(target) for target in targets]
        if len({target.shape for target in as_tensors}) == 1:
            return torch.stack(as_tensors)
    return list(targets)


def _are_same(ours: PerItem, theirs: PerItem) -> bool:
    """Return whether two models' answers are the same, number for number."""
    our_tensors, their_tensors = tensors(ours.by_path), tensors(theirs.by_path)
    return our_tensors.keys() == their_tensors.keys() and all(
        torch.equal(our_tensors[path], their_tensors[path]) for path in our_tensors
    )
