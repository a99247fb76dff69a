"""The real binding over a library of cards with a known load (tests/support/fake_nvml.c), in a process of its own."""

import os
import re
import time
from itertools import pairwise
from statistics import median

import pytest
from fake_nvml import FIRST, SECOND, FakeNvml, SamplerChild
from waiting import WAIT_S

from benchd.daemon.sampling.sources.nvml import throttle_names

pytest.importorskip("pynvml", reason="nvidia-ml-py is not installed")

QUICK_TICK_S = 0.02
INSTANT, AVERAGE, MODULE = 186, 185, 1
INIT, ELSEWHERE = 1, 2**22 + 1  # a process that is in every namespace, and a number that no kernel gives


# what a Jetson Orin's might answer beside NotSupported, and what a Thor's lacks
ORIN = {"fail": 3, "fail__nvmlDeviceGetComputeRunningProcesses_v3": 0, "fail__nvmlDeviceGetTemperature": 0}
THOR = {
    "fail__nvmlDeviceGetFieldValues": 3,
    "fail__nvmlDeviceGetTotalEnergyConsumption": 3,
    "fail__nvmlDeviceGetSamples": 3,
}


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    library = FakeNvml(tmp_path_factory.mktemp("nvml"))
    yield library
    library.close()


@pytest.fixture
def fake(built):
    built.reset()
    built.set(tick_s=QUICK_TICK_S)
    return built


def started(fake, device=FIRST, name="nvml"):
    """Return the sampler in its process, found available."""
    child = SamplerChild(fake, name, device)
    assert child.ask("unavailable") is None
    return child


def values(child):
    """Return the values of the next full tick by metric and rail, the counter's changes left out."""
    time.sleep(0.1)
    samples, failure = child.sample()
    assert failure is None
    return {(metric, rail): value for _, metric, value, _, rail in samples if metric != "energy_counter_j"}


def until(child, done):
    """Return the samples up to the first tick of which `done(samples, failure)` holds, and its failure."""
    deadline, all_samples = time.monotonic() + WAIT_S, []
    while time.monotonic() < deadline:
        samples, failure = child.sample()
        all_samples += samples
        if done(all_samples, failure):
            return all_samples, failure
        time.sleep(0.005)
    raise AssertionError(f"not in {WAIT_S} s; the last samples: {all_samples[-5:]}, {failure}")


def counter(samples):
    return [(t_ns, value) for t_ns, metric, value, _, _ in samples if metric == "energy_counter_j"]


def changes(child, count):
    return counter(until(child, lambda samples, _: len(counter(samples)) >= count)[0])


def test_what_a_desktop_card_gives(fake):
    fake.set(throttle=0x24, pids=f"{os.getpid()},{INIT},{ELSEWHERE},0")
    with started(fake) as child:
        child.ask(f"watch {os.getpid()}")
        by_metric = values(child)
        sources = child.ask("power_sources")
    powers = {rail: by_metric.pop(("power_w", rail)) for rail in ("gpu", "gpu_average", "gpu_history")}
    assert powers == pytest.approx(dict.fromkeys(powers, 50.0), abs=0.01)
    assert by_metric == {
        ("gpu_clock_hz", ""): 1980e6,
        ("gpu_memory_clock_hz", ""): 9501e6,
        ("gpu_throttle_reasons", ""): 0x24,
        ("gpu_temp_c", ""): 61.0,
        ("gpu_utilization_percent", ""): 87.0,
        ("gpu_memory_used_bytes", ""): 3 * 2**30,
        ("gpu_foreign_processes", ""): 1.0,
    }
    assert [(source["metric"], source["rail"], source["total"]) for source in sources] == [
        ("energy_counter_j", "gpu", True),
        ("power_w", "gpu_history", True),
        ("power_w", "gpu", True),
        ("power_w", "gpu_average", True),
    ]
    assert {source["scope"] for source in sources} == {"GPU board"}
    assert [source["averaging_s"] for source in sources] == [0.0, 0.0, 0.0, 1.0]


