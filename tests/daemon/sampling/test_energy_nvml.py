"""Energy by NVML's counter, end to end: a stub of the library under the real binding, the real sampler process."""

import time
from statistics import mean, median

import pytest

pytest.importorskip("pynvml", reason="nvidia-ml-py is not installed")

from fake_nvml import FIRST, FakeNvml
from gaps import ATTEMPTS, is_for_gaps
from waiting import WAIT_S

from benchd.daemon.records import Window
from benchd.daemon.sampling import energy
from benchd.daemon.sampling.child import SamplerProcess

PERIOD_S, WINDOW_S, WINDOWS = 0.05, 0.5, 8


def measured(tmp_path, monkeypatch):
    """Measure a known load in some windows; return what was found and the true joules of each."""
    fake = FakeNvml(tmp_path)
    fake.set(watts=50, swing=0, square_s=1, tick_s=0.1)
    for name, value in fake.environment.items():
        monkeypatch.setenv(name, value)
    with SamplerProcess([f"nvml={FIRST}"], PERIOD_S) as sampler:
        time.sleep(2.0)
        windows = []
        for _ in range(WINDOWS):
            start = time.monotonic_ns()
            time.sleep(WINDOW_S)
            windows.append(Window(start, time.monotonic_ns()))
        time.sleep(1.0)
        assert sampler.flush(WAIT_S)
        samples = sampler.samples.raw(Window(0, time.monotonic_ns()))
        sources = sampler.samples.power
    energies = [energy.measure(samples, sources, window, 1, PERIOD_S) for window in windows]
    return energies, [fake.energy_j(window.start_ns, window.end_ns) for window in windows]


def test_the_bar_of_a_counter_covers_a_known_load(tmp_path, monkeypatch):
    covered = []
    for _ in range(ATTEMPTS):
        for each, truth in zip(*measured(tmp_path, monkeypatch), strict=True):
            if isinstance(each, str):
                assert is_for_gaps(each)
            elif each.metric != "energy_counter_j":
                assert any(is_for_gaps(flag) and "energy_counter_j" in flag for flag in each.flags)
            else:
                assert each.scope == "GPU board"
                covered.append(abs(each.energy_j - truth) <= each.energy_err_j)
        if len(covered) >= WINDOWS:
            break
    assert len(covered) >= WINDOWS
    assert mean(covered) >= 0.75  # bars are of 95 %, and another process may take the CPU for long


@pytest.mark.slow
def test_on_an_idle_machine_a_counter_is_right_within_a_third_of_a_percent(tmp_path, monkeypatch):
    energies, truths = measured(tmp_path, monkeypatch)
    assert median([abs(each.energy_j - truth) / truth for each, truth in zip(energies, truths, strict=True)]) <= 0.003
