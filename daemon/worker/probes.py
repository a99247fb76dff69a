"""Measures the device's peak rates in the measuring process: bytes copied, FLOPs and exponentials per second.

Probes follow the timed section and the audit of its answers, so that they have the same clocks and threads and do not
disturb it. Each rate is the best of the runs that fit a small budget, in the fastest of several forms, which is
recorded: a roofline requires the device's maximum, not its average or that of an ordinary program.
"""

import ctypes
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TypeVar

import torch

from benchd.daemon.machine import sysfs
from benchd.daemon.records import BytesBy, ExponentialsBy, Probes
from benchd.daemon.runtimes import Precision
from benchd.daemon.worker.backends import eager
from benchd.kernels import compiler
from benchd.kernels.dispatch import Unavailable

BUDGET_S = 0.03
MIN_RUNS = 8  # on a busy machine, several runs may be slow
COPY_BYTES = {"cpu": 64 * 2**20, "cuda": 256 * 2**20}  # only just larger than the caches, because fresh pages take time
MATRIX_SIDES = (256, 512, 1024, 2048, 4096, 8192)
CHAIN_STEPS = 512
CHAIN_WIDTH = 1024  # numbers per CPU thread: 4 KB
CHAIN_NUMBERS_CUDA = 2**21  # numbers in one wave on the largest GPU
C_SOURCE = Path(__file__).with_name("probes.c")
CHAINS: dict[ExponentialsBy, str] = {"c": "chain_by_bits", "c_avx512": "chain_by_scale"}
ROUGH_CHAINS: dict[ExponentialsBy, str] = {"c_half": "rough_chain_by_bits", "c_avx512_half": "rough_chain_by_scale"}
_CPU = torch.device("cpu")
TORCH_NUMBERS = 2**18  # fits into the L2 cache, and is enough for all threads

LINE_BYTES = 64

Run = Callable[[], object]
Form = TypeVar("Form", BytesBy, ExponentialsBy)


def probe(device: torch.device, precision: Precision) -> Probes:
    """Return the rates for a case in this precision; this takes 0.2 to 0.3 s on two cores."""
    matrix_flops_per_s, dtype = matrix_rate(device, precision)
    copy_bytes_per_s, copy_by = byte_rate(device)
    exponentials_per_s, by = exponential_rate(device, precision)
    return Probes(
        copy_bytes_per_s=copy_bytes_per_s,
        copy_by=copy_by,
        matrix_flops_per_s=matrix_flops_per_s,
        matrix_dtype=str(dtype).removeprefix("torch."),
        exponentials_per_s=exponentials_per_s,
        exponentials_by=by,
        cache_bytes=cache_bytes(device),
    )


def cache_bytes(device: torch.device, root: Path = Path("/")) -> int | None:
    """Return the size of the last-level cache, None if this machine does not report it."""
    if device.type == "cuda":
        return int(getattr(torch.cuda.get_device_properties(device), "L2_cache_size", 0)) or None
    caches = (root / "sys/devices/system/cpu/cpu0/cache").glob("index*")
    sizes = [sysfs.text(path / "size") or "" for path in caches]  # some Arm boards' kernels hide the sizes
    return max((1024 * int(size.removesuffix("K")) for size in sizes if size.endswith("K")), default=None)


