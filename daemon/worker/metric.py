"""Computes the user's metric of a variant's and plain fp32's answers to the same items, with the drop's interval."""

import copy
import hashlib
import inspect
import math
import time
from collections.abc import Callable, Mapping, Sequence
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
from benchd.daemon.worker.samples import StoredItems, function_of
from benchd.daemon.worker.structures import ONLY, content, cycled, tensors, values
from benchd.daemon.worker.top1 import parts, refuse_calibrated
from benchd.daemon.worker.workload import Workload
from benchd.models.data import ImageSet

MOST_DRAWS, FEWEST_DRAWS = 1000, 200
DRAWING_S = 60.0  # time limit for the draws of a slow metric, of which there are at least FEWEST_DRAWS
_PARAMETERS = 2


@dataclass(frozen=True)
class Metric:
    """A metric: its name, the function that compares answers with targets, and the `option` that named it."""

    name: str
    better: Literal["higher", "lower"]
    judge: Callable[[Any, Any], Any]
    option: str

    def of(self, answers: Any, targets: Any) -> float:
        """Return the metric of these answers, a finite number; raise UsageError for anything else."""
        try:
            given = self.judge(answers, targets)
        except Exception as error:  # the user's code may raise anything
            raise UsageError(f"{self.option}: it raised {type(error).__name__}: {error}") from error
        if isinstance(given, Mapping):
            raise UsageError(f"{self.option}: it returns {', '.join(map(str, given))}; return one of these numbers")
        try:
            number = float(given)
        except (TypeError, ValueError, RuntimeError) as error:
            raise UsageError(f"{self.option}: it returned {type(given).__name__}, not a number") from error
        if not math.isfinite(number):
            raise UsageError(f"{self.option}: it returned {number:g} for {len(targets)} items; return a finite number")
        return number


