"""From processes to a Record: statuses, intervals between processes, throughput, and reasons for what is missing."""

import time
from dataclasses import replace

import msgspec
import pytest
from records_made import ENERGY, ENVIRONMENT, PASSED, QANN, blocks, timing
from simulated_power import source

from benchd.daemon.machine.identity import boot_id
from benchd.daemon.measuring import recording
from benchd.daemon.measuring.plan import Machine
from benchd.daemon.measuring.protocol import Outcome
from benchd.daemon.measuring.recording import RunHeader, RunId
from benchd.daemon.records import (
    BlocksResult,
    Case,
    Deadlines,
    Interference,
    Level,
    Load,
    Neighbour,
    NeighbourResult,
    Occupancy,
    Probes,
    ProcessResult,
    Requests,
    RuntimeFacts,
    Sample,
    Summary,
    Window,
    unix_s,
)
from benchd.daemon.sampling.child import SamplerProcess
from benchd.daemon.sampling.sources.protocol import Batch
from benchd.models.cost import cost, parameters

SHARED = RunHeader("dev-1", "boot", "suite", "0.1.0", ENVIRONMENT)


VIM = msgspec.structs.replace(QANN, options={}, input_shape=[3, 224, 224], parameters=parameters("vim_tiny", {}))


def outcome(status="ok", *, reason=None, check=None, model=None, **process):
    return Outcome(process=ProcessResult(status=status, reason=reason, **process), check=check, model=model)


def probes(matrix=1e12):
    return Probes(
        copy_bytes_per_s=1e11,
        matrix_flops_per_s=matrix,
        matrix_dtype="float32",
        exponentials_per_s=1e12,
        exponentials_by="c",
    )


def record(*outcomes, case=None, probes=None, **environment):
    """Return the record of a case with these processes; the other fields are those of the environment."""
    case = case or Case(model="vim_tiny", batch_size=4)
    shared = replace(SHARED, environment=msgspec.structs.replace(ENVIRONMENT, **environment))
    return recording.record(case, "quick", shared, RunId("r7", "2026-01-01T00:00:00.000Z", 7), outcomes, probes)


def check(passed, share):
    return msgspec.structs.replace(PASSED, passed=passed, max_abs_error=share, error_share=share)


def test_one_process_keeps_its_own_interval():
    result = record(outcome(timing=timing(5.0)))
    assert result.timing == timing(5.0)
    assert result.timing.interval_basis == "within_process"
    assert result.throughput_per_s == pytest.approx(800.0)
    assert result.throughput_basis == "batch_over_median"


def test_several_processes_give_an_interval_between_them():
    three = record(*(outcome(timing=timing(median)) for median in (5.0, 5.1, 5.2)))
    assert three.timing.interval_basis == "between_processes"
    assert three.timing.median_ms == pytest.approx((5.0 * 5.1 * 5.2) ** (1 / 3))
    assert three.timing.low_ms < 5.0 < 5.2 < three.timing.high_ms
    assert three.timing.runs == 2100
    assert len(three.processes) == 3


def test_processes_too_far_apart_have_no_interval_and_the_record_says_why():
    two = record(*(outcome(timing=timing(median)) for median in (0.016, 4.2)))
    assert (two.timing.low_ms, two.timing.high_ms) == (None, None)
    assert two.missing["timing.low_ms"] == (
        "2 processes took 0.016 to 4.2 ms, too far apart to predict the next one: measure more (--processes)"
    )
    alone = record(outcome(timing=timing(5.0, low_ms=None, high_ms=None)))
    assert alone.missing["timing.low_ms"] == "too few runs, or too much variation, for an interval of the median"
    assert "timing.low_ms" not in record(outcome(timing=timing(5.0))).missing


