"""Profiling with torch: the methods that `benchd profile` runs in a child, and `profiled` for your own loop."""

from benchd.daemon.worker.profiling.torch_profiler import profiled

__all__ = ["profiled"]
