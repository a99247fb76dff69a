"""Rows of a trace for tests: an Orin, launches, kernels and the calls of the host."""

from benchd.daemon.profiling.trace.trace import (
    Annotation,
    Kernel,
    LaunchConfiguration,
    MemoryOperation,
    RuntimeCall,
    TracedGpu,
    TracedOperator,
)

ORIN = TracedGpu(id=0, name="Orin", compute_major=8, compute_minor=7, num_sms=8, max_threads_per_multiprocessor=1536)


def launch(name="k", *, blocks_per_sm=1.0, percent=50.0, **facts):
    given = {
        "grid": (8, 1, 1),
        "block": (128, 1, 1),
        "registers": 32,
        "shared_bytes": 0,
        "active_blocks_per_sm": None,
        "limits": (),
    }
    return LaunchConfiguration(
        name=name, blocks_per_sm=blocks_per_sm, estimated_occupancy_percent=percent, **given | facts
    )


def kernel(start_us, duration_us, launched=None, device=0, correlation=1, external_id=None):
    return Kernel(
        start_ns=start_us * 1000,
        duration_ns=duration_us * 1000,
        launch=launched or launch(),
        device=device,
        correlation=correlation,
        external_id=external_id,
    )


def _span(start_us, duration_us):
    return {"start_ns": start_us * 1000, "duration_ns": duration_us * 1000}


def operator(name, start_us, duration_us, external_id=None, thread=1):
    return TracedOperator(name=name, thread=thread, external_id=external_id, **_span(start_us, duration_us))


def call(name, start_us, duration_us, correlation=0, thread=1):
    return RuntimeCall(name=name, thread=thread, correlation=correlation, **_span(start_us, duration_us))


def annotation(name, start_us, duration_us, thread=1, on_gpu=False):
    return Annotation(name=name, thread=thread, on_gpu=on_gpu, **_span(start_us, duration_us))


def memory_operation(name, start_us, duration_us, correlation=0, external_id=None):
    return MemoryOperation(
        name=name,
        correlation=correlation,
        external_id=external_id,
        **_span(start_us, duration_us),
    )
