"""Measures memory during one step: peak and timeline by purpose, the largest allocations, and a snapshot file.

All of this is derived from the allocations that torch.profiler records, and from the calls around each:

- parameters: those of the model, including buffers; inputs: the batch, and memory for loading and copying batches;
- gradients: the parameters' gradients that remain after the step;
- activations: allocated in a module's call and held beyond it; temporaries: freed within it, or allocated in a backward
  pass;
- other: allocated outside all modules, or allocated before the step for an unknown purpose.
"""

import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from benchd.daemon.errors import Unsupported
from benchd.daemon.profiling.profile import Allocation, MemoryPoint, MemoryProfile
from benchd.daemon.profiling.trace import trace
from benchd.daemon.profiling.trace.nesting import Nesting
from benchd.daemon.profiling.trace.trace import DATA_LOADER_RANGE, MODULE_RANGE, Ints, MemoryEvent, Trace
from benchd.daemon.worker.profiling.nvtx import named_range
from benchd.daemon.worker.profiling.torch_profiler import module_ranges
from benchd.daemon.worker.profiling.work import COPY_RANGE, Whole, Work
from benchd.daemon.worker.structures import address, values

SNAPSHOT = "memory_snapshot.pickle"
CATEGORIES = ("parameters", "inputs", "activations", "gradients", "temporaries", "other")
STEP_RANGE = "memory step"
LARGEST = 10
POINTS = 200

_BACKWARD = "autograd::engine::"
_ALLOCATORS = ("aten::empty", "aten::new_empty", "aten::resize_")  # operators called by the one that needs the memory


@dataclass(kw_only=True)
class HeldMemory:
    """One allocation, held from `start_ns` to `end_ns`; None means before or after the step."""

    address: int
    bytes: int
    category: str = "other"
    start_ns: int | None = None
    end_ns: int | None = None
    call: int = -1


def run(work: Work) -> MemoryProfile:
    """Profile one step after a warm-up step; raise Unsupported if no allocation is recorded."""
    is_cuda = work.device.type == "cuda"
    work.step()
    work.module.zero_grad(set_to_none=True)  # done before, because on a CPU freeing earlier memory is not recorded
    earlier = _held(work)
    if isinstance(work.module, Whole):
        work.missing["parameters"] = "this backend hides its weights: on a GPU they count as other memory"
    if is_cuda:
        torch.cuda.reset_peak_memory_stats()
        rest = torch.cuda.memory_allocated() - sum(block.bytes for block in earlier)
        earlier.append(HeldMemory(address=0, bytes=max(0, rest)))
    nesting, blocks, start_ns = traced_blocks(_traced(work), earlier, is_cuda)
    gradients = {address(parameter.grad) for parameter in work.module.parameters() if parameter.grad is not None}
    categorise(nesting, blocks, gradients)
    peak_bytes = torch.cuda.max_memory_allocated() if is_cuda else None
    return table(nesting, blocks, start_ns, str(work.device), peak_bytes, _snapshot(work))


def _held(work: Work) -> list[HeldMemory]:
    """Return the memory of the model and the batch before the step."""
    by_category: dict[str, Iterable[Tensor | None]] = {
        "parameters": [*work.module.parameters(), *work.module.buffers()],
        "inputs": [*values(work.images), work.labels],
    }
    blocks = {
        address(tensor): HeldMemory(address=address(tensor), bytes=tensor.untyped_storage().nbytes(), category=category)
        for category, tensors in by_category.items()
        for tensor in tensors
        if tensor is not None and tensor.device.type == work.device.type
    }
    return list(blocks.values())


def _traced(work: Work) -> Trace:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        with (
            module_ranges([work.module, work.loss]),
            profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True) as profiler,
            named_range(STEP_RANGE),
        ):
            work.step()
        profiler.export_chrome_trace(str(path))
        return trace.read(path)


def traced_blocks(traced: Trace, held: Sequence[HeldMemory], is_cuda: bool) -> tuple[Nesting, list[HeldMemory], int]:
    """Return the calls of a trace, the memory of its step including earlier memory, and the start of the step.

    Unknown memory that is freed counts as earlier memory of the category "other". Raises Unsupported if nothing was
    recorded.
    """
    step = next(row for row in traced.annotations if row.name == STEP_RANGE)
    events = [
        event
        for event in sorted(traced.memory_events, key=lambda event: event.t_ns)
        if event.on_gpu == is_cuda and step.start_ns <= event.t_ns < step.end_ns
    ]
    if not events:
        raise Unsupported("torch.profiler recorded no allocation in the step: this backend manages its own memory")
    nesting = Nesting(traced)
    return nesting, _blocks(events, held, nesting), step.start_ns