def test_the_worst_process_s_percentile_stands_and_one_without_it_leaves_none():
    both = record(*(outcome(timing=timing(5.0, p99_ms=value, p90_ms=6.0)) for value in (7.0, 9.0)))
    assert both.timing.p99_ms == 9.0
    one_short = record(*(outcome(timing=timing(5.0, p99_ms=value, p90_ms=6.0)) for value in (7.0, None)))
    assert one_short.timing.p99_ms is None
    assert one_short.missing["timing.p99_ms"].startswith("needs 662 runs")
    assert "timing.p90_ms" not in one_short.missing


@pytest.mark.parametrize(
    ("statuses", "worst"),
    [(["ok", "failed"], "failed"), (["ok", "timeout"], "timeout"), (["ok", "aborted"], "aborted"), (["ok"], "ok")],
)
def test_the_worst_status_decides_and_brings_its_reason(statuses, worst):
    result = record(*(outcome(status, reason=f"because {status}") for status in statuses))
    assert (result.status, result.reason) == (worst, f"because {worst}")


def test_a_case_whose_processes_ran_other_models_fails():
    first, second = (msgspec.structs.replace(VIM, read={"net.py": digest}) for digest in ("ab", "cd"))
    assert record(outcome(timing=timing(), model=first), outcome(timing=timing(), model=first)).status == "ok"
    result = record(outcome(timing=timing(), model=first), outcome(timing=timing(), model=second))
    assert (result.status, result.timing) == ("failed", None)
    assert result.reason.startswith("different code or data: net.py changed; ")


def test_telemetry_is_pooled_over_processes():
    first = {"cpu_clock_hz": Summary(1e9, 2e9, 3e9, 10, "procfs"), "cpu_temp_c": Summary(40, 50, 60, 10, "thermal")}
    second = {"cpu_clock_hz": Summary(2e9, 4e9, 5e9, 30, "procfs")}
    result = record(*(outcome(timing=timing(), telemetry=telemetry) for telemetry in (first, second)))
    assert result.telemetry["cpu_clock_hz"] == Summary(1e9, 3.5e9, 5e9, 40, "procfs")
    assert list(result.telemetry) == ["cpu_clock_hz", "cpu_temp_c"]


@pytest.mark.parametrize(
    ("metric", "most_hz", "flags"),
    [
        ("cpu_clock_hz", 3e9, ["clock_below_range"]),
        ("cpu_clock_hz", 2.6e9, []),
        ("cpu_clock_hz", None, []),
        ("gpu_clock_hz", 3e9, []),  # of a case on the CPU
    ],
)
def test_a_clock_that_is_low_from_start_to_end_is_flagged(metric, most_hz, flags):
    process = outcome(timing=timing(), telemetry={metric: Summary(1.9e9, 2e9, 2.1e9, 9, "procfs")})
    assert record(process, cpu_max_hz=most_hz).flags == flags


@pytest.mark.parametrize(
    ("online", "percent", "flags"),
    [
        (None, 55.0, []),
        (None, 60.0, []),
        (None, 70.0, ["busy_machine"]),
        ("0-1", 60.0, []),
        ("0-2,5-8,11", 15.0, []),  # the case may use two of these eight
        ("0-2,5-8,11", 16.0, ["busy_machine"]),
    ],
)
def test_a_machine_that_others_use_is_flagged(online, percent, flags):
    telemetry = {
        "cpu_utilization_percent": Summary(0, percent, 100, 9, "procfs"),  # of all CPUs that are online
        "process_cpu_percent": Summary(0, 100, 100, 9, "procfs"),  # of one
    }
    system = {"online_cpus": online} if online else {}
    assert record(outcome(timing=timing(), telemetry=telemetry), cpu_count=2, system=system).flags == flags


@pytest.mark.parametrize(
    ("fields", "flags"),
    [
        ({}, []),
        ({"is_correlated": True}, ["correlated_blocks"]),
        ({"is_correlated": True, "starts_ns": [0, 20]}, []),  # the other process's blocks have the same cause
        ({"levels": [Level(ms=5.0, share=0.5), Level(ms=6.5, share=0.5)]}, ["two_levels"]),
    ],
)
def test_times_that_depend_on_time_or_jump_are_flagged(fields, flags):
    of_two = blocks([5.0, 5.1], bounds_ns=[0, 10, 30], **fields)
    assert record(outcome(timing=timing(5.0), blocks=of_two)).flags == flags


