"""Cuts a forward pass into segments: each boundary waits for the device and reads the clock.

All time between two boundaries belongs to one part, so that nothing is counted twice or left out. Boundaries are module
calls and, in Vision Mamba, also its kernel calls, which are not modules.
"""

import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import takewhile
from types import ModuleType
from typing import Any

import torch
from torch import nn

from benchd.daemon.worker.profiling.calls import calls_through
from benchd.daemon.worker.profiling.nvtx import named_range
from benchd.daemon.worker.steps import wait_for
from benchd.models import vim
from benchd.models.snn_onepass import OnePass
from benchd.models.stbif import FoldedNetwork, SpikingNetwork

Path = tuple[str, ...]

OTHER: Path = ("other",)
RESET: Path = ("Model_Reset",)
ENCODING: Path = ("Time_Encoding",)
RESHAPING: Path = ("Input_Reshaping",)
FORWARD: Path = ("Model_Forward_Pass", "Model_Compute_All_Layers")
OUTPUT: Path = ("Output_Processing",)

STAGES = {
    **dict.fromkeys(("conv1", "bn1", "relu"), "Conv1_Block"),
    "maxpool": "MaxPool",
    **{f"layer{number}": f"Layer{number}_ResBlocks" for number in (1, 2, 3, 4)},
    **dict.fromkeys(("avgpool", "fc"), "Final_Layers"),
}
# the part to which a kernel's call belongs, and the part that follows up to the next boundary
VIM_KERNELS = {
    "causal_conv1d_pair": ("conv1d", "x_proj"),
    "delta_projection": ("scan", "scan"),
    "selective_scan_pair": ("scan", "out_proj"),
    "bidirectional_scan": ("scan", "out_proj"),
}


@dataclass(frozen=True)
class Segments:
    """Where to cut: each module's part, and the part that follows if that is neither its caller nor its group."""

    modules: Mapping[nn.Module, Path]
    after: Mapping[nn.Module, Path] = field(default_factory=dict)
    begins: Path = OTHER
    kernels: ModuleType | None = None


def of(module: nn.Module) -> Segments:
    """Return a model's segments: the stages of a catalogued one, otherwise the top two levels of its modules."""
    if isinstance(module, vim.Vim):
        return _vim(module)
    if isinstance(module, OnePass):
        return _onepass(module)
    if isinstance(module, SpikingNetwork):
        return _spiking(module)
    return Segments(_folded(module) if isinstance(module, FoldedNetwork) else _by_name(module))


def component(path: Path) -> Path:
    """Return the component to which a part belongs."""
    return path if path in {ENCODING, RESHAPING, OUTPUT} else FORWARD


def _vim(module: vim.Vim) -> Segments:
    modules: dict[nn.Module, Path] = {module.patch_embed.proj: ("patch_embed",)}
    after: dict[nn.Module, Path] = {}
    for number, block in enumerate(module.blocks()):
        layer = f"layers.{number}"
        modules[block.norm], after[block.norm] = (layer, f"{layer}.norm"), (layer, f"{layer}.in_proj")
    return Segments(modules | {module.norm_f: ("norm_f",), module.head: ("head",)}, after, kernels=vim)


def _onepass(module: OnePass) -> Segments:
    paths = {**_by_name(module), module.lif1: ("lif1+pool",), module.lif2: ("lif2+pool",)}
    stem = module.bn1 if module.batch_norm else module.conv1
    # the ReLU after fc1 is not a module
    return Segments(paths, {stem: RESHAPING, module.fc1: ("fc1",), module.fc2: OUTPUT}, begins=ENCODING)


def _spiking(module: SpikingNetwork) -> Segments:
    synapses, last_neuron, paths = module.synapses(), module.neurons()[-1], _folded(module)
    if synapses[0].receives == "spikes":
        return Segments(paths, {last_neuron: OUTPUT}, begins=ENCODING)
    return Segments(paths, {synapses[0].module: ENCODING, last_neuron: OUTPUT})


def _folded(module: FoldedNetwork) -> dict[nn.Module, Path]:
    """Return the module's paths by name; folded layers have the names of the layers that they replace."""
    paths = {inner: path for inner, path in _by_name(module).items() if not path[0].startswith("_")}
    return paths | {synapses.module: paths[synapses.layer] for synapses in module.synapses()}