def _blocks(events: Iterable[MemoryEvent], earlier: Sequence[HeldMemory], nesting: Nesting) -> list[HeldMemory]:
    blocks = list(earlier)
    live = {block.address: block for block in earlier}
    for event in events:
        if event.bytes > 0:
            call = nesting.at(event.thread, event.t_ns)
            block = HeldMemory(address=event.address, bytes=event.bytes, start_ns=event.t_ns, call=call)
            live[event.address] = block
            blocks.append(block)
        elif known := live.pop(event.address, None):
            known.end_ns = event.t_ns
        else:
            blocks.append(HeldMemory(address=event.address, bytes=-event.bytes, end_ns=event.t_ns))
    return blocks


def categorise(nesting: Nesting, blocks: Iterable[HeldMemory], gradients: set[int]) -> None:
    """Set the purpose of each block of the step; `gradients` are the addresses of gradients left by the step."""
    for block in blocks:
        if block.start_ns is not None:
            is_gradient = block.end_ns is None and block.address in gradients
            block.category = "gradients" if is_gradient else _category(nesting, block)


def _category(nesting: Nesting, block: HeldMemory) -> str:
    for call in nesting.around(block.call):
        name = nesting.names[nesting.name[call]]
        if name.startswith((DATA_LOADER_RANGE, COPY_RANGE)):
            return "inputs"
        if name.startswith(_BACKWARD):
            return "temporaries"
        if name.startswith(MODULE_RANGE):
            outlives = block.end_ns is None or block.end_ns > nesting.end[call]
            return "activations" if outlives else "temporaries"
    return "other"


def table(
    nesting: Nesting,
    blocks: Sequence[HeldMemory],
    start_ns: int,
    device: str,
    peak_bytes: int | None,
    snapshot: str | None,
) -> MemoryProfile:
    """Return the sums of the blocks over time; `peak_bytes` is the allocator's peak, None for that of the blocks."""
    t_ns, held_bytes = _course(blocks, start_ns)
    total = held_bytes.sum(axis=1)
    peak = int(total.argmax())
    points = np.unique(np.append(np.linspace(0, len(t_ns) - 1, POINTS).astype(int), peak))
    own = sorted((block for block in blocks if block.start_ns is not None), key=lambda block: -block.bytes)
    return MemoryProfile(
        device=device,
        peak_bytes=int(total[peak]) if peak_bytes is None else peak_bytes,
        peak_by_category=_by_category(held_bytes[peak]),
        timeline=[MemoryPoint(t_ns=int(t_ns[i]), by_category=_by_category(held_bytes[i])) for i in points],
        largest=[_allocation(nesting, block) for block in own[:LARGEST]],
        snapshot=snapshot,
    )


def _course(blocks: Sequence[HeldMemory], start_ns: int) -> tuple[Ints, Ints]:
    """Return times since the step began, and the bytes held from each time on, one column per category."""
    changes = [(0, CATEGORIES.index(block.category), block.bytes) for block in blocks if block.start_ns is None]
    for block in blocks:
        column = CATEGORIES.index(block.category)
        if block.start_ns is not None:
            changes.append((block.start_ns - start_ns, column, block.bytes))
        if block.end_ns is not None:
            changes.append((block.end_ns - start_ns, column, -block.bytes))
    times, columns, sizes = np.array(sorted(changes, key=lambda change: change[0]), np.int64).T
    added = np.zeros((len(times), len(CATEGORIES)), np.int64)
    added[np.arange(len(times)), columns] = sizes
    last = np.append(times[1:] != times[:-1], True)  # keeps the state after all simultaneous changes
    return times[last], added.cumsum(axis=0)[last]


def _by_category(sizes: Ints) -> dict[str, int]:
    return dict(zip(CATEGORIES, sizes.tolist(), strict=True))


def _allocation(nesting: Nesting, block: HeldMemory) -> Allocation:
    calls = [(nesting.kind[call], nesting.names[nesting.name[call]]) for call in nesting.around(block.call)]
    modules = [name[len(MODULE_RANGE) :] for _, name in calls if name.startswith(MODULE_RANGE)]
    operators = [name for kind, name in calls if kind == nesting.OPERATOR]
    callers = [name for name in operators if not name.startswith(_ALLOCATORS)] or operators[-1:]
    return Allocation(
        bytes=block.bytes,
        module=next(iter(modules), None),
        operator=next(iter(callers), None),
        category=block.category,
    )


def _snapshot(work: Work) -> str | None:
    """Write the allocator's snapshot of one more step, for https://docs.pytorch.org/memory_viz, and return its name."""
    if work.device.type != "cuda":
        work.missing["snapshot"] = "only the CUDA allocator can write a snapshot"
        return None
    try:
        torch.cuda.memory._record_memory_history()
        work.step()
        torch.cuda.memory._dump_snapshot(str(Path(work.job.output) / SNAPSHOT))
        torch.cuda.memory._record_memory_history(enabled=None)
    except (AttributeError, RuntimeError, OSError) as error:  # both functions are private to torch
        work.missing["snapshot"] = f"torch {torch.__version__} could not write one: {error}"
        return None
    return SNAPSHOT