@pytest.mark.parametrize(("disturbed", "flags"), [(2, []), (3, ["throttled"])])
def test_what_disturbs_more_than_a_fifth_of_the_blocks_is_flagged(disturbed, flags):
    times = BlocksResult(median_ms=5.0, low_ms=None, high_ms=None, blocks=10)
    reasons = [["throttled"]] * disturbed + [[]] * (10 - disturbed)
    interference = Interference(reasons=reasons, clean=times, as_experienced=times, all_flagged=False)
    assert record(outcome(timing=timing(), interference=interference)).flags == flags


@pytest.mark.parametrize(
    ("facts", "flags"),
    [
        ({"node_shares": {"CUDAExecutionProvider": 1.0}}, []),
        ({"node_shares": {"CUDAExecutionProvider": 0.9, "CPUExecutionProvider": 0.1}}, ["provider_fallback"]),
        ({"typing": "strong"}, []),
        ({"typing": "weak"}, ["weak_typing"]),
    ],
)
def test_what_did_not_run_as_requested_is_flagged(facts, flags):
    runtime = RuntimeFacts(provider="CUDAExecutionProvider", **facts)
    assert record(msgspec.structs.replace(outcome(timing=timing()), runtime=runtime)).flags == flags


def test_energy_is_of_all_processes_or_none():
    with_energy, without = outcome(timing=timing(), energy=ENERGY), outcome(timing=timing())
    assert record(with_energy).energy == ENERGY
    result = record(with_energy, without)
    assert (result.energy, result.missing["energy"]) == (None, "no_sensor")


def test_energy_is_of_the_samples_in_the_window_above_those_in_its_rests():
    sampler, tick_ns = SamplerProcess(["fake"], 0.05), 50_000_000
    power = source(period_s=0.05, scope="module", name="fake")
    samples = [Sample(n * tick_ns, "power_w", n % 3 + (7.0 if 30 < n <= 90 else 1.0), "fake") for n in range(1, 121)]
    sampler.samples.add(Batch(samples=samples, t_ns=1, cpu_s=0.0, ticks_ns=[1], flushes=0, power=[power]))
    window, *idle = (Window(first * tick_ns, last * tick_ns) for first, last in ((33, 87), (1, 29), (92, 120)))
    ran = outcome(timing=timing(), window=window, idle=idle)

    def measured(**more):
        process = msgspec.structs.replace(ran.process, **more)
        given = msgspec.structs.replace(ran, process=process)
        case = Case(model="square", batch_size=4)
        return recording.with_samples(given, case, sampler, Machine("cpu", has_cxx=True), 0.05)

    measurement = measured()
    energy = measurement.process.energy
    assert (energy.source, energy.scope, measurement.missing.get("energy")) == ("fake", "module", None)
    assert energy.energy_j == pytest.approx(8.0 * window.seconds, rel=0.02)
    assert energy.gross_per_inference_j * 4 * timing().runs == pytest.approx(energy.energy_j)
    served = measured(requests=requests(5.0, dropped=100), parts={"service": timing(1.0)}).process.energy
    assert served.gross_per_inference_j * 4 * 900 == pytest.approx(energy.energy_j), "not by those that were answered"
    assert energy.idle_w == pytest.approx(2.0)


def test_a_sensor_that_fails_within_the_window_is_named_with_its_reason_and_a_remedy():
    sampler = SamplerProcess(["fake", "devfreq"], 0.05)
    power = source(period_s=0.05, scope="module", name="fake")
    failures = {"fake": "rail VIN: Resource temporarily unavailable", "devfreq": "gone"}
    sampler.samples.add(
        Batch(samples=[], t_ns=10**9, cpu_s=0.0, ticks_ns=[1], flushes=0, failures=failures, power=[power])
    )
    ran = outcome(timing=timing(), window=Window(1, 10**9))
    measurement = recording.with_samples(ran, Case(model="square"), sampler, Machine("cpu", has_cxx=True), 0.05)
    assert measurement.missing["energy"].endswith(f"; fake: {failures['fake']}; run `benchd doctor`")


