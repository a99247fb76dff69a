"""Compares the answers of a shipped folder's files to its golden inputs with the float64 answers stored there."""

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch

from benchd.daemon.errors import UnfitModel
from benchd.daemon.measuring.protocol import Golden
from benchd.daemon.shipping import manifest
from benchd.daemon.shipping.manifest import GOLDEN, MANIFEST, NOT_GOLDEN, ONNX, Manifest
from benchd.daemon.worker.backends import LoadedModel
from benchd.daemon.worker.check import agreement
from benchd.daemon.worker.check.checking import number_format
from benchd.daemon.worker.structures import ONLY, Answers, answered, cast, like, same_sizes, values
from benchd.daemon.worker.workload import Workload


def refuse_others(folder: Path, workload: Workload, loaded: LoadedModel) -> None:
    """Raise UnfitModel if the loaded files give different answers to the folder's golden inputs, or names differ."""
    shipped = manifest.read(folder)
    _refuse_wide(shipped)
    with np.load(folder / GOLDEN, allow_pickle=False) as file:
        arrays = dict(file)
    rows_off: dict[str, int] = {}
    worst: dict[str, float] = {}
    for place in range(shipped.golden.batches):
        answers = _answers(shipped, arrays, place, workload, loaded)
        for name, tolerance in shipped.golden.tolerances.items():
            off = _off(answers, arrays[f"exact{place}:{name}"], name)
            rows_off[name] = rows_off.get(name, 0) + int((~(off <= tolerance)).sum())
            finite = off[np.isfinite(off)]
            if finite.size:
                worst[name] = max(worst.get(name, 0.0), float(finite.max()))
    _refuse(shipped.golden, rows_off, worst)


def _refuse_wide(shipped: Manifest) -> None:
    """Raise UnfitModel for a tolerance that is wider than any that `benchd ship` writes for this number format."""
    in_format = number_format(shipped.case.variant.precision, torch.device(shipped.environment.device))
    cap = agreement.row_cap(in_format, jumps=shipped.golden.rows_off > 0)
    for name, tolerance in shipped.golden.tolerances.items():
        if tolerance > cap:
            raise UnfitModel(
                f"{NOT_GOLDEN}: its {MANIFEST} lets {name} be off by {tolerance:.2g}, but {in_format} permits {cap:.2g}"
            )


def _refuse(golden: Golden, rows_off: Mapping[str, int], worst: Mapping[str, float]) -> None:
    for name, count in rows_off.items():
        if count > golden.rows_off:
            by = f"off by {worst[name]:.2g} of the largest answer" if name in worst else "NaN or infinite"
            raise UnfitModel(
                f"{NOT_GOLDEN}: {name} is {by}, in {count} of {golden.rows} inputs beyond {golden.tolerances[name]:.2g}"
            )


def _answers(
    shipped: Manifest, arrays: Mapping[str, np.ndarray], place: int, workload: Workload, loaded: LoadedModel
) -> Answers:
    """Return the answers to one golden batch by name; raise UnfitModel for different names."""
    own = [spec.name for spec in getattr(workload.plain, "inputs", [])] if workload.source.own else []
    names = [tensor.name for tensor in shipped.inputs]
    if own and own != names:
        raise UnfitModel(f"{NOT_GOLDEN}: {ONNX} reads {', '.join(own)}, not {', '.join(names)}")
    given = [values(cast(torch.from_numpy(arrays[f"input{place}:{name}"]), loaded.dtype))[0] for name in names]
    count = len(values(workload.images))
    batch = like(workload.images, [value.to(loaded.device) for value in given[:count]])
    try:
        with torch.inference_mode():
            output = loaded.run(batch, *(value.to(loaded.device) for value in given[count:]))
    except Exception as error:  # a runtime may raise anything for inputs with a different layout
        lines = str(error).strip().splitlines() or [type(error).__name__]
        raise UnfitModel(f"{NOT_GOLDEN}: it fails on the golden inputs: {lines[0]}") from error
    answers = answered(output)
    if workload.source.own and list(answers) == [ONLY]:
        (only,) = getattr(workload.plain, "outputs")  # noqa: B009 - of a file
        answers = {only: answers[ONLY]}
    wanted = [tensor.name for tensor in shipped.outputs]
    if sorted(answers) != sorted(wanted):
        raise UnfitModel(f"{NOT_GOLDEN}: its outputs are {', '.join(answers)}, not {', '.join(wanted)}")
    return answers


def _off(answers: Answers, exact: np.ndarray, name: str) -> np.ndarray:
    """Return how far each row of an output is off, as a share of the largest finite exact answer.

    NaN is always off; an infinity, for example in a mask, is not off if the exact answer is the same.
    """
    answer = answers[name]
    if not same_sizes(answer, exact):
        raise UnfitModel(f"{NOT_GOLDEN}: {name} has the shape {list(answer.shape)}, not {list(exact.shape)}")
    answer = answer.reshape(exact.shape)
    largest = float(np.abs(exact[np.isfinite(exact)]).max(initial=0.0)) or 1.0
    with np.errstate(invalid="ignore"):  # inf - inf
        off = np.where(answer == exact, 0.0, np.abs(answer - exact) / largest)
    rows: np.ndarray = off.max(axis=tuple(range(1, exact.ndim)), initial=0.0)
    return rows