def open_metric(text: str) -> Metric:
    """Return the metric given as FILE.py:FUNCTION[:higher|lower]; raise UsageError if it is not a metric."""
    place, better = named_metric(text)
    option = f"--metric {Path(place).name}"
    scorer = function_of(place, option)
    if not hasattr(scorer, "update") or inspect.isclass(scorer):
        scorer = scorer() if _needs_nothing(scorer) else scorer
    if hasattr(scorer, "update") and hasattr(scorer, "compute"):
        return Metric(place.rpartition(":")[2], better, _of_object(scorer), option)
    if not callable(scorer):
        kind = type(scorer).__name__
        raise UsageError(f"{option}: {kind} is not a function of answers and targets, and has no update and compute")
    return Metric(place.rpartition(":")[2], better, scorer, option)


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
    requested = job.inputs.accuracy
    indices = dataset.spread(len(dataset) if requested == "full" else int(requested or 0))
    is_reference = job.case.variant == Variant()
    share = 40 if is_reference else 20  # percentage of the stage for one model's answers
    ours, targets, sha256 = _answers(workload, dataset, loaded, indices, job, lambda part: go_on(part * share // 100))
    value = metric.of(ours, targets)
    again = metric.of(ours, targets)
    if again != value:
        raise UsageError(f"{metric.option}: it returned {value:.6g} and {again:.6g} for the same answers")
    if is_reference:
        theirs, reference_value = ours, value
    else:
        theirs, _, _ = _answers(
            workload, dataset, reference(), indices, job, lambda part: go_on(share + part * share // 100)
        )
        reference_value = metric.of(theirs, targets)
    drawn = list(_drawn(metric, ours, theirs, targets, lambda part: go_on(40 + part * 60 // 100)))
    return accuracy.of_metric(
        metric=metric.name,
        better=metric.better,
        value=value,
        reference=reference_value,
        drawn=drawn,
        images=len(indices),
        is_identical=is_reference or _are_same(ours, theirs),
        data=f"{len(indices)} of the {len(dataset)} items of {dataset.spec}",
        data_sha256=sha256,
    )


def _drawn(metric: Metric, ours: Any, theirs: Any, targets: Any, go_on: Callable[[int], None]) -> Any:
    """Yield the metric of both models on resampled items; a resample on which it is undefined is left out.

    Raises UsageError if it is undefined on half of the resamples.
    """
    draw, count, start = np.random.default_rng(0), MOST_DRAWS, time.monotonic()
    undefined = 0
    for number in range(MOST_DRAWS):
        if number >= count:
            return
        rows = draw.integers(len(targets), size=len(targets)).tolist()
        chosen = taken(targets, rows)
        try:
            yield (metric.of(taken(ours, rows), chosen), metric.of(taken(theirs, rows), chosen))
        except UsageError:  # for example because this resample lacks a class
            undefined += 1
            if 2 * undefined > FEWEST_DRAWS:
                raise
        each_s = (time.monotonic() - start) / (number + 1)
        count = min(MOST_DRAWS, max(FEWEST_DRAWS, int(DRAWING_S / each_s)))
        go_on(min(99, 100 * number // count))


def _answers(
    workload: Workload,
    dataset: ImageSet | StoredItems,
    model: LoadedModel,
    indices: list[int],
    job: Job,
    go_on: Callable[[int], None],
) -> tuple[Any, Any, str]:
    """Return the answers to all items, in the model's own form, the targets, and a hash of all data that was read."""
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
            for place, inputs in enumerate(fed(model, workload.plain, padded, size, job.case.seed + start)):
                count = min(size, len(part) - place * size)
                answers.append(taken(_by_item(_restored(model.run(*inputs)), size), list(range(count))))
        targets += list(expected)
        go_on(100 * (start + len(part)) // len(indices))
    return _joined(answers), _stacked(targets), digest.hexdigest()


class Items(list[Any]):
    """A list with one element per item, as detectors return."""


def _restored(output: object) -> Any:
    """Return a model's answer as CPU tensors, with floats as float32, in dicts and lists rebuilt from the paths."""
    tree: dict[str, Any] = {}
    for path, value in tensors(output).items():
        inner, (*outer, last) = tree, path.replace("[", ".").replace("]", "").split(".")
        for name in outer:
            inner = inner.setdefault(name, {})
        # copied, because a runtime may write its next answer to the same memory
        on_cpu = value.detach().to("cpu", copy=True)
        inner[last] = on_cpu.float() if on_cpu.is_floating_point() else on_cpu
    return tree[ONLY] if list(tree) == [ONLY] else _with_lists(tree)


def _with_lists(tree: Any) -> Any:
    """Return the tree with dicts whose keys count from 0 turned into lists."""
    if not isinstance(tree, dict):
        return tree
    parts = {name: _with_lists(part) for name, part in tree.items()}
    return list(parts.values()) if list(parts) == [str(place) for place in range(len(parts))] else parts


def _by_item(answer: Any, size: int) -> Any:
    """Return a batch's answer, marked as Items if it is a list of one dict per item."""
    if isinstance(answer, list) and len(answer) == size and all(isinstance(part, dict) for part in answer):
        return Items(answer)
    return answer


def taken(answers: Any, rows: Sequence[int]) -> Any:
    """Return the answers or targets that belong to these items."""
    if isinstance(answers, Items):
        return Items(answers[row] for row in rows)
    if isinstance(answers, dict):
        return {name: taken(part, rows) for name, part in answers.items()}
    if isinstance(answers, list):
        return [taken(part, rows) for part in answers]
    if not answers.dim():
        raise UsageError("--metric: the model returns one number for a batch, not one answer per item")
    return answers.index_select(0, torch.tensor(rows))


def _joined(batches: Sequence[Any]) -> Any:
    """Return the answers to all batches as a single answer to all items."""
    first = batches[0]
    if isinstance(first, Items):
        return Items(item for batch in batches for item in batch)
    if isinstance(first, dict):
        return {name: _joined([batch[name] for batch in batches]) for name in first}
    if isinstance(first, list):
        return [_joined([batch[place] for batch in batches]) for place in range(len(first))]
    if len({batch.shape[1:] for batch in batches}) == 1:
        return torch.cat(list(batches))
    return Items(item for batch in batches for item in batch)


def _stacked(targets: Sequence[Any]) -> Any:
    """Return targets of equal shape as a tensor (N, ...), others as a list."""
    if all(isinstance(target, int | float | Tensor | np.ndarray) for target in targets):
        as_tensors = [torch.as_tensor(target) for target in targets]
        if len({target.shape for target in as_tensors}) == 1:
            return torch.stack(as_tensors)
    return Items(targets)


def _are_same(ours: Any, theirs: Any) -> bool:
    """Return whether two answers are the same, number for number."""
    our_tensors, their_tensors = (
        tensors(list(answer) if isinstance(answer, Items) else answer) for answer in (ours, theirs)
    )
    return our_tensors.keys() == their_tensors.keys() and all(
        torch.equal(our_tensors[path], their_tensors[path]) for path in our_tensors
    )
