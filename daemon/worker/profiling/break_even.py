"""The method `break-even`: measures a spiking net at firing rates from 0 to 1, between runs of its ANN.

Each layer of neurons still computes, but then passes on spikes that were drawn before the clock started: independent
ones at the same rate in every layer, with the layer's own shape, dtype and height. The rate is therefore exact and the
same everywhere, without dynamics. Points come in random order, each followed by the net without spikes, which is
exposed to the same disturbances.
"""

import random
import time
from collections.abc import Callable
from contextlib import ExitStack
from statistics import median
from typing import cast

import msgspec
import torch
from torch import Tensor, nn

from benchd.daemon.profiling.profile import RateTimes, Sweep
from benchd.daemon.records import Window
from benchd.daemon.worker.profiling.layers import require_modules
from benchd.daemon.worker.profiling.work import Work, open_work
from benchd.kernels.exact_conv2d import layer
from benchd.models import catalog
from benchd.models.stbif import SpikingNetwork

RATES = (0.0, 0.005, 0.01, 0.02, 0.03, 0.05, 0.07, 0.1, 0.14, 0.2, 0.27, 0.35, 0.45, 0.55, 0.7, 0.85, 1.0)
MIN_ROUNDS = 3
RUNS = 3  # runs timed together, after one that refills the caches


def run(work: Work) -> Sweep:
    """Return the times of this process; raise Unsupported for a variant that runs as a whole."""
    require_modules(work)
    module = cast(SpikingNetwork, work.module)  # true for every catalogued net with an ANN
    ann, drawn = _without_spikes(work), _DrawnSpikes(module, work.forward)
    points = {rate: RateTimes(rate=rate) for rate in RATES}
    own = RateTimes(rate=drawn.own_rate)
    with drawn:
        for _ in range(max(MIN_ROUNDS, work.job.runs)):
            # the order in which they are measured
            for point in random.sample([*points.values(), own], len(points) + 1):
                drawn.draw(None if point is own else point.rate)
                before = layer.calls()
                work.timed(work.forward)
                point.kernels = ", ".join(sorted((layer.calls() - before).keys()))
                point.ns.append(_timed(work))
                ann.timed(ann.forward)
                point.ann_ns.append(_timed(ann))
        if work.job.energy_s:
            for point in list(points.values())[::2]:
                drawn.draw(point.rate)
                point.window, point.inferences = _repeated(work)
                point.ann_window, point.ann_inferences = _repeated(ann)
    return Sweep(ann=ann.job.case.case_id, time_steps=module.time_steps, points=list(points.values()), own=own)


def _without_spikes(work: Work) -> Work:
    """Return the net with the same weights but without spikes, in the same variant."""
    job, case = work.job, work.job.case
    name = catalog.entry(case.model).ann
    options = {option: value for option, value in case.options.items() if option in catalog.entry(name).options}
    return open_work(msgspec.structs.replace(job, case=msgspec.structs.replace(case, model=name, options=options)))


def _timed(work: Work) -> float:
    return float(median(work.timed(work.forward) for _ in range(RUNS)))


def _repeated(work: Work) -> tuple[Window, int]:
    """Repeat a run while the power sensor is sampled; return the window and the inferences in it."""
    begun = time.monotonic_ns()
    end, count = time.monotonic() + work.job.energy_s, 0
    while time.monotonic() < end:
        work.timed(work.forward)
        count += len(work.images)
    return Window(begun, time.monotonic_ns()), count


class _DrawnSpikes:
    """Replaces the outputs of each layer of neurons with drawn spikes, inside a `with` block."""

    def __init__(self, module: SpikingNetwork, forward: Callable[[], object]) -> None:
        self._heights = module.emitters()
        self._own: dict[nn.Module, Tensor] = {}
        self._drawn: dict[nn.Module, Tensor] = {}
        with ExitStack() as hooks:
            for emitter in self._heights:
                hooks.callback(emitter.register_forward_hook(self._keep).remove)
            forward()
        fired = sum(int(spikes.count_nonzero()) for spikes in self._own.values())
        self.own_rate = fired / sum(spikes.numel() for spikes in self._own.values())
        self._hooks = ExitStack()

    def __enter__(self) -> None:
        for emitter in self._heights:
            self._hooks.callback(emitter.register_forward_hook(lambda module, *_: self._drawn.get(module)).remove)

    def __exit__(self, *_: object) -> None:
        self._hooks.close()

    def _keep(self, emitter: nn.Module, _: object, spikes: Tensor) -> None:
        self._own[emitter] = spikes.clone(memory_format=torch.preserve_format)

    def draw(self, rate: float | None) -> None:
        """Draw spikes at this rate for all layers; with None, the layers emit their own."""
        self._drawn.clear()
        if rate is None:
            return
        for emitter, height in self._heights.items():
            spikes = torch.empty_like(self._own[emitter], memory_format=torch.preserve_format).bernoulli_(rate)
            self._drawn[emitter] = spikes.mul_(height.to(spikes.dtype))
