"""Measures each layer's time after a process's timed section: as timed by the runtime, or else by torch module."""

from collections import defaultdict
from collections.abc import Sequence
from statistics import median

import torch
from torch import nn

from benchd.daemon.records import LayerTime
from benchd.daemon.worker.backends import LayerRun, LoadedModel
from benchd.daemon.worker.structures import Batch, values

RUNS = 11
WARM_UP = 3


def measure(loaded: LoadedModel, batch: Batch) -> list[LayerTime] | str:
    """Return the layers in the order of execution, or why they cannot be distinguished."""
    with torch.inference_mode():
        if loaded.layer_times:
            return _summed(loaded.layer_times(RUNS, *values(batch)))
        if loaded.module is None:
            return "this variant runs as a whole: its layers have no times of their own"
        return _of_modules(loaded, loaded.module, batch)


def _of_modules(loaded: LoadedModel, module: nn.Module, batch: Batch) -> list[LayerTime]:
    from benchd.daemon.worker.profiling import segments  # noqa: PLC0415 - knows each architecture; most runs need none

    split = segments.of(module)
    kinds = {path[-1]: type(part).__name__ for part, path in split.modules.items()}
    runs = [segments.run(lambda: loaded.run(batch), split, loaded.device) for _ in range(WARM_UP + RUNS)]
    rows = [
        [LayerRun(path[-1], ns / 1e6, kinds.get(path[-1], ""), path[-1:]) for path, ns in run.items()]
        for run in runs[WARM_UP:]
    ]
    return _summed(rows)


def _summed(runs: Sequence[Sequence[LayerRun]]) -> list[LayerTime]:
    """Return the median, over the runs, of each layer's total; a layer in a loop is reported for each iteration."""
    totals: dict[str, list[float]] = defaultdict(list)
    calls: dict[str, int] = defaultdict(int)
    rows: dict[str, LayerRun] = {}
    for run in runs:
        of_run: dict[str, float] = defaultdict(float)
        for row in run:
            of_run[row.name] += row.ms
            calls[row.name] += 1
            rows.setdefault(row.name, row)
        for name, ms in of_run.items():
            totals[name].append(ms)
    return [
        LayerTime(
            name=name,
            ms=median(times_ms),
            kind=rows[name].kind,
            calls=calls[name] / len(runs),
            covers=list(rows[name].covers),
        )
        for name, times_ms in totals.items()
    ]
