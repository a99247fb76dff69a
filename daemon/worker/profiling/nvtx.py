"""Named ranges that appear in both Nsight Systems and torch.profiler's trace."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch.profiler import record_function


@contextmanager
def named_range(name: str) -> Iterator[None]:
    """Open a range for the duration of the context: torch.profiler's and, if there is a GPU, NVTX's."""
    nvtx = torch.cuda.is_available()  # in a CPU-only build of torch, every NVTX function raises an error
    if nvtx:
        torch.cuda.nvtx.range_push(name)
    try:
        with record_function(name):
            yield
    finally:
        if nvtx:
            torch.cuda.nvtx.range_pop()
