"""Ranges by name, for Nsight Systems and for the trace of torch.profiler alike."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch.profiler import record_function


@contextmanager
def named_range(name: str) -> Iterator[None]:
    """Open a range for as long as the context lasts: NVTX's where there is a GPU, and torch.profiler's."""
    nvtx = torch.cuda.is_available()  # a build of torch for the CPU alone raises from each function of NVTX
    if nvtx:
        torch.cuda.nvtx.range_push(name)
    try:
        with record_function(name):
            yield
    finally:
        if nvtx:
            torch.cuda.nvtx.range_pop()
