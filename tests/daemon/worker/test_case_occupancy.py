"""The three occupancies of a case, from traces made by hand: no GPU runs these."""

import ast
import os
import subprocess
import sys

import pytest
from fake_nvml import FIRST, FakeNvml
from traces_made import ORIN, kernel, launch

from benchd.daemon.profiling.occupancy import of_trace
from benchd.daemon.profiling.trace.trace import Trace


def test_each_figure_is_a_mean_over_kernel_time_and_the_limits_add_up():
    full, small = launch(grid=(96, 1, 1)), launch(grid=(3, 1, 1), percent=3)
    occupancy = of_trace(Trace(devices=[ORIN], kernels=[kernel(0, 30, full), kernel(30, 10, small)]), 0.5, "")
    assert occupancy.theoretical == pytest.approx(1.0)
    assert occupancy.estimated == pytest.approx(0.75 + 0.25 * 3 / 8 * 128 / 1536)
    assert (occupancy.measured, occupancy.kernels) == (0.5, 2)
    assert occupancy.limits == {"warps": 0.75, "grid": 0.25}


MEASURED = """
import os, sys
from pathlib import Path
import torch
from benchd.daemon.worker import occupancy
occupancy.COUNTED_S = 0.2
settings = Path(os.environ["FAKE_NVML"])
for then in sys.argv[2:]:
    settings.write_text("gpm 1\\n")
    print(occupancy._counted(lambda run: settings.write_text(then), sys.argv[1]))
settings.write_text("gpm 1\\n")
occupancy.measure(lambda run: print(int(torch._C._autograd._profiler_enabled()), end=""), sys.argv[1])
"""
FAULTS = {
    "gpm 1": (0.035, ""),
    "gpm 1\nfail.nvmlGpmSampleGet 15": (None, "GPM: GPU is lost"),
    "gpm 1\ngpm.3 15": (None, "gpm_sm_occupancy_percent: GPU is lost"),
    "gpm 1\ngpm.5 15": (0.035, ""),
}


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    """Return what a process prints: what is counted under each fault, and whether the profiler sees each step."""
    pytest.importorskip("pynvml", reason="nvidia-ml-py is not installed")
    fake = FakeNvml(tmp_path_factory.mktemp("nvml"))
    command = [sys.executable, "-c", MEASURED, FIRST, *(f"{fault}\n" for fault in FAULTS)]
    done = subprocess.run(command, env=os.environ | fake.environment, capture_output=True, text=True, check=True)
    return done.stdout.splitlines()


def test_counters_that_fail_after_they_worked_cost_themselves_alone(measured):
    assert [ast.literal_eval(line) for line in measured[:-1]] == list(FAULTS.values())


def test_the_hardware_counts_before_a_profiler_is_attached(measured):
    *counted, first, second, third = measured[-1]
    assert set(counted) == {"0"}
    assert (first, second, third) == ("1", "1", "1")
