"""Eager PyTorch, captured once as a CUDA graph: one launch per run instead of one per kernel.

Runs alternate between two slots, each with its own input, output and memory pool, so that two may be in flight. A run
overwrites the output of the run before the previous one.
"""

import itertools
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchd.daemon.errors import Unsupported
from benchd.daemon.runtimes import Precision
from benchd.daemon.worker.backends import LoadedModel, eager
from benchd.daemon.worker.source import Source
from benchd.daemon.worker.structures import Batch, Tensors, cast, tensors, values

SLOTS = 2
WARM_UP_RUNS = 3  # runs in which libraries choose kernels and allocate memory, which a capture forbids


def load(source: Source, precision: Precision, device: torch.device, example: Batch) -> LoadedModel:
    """Return the module as graphs, captured here, so that this counts as loading, not as part of the first run."""
    if device.type != "cuda":
        raise Unsupported("CUDA graphs need a CUDA device")
    plain = eager.load(source, precision, device, example)
    captured: dict[int, Callable[..., Batch]] = {}

    def run(*inputs: Tensor) -> Batch:
        # in a check, a rate-encoded model also gets random numbers, which requires a separate graph
        if len(inputs) not in captured:
            captured[len(inputs)] = rotating([_slot(plain.run, inputs) for _ in range(SLOTS)])
        return captured[len(inputs)](*inputs)

    run(*values(cast(example, plain.dtype).to(device)))
    return LoadedModel(run, plain.dtype, device, None)


@dataclass(frozen=True)
class Slot:
    """Device memory for one run at a time: `launch` reads `inputs` and writes `output` on the current stream.

    `alive` is a reference to the launch's other memory.
    """

    inputs: Sequence[Tensor]
    launch: Callable[[], object]
    output: Batch
    alive: object

    def __call__(self, *inputs: Tensor) -> Batch:
        """Copy the inputs to this slot and run; raise ValueError for a wrong shape, which a copy would broadcast."""
        for buffer, given in zip(self.inputs, inputs, strict=True):
            if buffer.shape != given.shape:
                raise ValueError(f"this was captured for an input {tuple(buffer.shape)}, not {tuple(given.shape)}")
            buffer.copy_(given, non_blocking=True)
        self.launch()
        return self.output


def rotating(slots: Sequence[Slot]) -> Callable[..., Batch]:
    """Return a function whose calls run on the slots in turn."""
    order = itertools.cycle(slots)

    def run(*inputs: Tensor) -> Batch:
        return next(order)(*inputs)

    return run


def capture(run: Callable[[], Any]) -> tuple[torch.cuda.CUDAGraph, Any]:
    """Return the graph of `run` and the output that each replay writes; raise Unsupported with the reason.

    Each capture has its own stream, because cuBLAS keeps one workspace per stream, which two graphs in flight must not
    share.
    """
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    graph, pool = torch.cuda.CUDAGraph(), torch.cuda.graph_pool_handle()
    # torch 2.8 to 2.10 would keep the RNG seed as an inference tensor, which a replay outside that mode cannot write
    with torch.inference_mode(mode=False), torch.no_grad(), torch.cuda.stream(stream):
        for _ in range(WARM_UP_RUNS):
            run()
        stream.synchronize()
        try:
            with torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local"):
                output = run()
        except Exception as error:
            with suppress(RuntimeError):  # torch 2.11 leaves the pool open, which would block any other capture
                torch._C._cuda_endAllocateToPool(torch.cuda.current_device(), pool)
            raise Unsupported(f"this cannot be captured as a CUDA graph: {capture_error(error)}") from error
    return graph, output


def capture_error(error: Exception) -> str:
    """Return the error that broke a capture, and the model's line.

    After an op's error, the end of the capture raises again, with the op's error as its context.
    """
    cause = error.__context__ if isinstance(error.__context__, Exception) else error
    message = (str(cause).strip() or type(cause).__name__).splitlines()[0]
    torch_folder = Path(torch.__file__).parent
    frames = [f for f in traceback.extract_tb(cause.__traceback__) if torch_folder not in Path(f.filename).parents]
    return f"{message} ({Path(frames[-1].filename).name}:{frames[-1].lineno}: {frames[-1].line})"


def _slot(run: Callable[..., Any], inputs: Sequence[Tensor]) -> Slot:
    with torch.inference_mode(mode=False):  # otherwise copies from outside inference mode fail
        buffers = [value.clone() for value in inputs]
    graph, output = capture(partial(run, *buffers))
    answer = output if isinstance(output, Tensor) else Tensors(tensors(output))
    return Slot(buffers, graph.replay, answer, run)