def byte_rate(device: torch.device) -> tuple[float, BytesBy]:
    """Return the bytes per second between the device and its memory in the fastest form, and that form.

    For a copy, both the bytes read and the bytes written are counted.
    """
    source = torch.ones(COPY_BYTES[device.type], dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    rates: dict[BytesBy, float] = {"torch": _rate(lambda: target.copy_(source), 2 * source.numel(), device)}
    if device.type == "cpu":
        with suppress(Unavailable):  # the record names the form that was used
            rates |= _byte_rates_in_c(source, target)
    return _fastest(rates)


def _byte_rates_in_c(source: torch.Tensor, target: torch.Tensor) -> dict[BytesBy, float]:
    """Return the rates of a copy whose stores bypass the caches, and of reading alone; both tensors are on a CPU."""
    library, threads, lines = compiler.load(C_SOURCE), compiler.threads(), source.numel() // LINE_BYTES
    library.copy_streaming.argtypes = [*[ctypes.c_void_p] * 2, *[ctypes.c_int64] * 2]
    library.copy_streaming.restype = None
    library.read_all.argtypes = [ctypes.c_void_p, *[ctypes.c_int64] * 2]
    to, origin = target.data_ptr(), source.data_ptr()  # torch aligns both to cache lines
    return {
        "streaming": _rate(lambda: library.copy_streaming(to, origin, lines, threads), 2 * source.numel(), _CPU),
        "reading": _rate(lambda: library.read_all(origin, lines, threads), source.numel(), _CPU),
    }


def _fastest(rates: Mapping[Form, float]) -> tuple[float, Form]:
    form = max(rates, key=lambda form: rates[form])
    return rates[form], form


def matrix_rate(device: torch.device, precision: Precision) -> tuple[float, torch.dtype]:
    """Return the FLOP/s of torch.mm or a convolution, and the dtype: the case's, or float32 if that is faster.

    On a CPU without half-precision instructions, converting to float32 is far faster than multiplying in half
    precision, and the convolution library may be a fifth faster than the matrix product.
    """
    own = eager.amp_dtype(device) if precision == "amp" else eager.DTYPES[precision]
    rates = {dtype: _products(device, dtype) for dtype in {own, torch.float32}}
    fastest = max(rates, key=lambda dtype: rates[dtype])
    return max(rates[fastest], _convolution(device, fastest)), fastest


def _products(device: torch.device, dtype: torch.dtype) -> float:
    """Return the best rate for square matrices of increasing size, up to the largest whose runs fit the budget."""
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


def exponential_rate(device: torch.device, precision: Precision) -> tuple[float, ExponentialsBy]:
    """Return the exponentials per second of the fastest form on this machine, and that form.

    For half precision, forms whose error is below the rounding are included.
    """
    forms: dict[ExponentialsBy, Callable[[torch.device], tuple[Run, int]]] = {"torch": _by_torch}
    if device.type == "cuda":
        forms["triton"] = _by_triton
    else:
        forms |= {form: partial(_by_c, function) for form, function in CHAINS.items()}
        forms |= {form: partial(_by_c, function) for form, function in ROUGH_CHAINS.items() if precision != "fp32"}
    rates: dict[ExponentialsBy, float] = {}
    for form, prepare in forms.items():
        with suppress(Unavailable):  # the record names the form that was used
            rates[form] = _rate(*prepare(device), device)
    return _fastest(rates)


def _by_torch(device: torch.device) -> tuple[Run, int]:
    x = torch.rand(TORCH_NUMBERS, device=device)
    return partial(torch.exp2, x, out=torch.empty_like(x)), x.numel()


def _by_c(name: str, device: torch.device) -> tuple[Run, int]:
    chain, threads = getattr(compiler.load(C_SOURCE), name, None), compiler.threads()
    if chain is None:
        raise Unavailable(f"{name} needs AVX-512")
    chain.argtypes, chain.restype = [ctypes.c_void_p, *[ctypes.c_int64] * 4], None
    x = torch.rand(threads, CHAIN_WIDTH, device=device)
    return lambda: chain(x.data_ptr(), *x.shape, CHAIN_STEPS, threads), x.numel() * CHAIN_STEPS


def _by_triton(device: torch.device) -> tuple[Run, int]:
    x = torch.rand(CHAIN_NUMBERS_CUDA, device=device)
    try:
        from benchd.daemon.worker.probes_triton import exp2_chain  # noqa: PLC0415 - only a GPU has triton

        exp2_chain(x, CHAIN_STEPS)
    except Exception as error:  # raised by Triton, ptxas or the C compiler for its launcher
        raise Unavailable(f"no Triton kernel: {error}") from error
    return partial(exp2_chain, x, CHAIN_STEPS), x.numel() * CHAIN_STEPS


def _rate(run: Run, work: int, device: torch.device) -> float:
    """Return `work` divided by the shortest time of at least MIN_RUNS runs within the budget, after a warm-up."""
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
    run()  # otherwise the latency of a launch on an idle GPU would be included
    start.record()
    run()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) / 1e3
