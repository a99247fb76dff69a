"""Profiling with torch: the methods that `benchd profile` runs in a child, and `profiled` for a loop of one's own."""

from benchd.daemon.worker.profiling.torch_profiler import profiled

__all__ = ["profiled"]