def test_the_periods_are_measured(fake):
    """Ten times as long for the counter: a machine that is held up for long enough reads both as longer."""
    fake.set(tick_s=0.1, power_tick_s=0.01)
    with started(fake) as child:
        periods_s = {(s["metric"], s["rail"]): s["period_s"] for s in child.ask("power_sources")}
    assert periods_s["energy_counter_j", "gpu"] > 0.09
    assert 0.005 < periods_s["power_w", "gpu"] < periods_s["energy_counter_j", "gpu"]
    assert periods_s["power_w", "gpu_history"] == pytest.approx(0.01, rel=0.01)


def test_changes_of_the_counter_are_stamped_when_they_came(fake):
    """At 50 W and a tick of 0.1 s the counter moves in steps of 5 J; one that a busy machine missed is in the next."""
    fake.set(tick_s=0.1)
    with started(fake) as child:
        first, *rest = changes(child, 8)
    assert first[1] <= rest[0][1]
    for (early_ns, early_j), (late_ns, late_j) in pairwise(rest):
        assert early_ns < late_ns
        assert (late_j - early_j) / 5.0 == pytest.approx(max(1, round((late_j - early_j) / 5.0)))
    assert median(abs(fake.energy_j(0, t_ns) - energy_j) for t_ns, energy_j in rest) < 2.5


