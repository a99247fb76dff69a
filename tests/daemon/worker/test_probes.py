"""The probes: finite rates in every precision, right arithmetic in the chains, and probes that fail."""

import math
import subprocess
from typing import get_args

import msgspec
import numpy as np
import pytest
import torch
from simulations import slow
from worker_jobs import job, measured

from benchd.daemon.records import BytesBy, ExponentialsBy
from benchd.daemon.worker import probes
from benchd.kernels import compiler

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("sizes", "found"),
    [([], None), ([None, None], None), (["32K", None, "1024K"], 2**20), (["none", "64K"], 2**16)],
)
def test_the_last_cache_is_the_largest_that_the_kernel_tells(tmp_path, sizes, found):
    for number, size in enumerate(sizes):
        index = tmp_path / f"sys/devices/system/cpu/cpu0/cache/index{number}"
        index.mkdir(parents=True)
        if size:
            (index / "size").write_text(f"{size}\n")
    assert probes.cache_bytes(CPU, tmp_path) == found


@pytest.mark.parametrize(
    ("precision", "types"),
    [
        ("fp32", {"float32"}),
        slow("fp16", {"float16", "float32"}),
        ("bf16", {"bfloat16", "float32"}),
        slow("amp", {"float16", "bfloat16", "float32"}),
    ],
)
def test_every_precision_has_finite_rates(precision, types):
    device_rates = probes.probe(DEVICE, precision)
    rates = (device_rates.copy_bytes_per_s, device_rates.matrix_flops_per_s, device_rates.exponentials_per_s)
    assert all(0 < rate < math.inf for rate in rates)
    assert device_rates.matrix_dtype in types
    assert device_rates.copy_by in get_args(BytesBy)
    assert device_rates.exponentials_by in get_args(ExponentialsBy)
    assert precision != "fp32" or "half" not in device_rates.exponentials_by


@pytest.mark.parametrize(
    ("name", "error"),
    [(name, 3e-7) for name in probes.CHAINS.values()] + [(name, 1e-4) for name in probes.ROUGH_CHAINS.values()],
)
def test_each_chain_in_c_is_powers_of_two(name, error):
    chain = getattr(compiler.load(probes.C_SOURCE), name, None)
    if chain is None:
        pytest.skip("needs AVX-512")
    assert probes._by_c(name, CPU)[0]() is None
    x = torch.linspace(-120, 120, 3 * 80).reshape(3, 80)
    wanted = np.exp2(-x.double().numpy())
    chain(x.data_ptr(), 3, 80, 1, 2)
    np.testing.assert_allclose(x.numpy(), wanted, rtol=error)
    x = torch.rand(2, 16)
    chain(x.data_ptr(), 2, 16, 100, 2)
    np.testing.assert_allclose(x.numpy(), 0.6411857, rtol=3 * error)  # where x = 2^-x


def test_the_streaming_copy_copies_and_reading_reads_every_byte():
    source = torch.randint(0, 2**30, (3, 7, 16), dtype=torch.int32)
    target = torch.zeros_like(source)
    library = compiler.load(probes.C_SOURCE)
    probes._byte_rates_in_c(source.view(torch.uint8), target.view(torch.uint8))
    assert torch.equal(source, target)
    wanted = (int(source.sum()) + 2**31) % 2**32 - 2**31
    assert library.read_all(source.data_ptr(), 21, 2) == wanted


def test_the_chain_in_triton_is_powers_of_two():
    probes_triton = pytest.importorskip("benchd.daemon.worker.probes_triton")
    x = torch.rand(2 * probes_triton.BLOCK, device=DEVICE)
    wanted = torch.exp2(-torch.exp2(-torch.exp2(-x.double())))
    probes_triton.exp2_chain(x, 3)
    torch.testing.assert_close(x.double(), wanted, rtol=1e-6, atol=0)


def test_without_a_compiler_the_exponentials_are_torch_s_and_named_so(monkeypatch):
    compiler.load.cache_clear()
    monkeypatch.setenv("CC", "no-such-compiler")
    rate, by = probes.exponential_rate(CPU, "bf16")
    assert by == "torch"
    assert 0 < rate < math.inf


def test_a_real_worker_probes_after_what_it_timed(tmp_path):
    outcome = measured(job(tmp_path, probes=True))
    device_rates = outcome.process.probes
    assert device_rates is not None
    assert all(value > 0 for value in msgspec.structs.asdict(device_rates).values() if isinstance(value, float))
    assert outcome.process.stages.probe_s > 0
    assert "probes" not in outcome.missing


def test_probes_that_fail_cost_the_floor_and_not_the_measurement(tmp_path, monkeypatch):
    def fails(*_, **__):
        raise subprocess.CalledProcessError(1, "gcc")

    monkeypatch.setattr(torch, "mm", fails)
    outcome = measured(job(tmp_path, probes=True))
    assert (outcome.process.timing is None, outcome.process.probes) == (False, None)
    assert outcome.missing["probes"].startswith("the probes did not run: Command 'gcc'")
