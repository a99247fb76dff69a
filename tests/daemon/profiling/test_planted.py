"""Bottlenecks planted in traces, through the tables to the findings: recorded ones of a CPU, made ones of a GPU."""

import time

import pytest
import torch
from profiles_made import profile
from torch.profiler import ProfilerActivity
from torch.utils.data import DataLoader, Dataset
from traces_made import ORIN, annotation, call, kernel, launch, operator

from benchd.daemon.profiling.rules import findings
from benchd.daemon.profiling.trace import tables, trace
from benchd.daemon.profiling.trace.trace import END_OF_STEP, Trace
from benchd.daemon.records import Case, Variant

SIDE = torch.randn(256, 256)
LONG = torch.randn(2**19)


def found_in(read, *, is_cuda, variant="eager"):
    """Return the rules that find something in a trace."""
    case = Case(model="vim_tiny", variant=Variant.parse(variant))
    profiled = profile(case, torch=tables.torch_profile(read, "trace.json", is_cuda))
    return {finding.rule: finding for finding in findings.find(profiled)}


def recorded(folder, batches, work):
    """Return what is found in a trace of `work` on each of the batches, the first of them left out."""
    path = folder / "trace.json"
    schedule = torch.profiler.schedule(wait=0, warmup=1, active=3, repeat=1)
    with torch.profiler.profile(
        activities=[ProfilerActivity.CPU],
        schedule=schedule,
        on_trace_ready=lambda profiler: profiler.export_chrome_trace(str(path)),
        acc_events=True,
    ) as profiler:
        for batch in batches:
            work(batch)
            profiler.step()
    return found_in(trace.read(path), is_cuda=False)


def products(x):
    for _ in range(20):
        x = (x @ SIDE).clamp_(-1, 1)


def casts(_):
    x = LONG
    for _ in range(30):
        x = x.to(torch.float16).to(torch.float32)


def flips(_):
    LONG.flip(0)


class Sleepy(Dataset):
    def __len__(self):
        return 5

    def __getitem__(self, index):
        time.sleep(0.1)
        return SIDE


def test_a_storm_of_casts_is_found(tmp_path):
    by_rule = recorded(tmp_path, [SIDE] * 5, casts)
    assert set(by_rule) == {"casts_and_copies"}
    assert by_rule["casts_and_copies"].title == "Too many casts"
    assert by_rule["casts_and_copies"].evidence[-1] == "60 casts (aten::_to_copy) per step, in fp32"


def test_a_flip_is_found(tmp_path):
    by_rule = recorded(tmp_path, [SIDE] * 5, flips)
    assert set(by_rule) == {"flips"}
    assert by_rule["flips"].variant == "custom"


def test_a_data_loader_that_sleeps_is_found(tmp_path):
    by_rule = recorded(tmp_path, DataLoader(Sleepy()), lambda batch: products(batch[0]))
    assert set(by_rule) == {"input_bound"}


def gpu_trace(*, product="ampere_fp16_s16816gemm_fp16_128x64_tn", waits=False):
    """Return three steps of 1 ms in which six kernels of 150 us run, after each of which the host may wait for it.

    Each step ends with benchd's own wait, and the GPU idles until the next one begins.
    """
    planted_trace = empty()
    every = [f"{product}_{number}" for number in range(6)]
    for step in range(3):
        begin = 1000 * step
        planted_trace.annotations.append(annotation(f"ProfilerStep#{step}", begin, 1000))
        for number, name in enumerate(every):
            _launch(
                planted_trace, name, begin + 150 * number, 100 if waits else 150, correlation=10 * step + number + 1
            )
            if waits:
                planted_trace.operators.append(operator("aten::item", begin + 150 * number + 5, 100))
                planted_trace.runtime_calls.append(call("cudaStreamSynchronize", begin + 150 * number + 6, 98))
        planted_trace.annotations.append(annotation(END_OF_STEP, begin + 905, 50))
        planted_trace.runtime_calls.append(call("cudaDeviceSynchronize", begin + 910, 40))
    return planted_trace


def empty():
    return Trace(devices=[ORIN], kernels=[], runtime_calls=[], operators=[], annotations=[])


def _launch(planted_trace, name, start_us, duration_us, correlation):
    launched = launch(name, percent=80.0, active_blocks_per_sm=10, limits=("registers",), grid=(80, 1, 1))
    planted_trace.operators.append(operator("aten::mm", start_us, 4, external_id=correlation))
    planted_trace.runtime_calls.append(call("cudaLaunchKernel", start_us + 1, 2, correlation=correlation))
    planted_trace.kernels.append(
        kernel(start_us + 3, duration_us, launched, correlation=correlation, external_id=correlation)
    )


def test_a_planted_wait_is_found_with_what_it_costs():
    by_rule = found_in(gpu_trace(waits=True), is_cuda=True, variant="custom-fp16")
    assert set(by_rule) == {"synchronization"}
    assert by_rule["synchronization"].evidence[1].startswith("aten::item: 6 calls per step wait ")


@pytest.mark.parametrize("pause_us", [0, 9000])
@pytest.mark.parametrize(("late_us", "found"), [([100] * 30, True), ([870] + [1] * 29, False)], ids=["each", "one"])
def test_a_host_that_is_late_for_each_launch_is_found_and_one_that_does_something_else_is_not(late_us, found, pause_us):
    """Thirty kernels of 3 us a step, before each of which the GPU waits; a slow host needs 100 us and more for each."""
    planted_trace = empty()
    step_us = sum(late_us) + 3 * len(late_us)
    for step in range(3):
        begin = (step_us + pause_us) * step
        planted_trace.annotations.append(annotation(f"ProfilerStep#{step}", begin, step_us))
        for number, late in enumerate(late_us):
            begin += late
            _launch(planted_trace, f"kernel_{number}", begin - 3, 3, correlation=100 * step + number + 1)
            begin += 3
    assert ("launch_bound" in found_in(planted_trace, is_cuda=True)) is found


def test_a_planted_product_in_fp32_is_found():
    by_rule = found_in(gpu_trace(product="ampere_sgemm_128x64_tn"), is_cuda=True, variant="custom")
    assert set(by_rule) == {"no_tensor_cores"}
    assert by_rule["no_tensor_cores"].variant == "custom-fp16"
