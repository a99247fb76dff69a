"""What a worker says of a GPU beside its times: memory, probes, and inputs as a GPU copies them."""

import msgspec
import pytest
import torch
from torch import nn
from worker_jobs import job, run, user_module

from benchd.daemon.records import Variant
from benchd.daemon.worker import probes, steps
from benchd.daemon.worker.backends import LoadedModel
from benchd.daemon.worker.scenarios.offline import Chunk

pytestmark = [pytest.mark.gpu, pytest.mark.area("bench-once")]
CUDA = torch.device("cuda")
BYTES = 2**28
WORKS = f"images = images + torch.zeros({BYTES // 4}, device=images.device).sum()"


def peak_bytes(folder, variant, forward):
    """Return the device's peak of a module with this line in its forward."""
    a_job = job(folder, module=user_module(folder, forward=forward), variant=Variant.parse(variant))
    outcome = run(msgspec.structs.replace(a_job, device="cuda", artifacts=str(folder / "artifacts")))
    assert (outcome.process.status, outcome.process.reason) == ("ok", None)
    return outcome.process.memory.device_peak_bytes


@pytest.mark.parametrize("variant", ["eager", "cudagraph"])
def test_the_peak_holds_what_a_run_works_in(variant, tmp_path):
    assert peak_bytes(tmp_path, variant, WORKS) >= BYTES


def test_a_run_is_probed_behind_another_so_that_no_launch_is_waited_for():
    runs = []
    probes._seconds(lambda: runs.append(None), CUDA)
    assert len(runs) == 2


def test_inputs_lie_where_a_gpu_copies_them_from():
    assert all(batch.is_pinned() for batch in steps.pinned([torch.ones(3), torch.ones(2)], CUDA))


def loaded(module):
    return LoadedModel(module.to(CUDA), torch.float32, CUDA, module)


class Chain(nn.Module):
    """Many products in a row: more than one can launch before the device has done the first."""

    def forward(self, images):
        for _ in range(50):
            images = (images @ images).tanh()
        return images


class Waits(Chain):
    def forward(self, images):
        output = super().forward(images)
        output.sum().item()
        return output


@pytest.mark.parametrize(("module", "waits"), [(Chain(), False), (Waits(), True)], ids=["launches", "reads a number"])
def test_offline_knows_whether_two_are_in_flight(module, waits):
    pool = steps.pinned([torch.rand(1024, 1024) for _ in range(2)], CUDA)
    with torch.inference_mode():
        step = Chunk(loaded(module), pool, runs=4)
        step(0)
        assert step.waits() is waits


def test_the_parts_of_an_inference_are_those_of_the_device():
    pool = steps.pinned([torch.rand(1024, 1024) for _ in range(2)], CUDA)
    with torch.inference_mode():
        step = steps.DeviceParts(loaded(Chain()), pool)
        parts = dict(zip(step.parts, step(0), strict=True))
    assert all(nanoseconds > 0 for nanoseconds in parts.values())


@pytest.mark.parametrize("precision", ["fp32", "fp16", "bf16", "amp"])
def test_the_rates_of_the_device_are_those_of_a_gpu(precision):
    rates = probes.probe(CUDA, precision)
    assert rates.copy_bytes_per_s > 1e9
    assert rates.matrix_flops_per_s > 1e10
    assert rates.exponentials_by in {"triton", "torch"}
    assert rates.cache_bytes > 0