def _by_name(module: nn.Module) -> dict[nn.Module, Path]:
    """Return the paths of the module's children and grandchildren, grouped by stage for a ResNet."""
    names = {name for name, _ in module.named_children() if not name.startswith("_")}
    staged = names <= STAGES.keys()
    paths: dict[nn.Module, Path] = {}
    for name, unit in _opened(module):
        lead = (STAGES[name.split(".")[0]],) if staged and not name.startswith("_") else ()
        if lead == ("MaxPool",):
            paths[unit] = lead
            continue
        paths[unit] = (*lead, name)
        paths |= {inner: (*lead, name, part) for part, inner in _opened(unit, f"{name}.")}
    return paths


def _opened(module: nn.Module, prefix: str = "") -> Iterator[tuple[str, nn.Module]]:
    """Yield the children by name, with lists and sequences replaced by their members."""
    for name, child in module.named_children():
        if isinstance(child, nn.Sequential | nn.ModuleList | nn.ModuleDict):
            yield from _opened(child, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", child


class Pass:
    """The nanoseconds of each part of one run, by path, each part in its own range. `place` maps a part's path.

    The time for reading the clock is not assigned to any part.
    """

    def __init__(self, segments: Segments, synchronise: Callable[[], None], place: Callable[[Path], Path]) -> None:
        self.times_ns: dict[Path, int] = defaultdict(int)
        self.path: Path = ()
        self._segments, self._synchronise, self._place = segments, synchronise, place
        self._callers: list[Path] = []
        self._ranges: list[AbstractContextManager[None]] = []
        self._since_ns = 0

    def cut(self, path: Path) -> None:
        """End the current part and begin this one; with an empty path, none begins."""
        path = path and self._place(path)
        if path == self.path:
            return
        self._synchronise()
        if self.path:
            self.times_ns[self.path] += time.monotonic_ns() - self._since_ns
        self._open_ranges(path)
        self.path, self._since_ns = path, time.monotonic_ns()

    def cut_within(self, part: str) -> None:
        """End the current part and begin `part` of the same layer."""
        self.cut((self.path[0], f"{self.path[0]}.{part}"))

    def call(self, module: nn.Module, forward: Callable[..., Any], *inputs: Any, **options: Any) -> Any:
        """Run a module's forward pass as its part."""
        path = self._segments.modules[module]
        caller = self._callers[-1] if self._callers else path[:-1] or OTHER
        self._callers.append(path)
        self.cut(path)
        try:
            return forward(*inputs, **options)
        finally:
            self._callers.pop()
            self.cut(self._segments.after.get(module, caller))

    def _open_ranges(self, path: Path) -> None:
        shared = len(list(takewhile(lambda names: names[0] == names[1], zip(self.path, path, strict=False))))
        while len(self._ranges) > shared:
            self._ranges.pop().__exit__(None, None, None)
        for name in path[shared:]:
            self._ranges.append(named_range(name))
            self._ranges[-1].__enter__()


def run(
    forward: Callable[[], object],
    segments: Segments,
    device: torch.device,
    place: Callable[[Path], Path] = lambda path: path,
) -> dict[Path, int]:
    """Return the nanoseconds of each part of one forward pass, in the order in which parts were first reached."""
    passed = Pass(segments, partial(wait_for, device), place)
    with ExitStack() as stack:
        stack.callback(passed.cut, ())  # closes the range even if the pass raises an error
        stack.enter_context(calls_through(passed.call, segments.modules))
        if segments.kernels:
            for name, parts in VIM_KERNELS.items():
                stack.enter_context(_kernel_cut(segments.kernels, name, parts, passed))
        passed.cut(segments.begins)
        forward()
        passed.cut(())
    return dict(passed.times_ns)


@contextmanager
def _kernel_cut(owner: ModuleType, name: str, parts: tuple[str, str], passed: Pass) -> Iterator[None]:
    """Replace the owner's kernel with one that runs as a separate segment."""
    kernel, (inside, after) = getattr(owner, name), parts

    def cut_kernel(*arguments: Any, **options: Any) -> Any:
        passed.cut_within(inside)
        result = kernel(*arguments, **options)
        passed.cut_within(after)
        return result

    setattr(owner, name, cut_kernel)
    try:
        yield
    finally:
        setattr(owner, name, kernel)
