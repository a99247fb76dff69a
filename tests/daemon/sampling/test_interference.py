import msgspec
import pytest

from benchd.daemon.records import ProcessResult, Sample, Window
from benchd.daemon.sampling.interference import assess
from benchd.daemon.verdicts.timings import disturbed

BLOCKS = [Window(start, start + 5 * 10**8) for start in range(0, 5 * 10**9, 5 * 10**8)]  # ten, of half a second
MEDIANS_MS = [2.0, 2.02, 1.98, 2.0, 2.4, 2.01, 1.99, 2.0, 2.02, 1.98]


def series(metric, value_at, period_s=0.1, rail=""):
    """Return the samples of a metric over the blocks; `value_at` takes seconds."""
    count = round(5.2 / period_s)
    times = [(i - 1) * period_s + period_s / 2 for i in range(count)]
    return [Sample(round(t * 1e9), metric, value_at(t), "sim", rail) for t in times]


def inside(start_s, end_s, within, else_):
    return lambda t: within if start_s < t < end_s else else_


def flagged(samples, device="cuda"):
    """Return the reasons by the number of the block, of those that have any."""
    reasons = assess(samples, BLOCKS, MEDIANS_MS, device).reasons
    return {i: names for i, names in enumerate(reasons) if names}


def test_nothing_disturbed_and_nothing_sampled():
    for samples in ([], series("gpu_clock_hz", lambda t: 1.5e9)):
        interference = assess(samples, BLOCKS, MEDIANS_MS, "cuda")
        assert interference.reasons == [[]] * 10
        assert interference.clean == interference.as_experienced
        assert not interference.all_flagged


@pytest.mark.parametrize(("device", "metric"), [("cuda", "gpu_clock_hz"), ("cpu", "cpu_clock_hz")])
@pytest.mark.parametrize(("hz", "low"), [(0.96e9, True), (0.98e9, False), (1.2e9, False)])
def test_a_clock_below_97_percent_of_its_median(device, metric, hz, low):
    by_block = flagged(series(metric, inside(2.0, 2.5, hz, 1.0e9)), device)
    assert by_block == ({4: ["low_clock"]} if low else {})


def test_clocks_of_the_other_device_and_of_single_clusters_do_not_count():
    dip = inside(2.0, 2.5, 0.5e9, 1.0e9)
    assert flagged(series("cpu_clock_hz", dip), "cuda") == {}
    assert flagged(series("gpu_clock_hz", dip), "cpu") == {}
    assert flagged(series("cpu_clock_hz", dip, rail="policy4"), "cpu") == {}


@pytest.mark.parametrize("bit", [0x04, 0x08, 0x20, 0x40, 0x80])
def test_throttle_bits(bit):
    samples = series("gpu_throttle_reasons", inside(2.0, 2.5, bit | 0x01, 0x01))
    assert flagged(samples) == {
        3: ["throttled"],
        4: ["throttled"],
    }  # it may have begun in block 3, after the last reading
    assert flagged(samples, "cpu") == {}
    of_cpu = series("cpu_throttle_reasons", inside(2.0, 2.5, bit | 0x01, 0x01))
    assert (flagged(of_cpu, "cpu"), flagged(of_cpu, "cuda")) == (flagged(samples), {})


def test_a_foreign_process_on_the_gpu():
    samples = series("gpu_foreign_processes", inside(2.1, 2.5, 1, 0))
    assert flagged(samples) == {4: ["foreign_gpu_process"]}
    assert flagged(samples, "cpu") == {}


@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_stolen_time(device):
    assert flagged(series("cpu_steal_percent", inside(2.2, 2.3, 10.0, 0.0)), device) == {4: ["steal"]}
    assert flagged(series("cpu_steal_percent", lambda t: 0.5), device) == {}


@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_a_major_fault_is_of_the_block_in_which_it_came(device):
    samples = series("process_major_faults_per_s", inside(2.2, 2.3, 20.0, 0.0))
    assert flagged(samples, device) == {4: ["major_faults"]}


def test_a_block_shorter_than_the_sampling_takes_the_next_clock():
    samples = series("gpu_clock_hz", inside(3.0, 3.3, 0.5e9, 1.0e9), period_s=0.7)  # 2.45 s, 3.15 s, 3.85 s
    assert flagged(samples) == {5: ["low_clock"], 6: ["low_clock"]}


def test_clean_leaves_the_disturbed_blocks_out_and_as_experienced_does_not():
    interference = assess(series("cpu_steal_percent", inside(2.2, 2.3, 10.0, 0.0)), BLOCKS, MEDIANS_MS, "cpu")
    assert interference.clean.median_ms == pytest.approx(2.0)
    assert interference.as_experienced.median_ms == pytest.approx(2.04)
    assert (interference.clean.blocks, interference.as_experienced.blocks) == (9, 10)
    assert 1.98 < interference.clean.low_ms < 2.0 < interference.clean.high_ms < 2.02
    assert interference.as_experienced.high_ms > 2.1


def test_clean_is_never_empty():
    interference = assess(series("gpu_throttle_reasons", lambda t: 0x40), BLOCKS, MEDIANS_MS, "cuda")
    assert interference.all_flagged
    assert interference.clean == interference.as_experienced
    assert interference.clean.blocks == 10


def test_over_processes_the_blocks_add_up_and_the_medians_are_geometric_means():
    faults = series("process_major_faults_per_s", inside(2.0, 2.5, 3.0, 0.0))
    interferences = [assess(samples, BLOCKS, MEDIANS_MS, "cpu") for samples in (faults, [])]
    both = disturbed([ProcessResult(status="ok", interference=interference) for interference in interferences])
    assert (both.blocks, both.reasons) == (20, ["major_faults"])
    assert both.disturbed == sum(map(bool, interferences[0].reasons)) > 0
    assert both.clean_ms == pytest.approx((interferences[0].clean.median_ms * interferences[1].clean.median_ms) ** 0.5)
    assert both.as_experienced_ms == pytest.approx(interferences[0].as_experienced.median_ms)
    assert disturbed([ProcessResult(status="ok", interference=interferences[1]), ProcessResult(status="ok")]) is None


def test_a_process_with_a_time_of_zero_tells_nothing():
    normal = assess(series("process_major_faults_per_s", lambda t: 3.0), BLOCKS, MEDIANS_MS, "cpu")
    zero = msgspec.structs.replace(normal, clean=msgspec.structs.replace(normal.clean, median_ms=0.0))
    assert disturbed([ProcessResult(status="ok", interference=zero)]) is None
    both = disturbed([ProcessResult(status="ok", interference=interference) for interference in (zero, normal)])
    assert (both.blocks, both.clean_ms) == (10, pytest.approx(normal.clean.median_ms))


def test_blocks_in_which_a_quota_stopped_it():
    assert set(flagged(series("cpu_quota_stops", inside(2.0, 2.5, 1.0, 0.0)), "cpu")) >= {4}
    assert flagged(series("cpu_quota_stops", lambda t: 0.0), "cpu") == {}