def test_the_sensors_of_another_gpu_give_no_energy():
    def missing(ran_on):
        ran = msgspec.structs.replace(outcome(timing=timing(), window=Window(0, 10**9)), device_uuid=ran_on)
        machine = Machine("cuda", has_cxx=True, gpu_uuid="GPU-a")
        return recording.with_samples(ran, Case(model="square"), SamplerProcess(["fake"], 0.1), machine, 0.1).missing

    assert missing("b")["energy"].startswith("the sensors read GPU GPU-a, but the case ran on b")
    assert missing("a")["energy"] == "no_sensor"


@pytest.mark.parametrize(
    ("metric", "is_missing"), [("gpu_throttle_reasons", False), ("cpu_throttle_reasons", True), ("power_w", True)]
)
def test_it_is_said_if_no_source_tells_what_holds_the_clocks_of_the_device_down(metric, is_missing):
    sampler = SamplerProcess(["fake"], 0.1)
    sampler.samples.add(Batch(samples=[Sample(1, metric, 0.0, "fake")], t_ns=1, cpu_s=0.0, ticks_ns=[1], flushes=0))
    ran = outcome(timing=timing(), window=Window(0, 10**9))
    machine = Machine("cuda", has_cxx=True)
    measurement = recording.with_samples(ran, Case(model="square"), sampler, machine, 0.1)
    assert ("throttled" in measurement.missing) is is_missing


def test_what_was_not_measured_is_null_with_a_reason():
    result = record(outcome("unsupported", reason="no TensorRT"))
    for name in ("timing", "energy", "occupancy", "x_of_floor"):
        assert not getattr(result, name)
        assert result.missing[name]
    assert result.missing["energy"] == "no_sensor"


def test_x_of_floor_is_the_median_over_the_floor_by_the_first_rates_of_the_pass():
    result = record(outcome(timing=timing(30.0), model=VIM), probes=probes(2e12))
    flops = cost("vim_tiny", {}, 4, "fp32", "inference").matrix_flops
    assert result.x_of_floor == pytest.approx(30.0 / (1e3 * flops / 2e12))
    assert result.floor.bound_by == "matrix"
    assert result.probes == probes(2e12)
    assert not {"x_of_floor", "floor", "probes"} & result.missing.keys()


@pytest.mark.parametrize(("last", "moved"), [(2.05e12, False), (2.07e12, True), (1.95e12, False), (1.93e12, True)])
def test_a_device_whose_rates_moved_in_a_pass_is_named(last, moved):
    result = record(outcome(timing=timing(30.0), model=VIM, probes=probes(last)), probes=probes(2e12))
    assert ("probes_moved" in result.flags) is moved
    assert result.probes == probes(2e12)


@pytest.mark.parametrize(("rate", "flags"), [(1e9, ["faster_than_floor"]), (1e12, [])])
def test_a_case_that_is_faster_than_its_floor_is_flagged(rate, flags):
    result = record(outcome(timing=timing(100.0), model=VIM, probes=probes(rate)))
    assert (result.flags, result.x_of_floor < 1) == (flags, bool(flags))


def test_an_occupancy_that_one_process_measured_is_not_missing():
    occupied = Occupancy(theoretical=0.5, estimated=0.5, measured=0.5, utilization=0.9, kernels=3)
    ran = msgspec.structs.replace(outcome(timing=timing()), occupancy=occupied)
    refused = msgspec.structs.replace(outcome(timing=timing()), missing={"occupancy": "the profiler did not run"})
    assert record(refused).missing["occupancy"] == "the profiler did not run"
    result = record(ran, refused)
    assert (result.occupancy, "occupancy" in result.missing) == (occupied, False)