def test_the_card_is_that_of_the_uuid_and_of_cudas_order(fake, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1,0")
    for device, watts in ((FIRST, 50.0), ("GPU-1", 100.0), ("cuda", 100.0)):
        with started(fake, device) as child:
            assert values(child)["power_w", "gpu"] == pytest.approx(watts, abs=0.01)


def test_the_module_is_the_whole_of_a_superchip(fake):
    fake.set(**{f"field__{INSTANT}__{MODULE}": 0, f"field__{AVERAGE}__{MODULE}": 0})
    with started(fake) as child:
        assert values(child)["power_w", "module"] == pytest.approx(150.0, abs=0.01)
        sources = child.ask("power_sources")
    assert [source["rail"] for source in sources if source["total"]] == ["module", "module_average"]
    assert sources[0]["scope"] == "module of GPU, CPU and memory"


def test_what_a_card_does_not_support_is_not_claimed(fake):
    fake.set(
        fail__nvmlDeviceGetTotalEnergyConsumption=3,
        fail__nvmlDeviceGetSamples=3,
        fail__nvmlDeviceGetClockInfo=3,
        **{f"field__{AVERAGE}__0": 3},
    )
    with started(fake) as child:
        by_metric = values(child)
        sources = child.ask("power_sources")
    assert [rail for metric, rail in by_metric if metric == "power_w"] == ["gpu"]
    assert ("gpu_clock_hz", "") not in by_metric
    assert [(source["metric"], source["rail"]) for source in sources] == [("power_w", "gpu")]


def test_what_the_driver_refuses_is_named_and_costs_nothing_else(fake):
    fake.set(fail__nvmlDeviceGetTemperature=4, fail__nvmlDeviceGetComputeRunningProcesses_v3=4)
    with started(fake) as child:
        samples, failure = until(child, lambda _, failure: failure)
        sources = child.ask("power_sources")
    assert failure == "gpu_temp_c: Insufficient Permissions; gpu_foreign_processes: Insufficient Permissions"
    assert {"gpu_clock_hz", "power_w"} <= {metric for _, metric, _, _, _ in samples}
    assert sources[0]["metric"] == "energy_counter_j"


def test_a_gpu_that_is_lost_and_comes_back(fake):
    with started(fake) as child:
        changes(child, 2)
        fake.set(fail=15)
        _, failure = until(child, lambda _, failure: failure and "energy_counter_j" in failure)
        assert "energy_counter_j gpu: GPU is lost" in failure
        assert "power_w gpu: GPU is lost" in failure
        samples, _ = child.sample()
        assert samples == []
        fake.set(fail=0)
        assert len(changes(child, 2)) >= 2


def test_a_counter_that_stands_still_is_named(fake):
    with started(fake) as child:
        fake.set(stopped_s=5)
        _, failure = until(child, lambda _, failure: failure)
    assert "energy_counter_j gpu: no change for" in failure


def test_history_is_given_once_and_in_order(fake):
    with started(fake) as child:
        samples, _ = until(child, lambda samples, _: len([s for s in samples if s[4] == "gpu_history"]) > 20)
    times_ns = [t_ns for t_ns, _, _, _, rail in samples if rail == "gpu_history"]
    assert times_ns == sorted(set(times_ns))
    assert median(late - early for early, late in pairwise(times_ns)) == pytest.approx(2e7, rel=1e-3)


@pytest.mark.parametrize(
    ("settings", "device", "reason"),
    [
        ({"fail": 3}, FIRST, "as on a Jetson Orin; use ina3221"),
        (ORIN, FIRST, "NVML reports neither power nor load for GPU-0000.*; use ina3221"),
        ({"fail": 15}, FIRST, "GPU is lost"),
        ({"fail__nvmlDeviceGetTemperature": 999}, FIRST, "gpu_temp_c of GPU-0000.*: Unknown Error"),
        ({"mig": 1}, FIRST, "partitioned by MIG; .* disable MIG"),
        ({"fail__nvmlDeviceGetMigMode": 4}, FIRST, "MIG mode of GPU-0000.*: Insufficient Permissions"),
        ({}, "MIG-1a2b", "disable MIG"),
        ({"cards": 1}, SECOND, f"0 GPUs match '{SECOND}'; found: {FIRST}"),
        ({"cards": 0}, "cuda", "no cuda:0"),
        ({"init": 9}, FIRST, "modprobe nvidia"),
    ],
)
def test_an_unusable_gpu_says_why(settings, device, reason, fake):
    fake.set(**settings)
    with SamplerChild(fake, "nvml", device) as child:
        assert re.search(reason, child.ask("unavailable"))


def test_a_thor_s_load_is_read_though_it_has_no_power(fake):
    fake.set(**THOR)
    with started(fake) as child:
        assert values(child)["gpu_utilization_percent", ""] == 87.0
        assert child.ask("power_sources") == []


def test_gpm(fake):
    fake.set(gpm=1, gpm__7=3)
    with started(fake, name="gpm") as child:
        samples, failure = until(child, lambda samples, _: samples)
        assert failure is None
        assert {metric: value for _, metric, value, _, _ in samples} == {
            "gpm_graphics_utilization_percent": 1.5,
            "gpm_sm_utilization_percent": 2.5,
            "gpm_sm_occupancy_percent": 3.5,
            "gpm_tensor_percent": 5.5,
            "gpm_imma_tensor_percent": 9.5,
            "gpm_dram_bandwidth_percent": 10.5,
        }
        assert {source for _, _, _, source, _ in samples} == {"gpm"}
        fake.set(gpm__3=15)
        samples, failure = until(child, lambda _, failure: failure)
        assert failure == "gpm_sm_occupancy_percent: GPU is lost"
        assert "gpm_tensor_percent" in {metric for _, metric, _, _, _ in samples}
        fake.set(fail__nvmlGpmSampleGet=15)
        samples, failure = until(child, lambda _, failure: failure and failure.startswith("GPM"))
        assert failure == "GPM: GPU is lost"


@pytest.mark.parametrize(
    ("settings", "reason"),
    [({}, "Hopper and newer only"), ({"gpm": 1, "fail__nvmlGpmSampleGet": 4}, "Permissions"), ({"mig": 1}, "MIG")],
)
def test_a_gpu_without_gpm(settings, reason, fake):
    fake.set(**settings)
    with SamplerChild(fake, "gpm", FIRST) as child:
        assert reason in child.ask("unavailable")


def test_throttle_reasons_have_names():
    assert throttle_names(0) == []
    assert throttle_names(0x24) == ["software power cap", "software thermal slowdown"]
    assert throttle_names(0x4001) == ["idle", "bit 0x4000"]
