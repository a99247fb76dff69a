"""Rows of a trace for tests: an Orin, launches and kernels."""

from benchd.daemon.profiling.trace import Device, Kernel, Launch

ORIN = Device(id=0, name="Orin", compute_major=8, compute_minor=7, num_sms=8, max_threads_per_multiprocessor=1536)


def launch(name="k", *, blocks_per_sm=1.0, percent=50.0, **facts):
    given = {
        "grid": (8, 1, 1),
        "block": (128, 1, 1),
        "registers": 32,
        "shared_bytes": 0,
        "warps_per_sm": None,
        "active_blocks_per_sm": None,
        "limits": (),
    }
    return Launch(name=name, blocks_per_sm=blocks_per_sm, estimated_occupancy_percent=percent, **given | facts)


def kernel(start_us, duration_us, launched=None, device=0):
    return Kernel(
        start_ns=start_us * 1000,
        duration_ns=duration_us * 1000,
        launch=launched or launch(),
        device=device,
        stream=7,
        correlation=1,
        external_id=None,
    )