def test_a_scenario_with_pauses_has_neither_throughput_nor_floor_and_adds_up_its_deadlines():
    processes = [
        outcome(timing=timing(5.0), model=VIM, probes=probes(), deadlines=[Deadlines(30, 60, misses, 2.0 * misses)])
        for misses in (1, 3)
    ]
    paced = record(*processes, case=Case(model="vim_tiny", scenario="periodic"))
    assert (paced.throughput_per_s, paced.throughput_basis, paced.x_of_floor) == (None, None, None)
    assert paced.missing["x_of_floor"] == paced.missing["throughput_per_s"] == "periodic runs are not back to back"
    assert paced.deadlines == [Deadlines(30, 120, 4, 6.0)]


def requests(rate_hz, *, met=True, late=0, dropped=0):
    answered = 1000 - late - dropped
    counts = {"asked": 1000, "answered": answered, "late": late, "dropped": dropped}
    return Requests(rate_hz=rate_hz, met=met, arrivals_p=rate_hz / 100, noticed_ms=0.1, busy_share=0.5, **counts)


SERVER = Case(model="square", scenario="server", load=Load(deadline_ms=3.0))


@pytest.mark.parametrize(
    ("met", "of_all"), [((True, True), True), ((True, None), None), ((None, False), False), ((True, False), False)]
)
def test_the_requests_of_processes_add_up_and_the_least_rate_counts(met, of_all):
    each = [requests(30.0, met=met[0], late=3), requests(20.0, met=met[1], dropped=7)]
    result = record(*(outcome(timing=timing(5.0), requests=served) for served in each), case=SERVER)
    total = result.requests
    assert (total.rate_hz, total.met, total.arrivals_p) == (20.0, of_all, 0.2)
    assert (total.asked, total.answered, total.late, total.dropped) == (2000, 1990, 3, 7)
    assert (result.throughput_per_s, result.x_of_floor) == (None, None)


def test_a_percentile_that_dropped_requests_hide_says_so():
    result = record(outcome(timing=timing(5.0), requests=requests(30.0, dropped=200)), case=SERVER)
    assert result.missing["timing.p99_ms"] == "200 of 1000 requests were dropped"
    assert result.missing["timing.p999_ms"] == "needs 6636 runs per process, has 1000"


def test_a_median_that_dropped_requests_hide_has_no_interval_and_says_so():
    calm = outcome(timing=timing(5.0), requests=requests(30.0))
    result = record(calm, outcome(timing=timing(6.0), requests=requests(30.0, dropped=500)), case=SERVER)
    assert (result.timing.low_ms, result.timing.high_ms) == (None, None)
    words = "500 of 2000 requests were dropped: the times are those of the answered ones only"
    assert result.missing["timing.median_ms"] == words
    assert "timing.median_ms" not in record(calm, calm, case=SERVER).missing


def test_a_neighbour_s_frames_add_up_and_other_load_is_flagged_beside_it_too():
    case = Case(model="square", beside=Neighbour("vim_tiny,eager,b1", 30.0))
    telemetry = {
        "cpu_utilization_percent": Summary(minimum=90, mean=90, maximum=90, samples=9, source="procfs"),
        "process_cpu_percent": Summary(minimum=90, mean=90, maximum=90, samples=9, source="procfs"),
    }
    beside = NeighbourResult(case_id="vim_tiny,eager,b1", rate_hz=30.0, releases=30, misses=2, timing=timing(9.0))
    ended = outcome(timing=timing(5.0), beside=beside, telemetry=telemetry)
    result = record(ended, ended, case=case)
    assert (result.beside.releases, result.beside.misses, result.beside.timing.runs) == (60, 4, 1400)
    assert "busy_machine" in result.flags


def test_a_start_before_the_clock_was_set_is_dated_once_it_is():
    started = RunId("r7", "1970-01-01T00:01:00.000Z", time.monotonic_ns() - 3600 * 10**9)
    this = boot_id()
    assert unix_s(started.dated(this).t_wall) == pytest.approx(time.time() - 3600, abs=60.0)
    assert started.dated("an earlier boot") == started
    known = RunId.new()
    assert known.dated(this) == known
