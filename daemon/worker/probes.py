"""The device's peak rates in the measuring process: bytes copied, FLOPs and exponentials per second.

Probes directly follow the timed section, so that they see its clocks and threads and disturb nothing. Each figure is
the best of the runs that fit a small budget: a floor needs what the device can do, not what it does on average.
"""

import ctypes
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path

import torch

from benchd.daemon.records import ExponentialsBy, Precision, Probes
from benchd.daemon.worker.backends import eager
from benchd.kernels import compiler
from benchd.kernels.dispatch import Unavailable

BUDGET_S = 0.03
MIN_RUNS = 8  # on a busy machine even the shorter of two runs may be slow
COPY_BYTES = {"cpu": 64 * 2**20, "cuda": 256 * 2**20}  # beyond the caches, but not more: fresh pages take time
MATRIX_SIDES = (256, 512, 1024, 2048, 4096, 8192)
CHAIN_STEPS = 512
CHAIN_WIDTH = 1024  # per CPU thread: 4 KB
CHAIN_NUMBERS_CUDA = 2**21  # one wave of the largest GPU
C_SOURCE = Path(__file__).with_name("probes.c")
TORCH_NUMBERS = 2**18  # fits the L2 cache, and is enough for every thread

Run = Callable[[], object]


def probe(device: torch.device, precision: Precision) -> Probes:
    """Return the rates for a case in this precision; takes 0.2 to 0.3 s on two cores."""
    matrix_flops_per_s, dtype = matrix_rate(device, precision)
    exponentials_per_s, by = exponential_rate(device)
    return Probes(
        copy_bytes_per_s=copy_rate(device),
        matrix_flops_per_s=matrix_flops_per_s,
        matrix_dtype=str(dtype).removeprefix("torch."),
        exponentials_per_s=exponentials_per_s,
        exponentials_by=by,
    )


def copy_rate(device: torch.device) -> float:
    """Return the bytes per second that a copy reads and writes, both counted."""
    source = torch.ones(COPY_BYTES[device.type], dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return _rate(lambda: target.copy_(source), 2 * source.numel(), device)


def matrix_rate(device: torch.device, precision: Precision) -> tuple[float, torch.dtype]:
    """Return the FLOP/s of torch.mm or a convolution, and the type: the case's, or float32 if faster.

    On a CPU without half-precision instructions, multiplying in it is far slower than converting to float32; and the
    convolution library may be a fifth faster than the matrix product.
    """
    own = eager.amp_dtype(device) if precision == "amp" else eager.DTYPES[precision]
    rates = {dtype: _products(device, dtype) for dtype in {own, torch.float32}}
    fastest = max(rates, key=lambda dtype: rates[dtype])
    return max(rates[fastest], _convolution(device, fastest)), fastest


def _products(device: torch.device, dtype: torch.dtype) -> float:
    """Return the best rate over growing square matrices, up to the largest whose runs fit the budget."""
    best = 0.0
    for side in MATRIX_SIDES:
        left, right = torch.randn(2, side, side, device=device).to(dtype)
        product = torch.empty_like(left)
        rate = _rate(partial(torch.mm, left, right, out=product), 2 * side**3, device)
        best = max(best, rate)
        if MIN_RUNS * 2 * (2 * side) ** 3 / rate > BUDGET_S:
            break
    return best


def _convolution(device: torch.device, dtype: torch.dtype) -> float:
    images, channels, side = 8, 128, 16
    x = torch.randn(images, channels, side + 2, side + 2, device=device).to(dtype, memory_format=torch.channels_last)
    weight = torch.randn(channels, channels, 3, 3, device=device).to(dtype, memory_format=torch.channels_last)
    flops = 2 * images * side**2 * 9 * channels**2
    return _rate(partial(torch.conv2d, x, weight), flops, device)


def exponential_rate(device: torch.device) -> tuple[float, ExponentialsBy]:
    """Return the float32 exponentials per second of the fastest method on this machine, and the method."""
    ways: list[tuple[ExponentialsBy, Callable[[torch.device], tuple[Run, int]]]] = [("torch", _by_torch)]
    ways.append(("triton", _by_triton) if device.type == "cuda" else ("c", _by_c))
    rates: dict[ExponentialsBy, float] = {}
    for by, prepare in ways:
        with suppress(Unavailable):  # the record names the method used
            rates[by] = _rate(*prepare(device), device)
    fastest = max(rates, key=lambda by: rates[by])
    return rates[fastest], fastest


def _by_torch(device: torch.device) -> tuple[Run, int]:
    x = torch.rand(TORCH_NUMBERS, device=device)
    return partial(torch.exp2, x, out=torch.empty_like(x)), x.numel()


def _by_c(device: torch.device) -> tuple[Run, int]:
    library = compiler.load(C_SOURCE)
    library.exp2_chain.argtypes = [ctypes.c_void_p, *[ctypes.c_int64] * 4]
    library.exp2_chain.restype = None
    threads = compiler.threads()
    x = torch.rand(threads, CHAIN_WIDTH, device=device)
    return lambda: library.exp2_chain(x.data_ptr(), *x.shape, CHAIN_STEPS, threads), x.numel() * CHAIN_STEPS


def _by_triton(device: torch.device) -> tuple[Run, int]:
    x = torch.rand(CHAIN_NUMBERS_CUDA, device=device)
    try:
        from benchd.daemon.worker.probes_triton import exp2_chain  # noqa: PLC0415 - triton is there with a GPU alone

        exp2_chain(x, CHAIN_STEPS)
    except Exception as error:  # of Triton, of ptxas, and of the C compiler that makes its launcher
        raise Unavailable(f"no Triton kernel: {error}") from error
    return partial(exp2_chain, x, CHAIN_STEPS), x.numel() * CHAIN_STEPS


def _rate(run: Run, work: int, device: torch.device) -> float:
    """Return `work` over the shortest of the runs that fit the budget, at least MIN_RUNS; the first one warms up."""
    run()
    end = time.monotonic() + BUDGET_S
    seconds: list[float] = []
    while len(seconds) < MIN_RUNS or time.monotonic() < end:
        seconds.append(_seconds(run, device))
    return work / min(seconds)


def _seconds(run: Run, device: torch.device) -> float:
    if device.type != "cuda":
        start_ns = time.monotonic_ns()
        run()
        return (time.monotonic_ns() - start_ns) / 1e9
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    run()  # else the latency of a launch to an idle GPU would count
    start.record()
    run()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) / 1e3
