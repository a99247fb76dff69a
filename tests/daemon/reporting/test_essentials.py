"""What a report keeps in memory of the records that decide it: everything that it shows, and little else."""

import tempfile
from io import StringIO
from pathlib import Path

import msgspec
import pytest
from records_made import ENERGY, ENVIRONMENT, PASSED, QANN, accuracy, made, timing

from benchd.daemon.records import (
    BlocksResult,
    Case,
    Deadlines,
    Floor,
    Interference,
    Load,
    Memory,
    Neighbour,
    NeighbourResult,
    ProcessResult,
    Record,
    Requests,
    Summary,
    Variant,
    Window,
    encode,
)
from benchd.daemon.reporting import report
from benchd.daemon.reporting.essentials import Essentials

DROPPED = {"parts", "limits", "artifacts", "runtime", "temperature", "occupancy", "probes", "missing", "deadlines"}
UNSHOWN = {"schema", "throughput_basis"}
"""Fields of a record that are too small to drop, though no format shows them."""

FAST = msgspec.structs.replace(ENVIRONMENT, cpu_max_hz=3e9, temperature_c={"cpu": 50.0}, command="bench-once")
SPIKING = msgspec.structs.replace(QANN, options=QANN.options | {"time_steps": 8})
ASKED = Requests(
    rate_hz=20.0,
    asked=100,
    answered=99,
    late=1,
    dropped=0,
    met=True,
    arrivals_p=0.5,
    noticed_ms=0.1,
    busy_share=0.5,
)
BLOCKS = BlocksResult(median_ms=5.0, low_ms=4.9, high_ms=5.1, blocks=2)
DISTURBED = Interference(reasons=[["steal"], []], clean=BLOCKS, as_experienced=BLOCKS, all_flagged=False)
BESIDE = NeighbourResult(case_id="square,eager,b1", rate_hz=10.0, releases=90, misses=3, timing=None)
WATTS = Summary(4.0, 5.0, 6.0, 9, "ina3221")


def process(median_ms, **fields):
    return ProcessResult(status="ok", timing=timing(median_ms), **fields)


def several(median_ms, **fields):
    """Return three processes of which the times and what is given differ."""
    return [process(median_ms * share, **fields) for share in (0.99, 1.0, 1.01)]


def counted(joules):
    return msgspec.structs.replace(ENERGY, gross_per_inference_j=joules)


def record(name, variant, median_ms, **fields):
    case = Case(model=name, variant=Variant.parse(variant), **fields.pop("asked", {}))
    given = {"run_id": case.case_id, "timing": timing(median_ms), "check": PASSED, "processes": several(median_ms)}
    return made(case=case, environment=FAST, **given | fields)


def net(name, facts, median_ms, joules):
    """Return a record of a net of a pair, with everything that a report shows of energy."""
    energy = counted(joules)
    processes = several(median_ms, energy=energy, window=Window(0, 10**10))
    return record(name, "eager", median_ms, model=facts, energy=energy, processes=processes)


def server(variant, rate_hz):
    """Return a server that found its highest rate, as did its processes."""
    found = [msgspec.structs.replace(ASKED, rate_hz=rate_hz * share) for share in (0.99, 1.0, 1.01)]
    load = {"scenario": "server", "load": Load(deadline_ms=50.0)}
    processes = [process(5.0, requests=one) for one in found]
    return record("vim_tiny", variant, 5.0, asked=load, requests=found[1], processes=processes)


def whole():
    """Return records that together have each part that a report shows."""
    shown = {
        "preset": "quick",
        "kernels_ran": "avx2",
        "throughput_per_s": 200.0,
        "throughput_basis": "measured",
        "telemetry": {"power_w@in": WATTS, "temperature_c@cpu": WATTS},
        "clocks": {"cpu_clock_hz": Summary(1e9, 1.2e9, 2e9, 9, "procfs")},
        "memory": Memory(rss_peak_bytes=2**30),
        "accuracy": accuracy(),
        "x_of_floor": 2.0,
        "floor": Floor(
            floor_ms=2.5,
            bound_by="bytes",
            matrix_ms=1,
            bytes_ms=2.5,
            exponentials_ms=0,
            matrix_flops=1,
            elementwise_flops=1,
            bytes=1,
            parameters_bytes=1,
            exponentials=0,
        ),
        "flags": ["simulated"],
        "processes": several(5.0, interference=DISTURBED),
    }
    deadlines = [Deadlines(60, 100, 3, 1.5)]
    beside = Neighbour("square,eager,b1", 10.0)
    failed = {"status": "failed", "reason": "out of memory", "timing": None, "check": None, "processes": []}
    return [
        record("vim_tiny", "custom", 5.0, **shown),
        record("vim_tiny", "compile", 5.0, **failed),
        record("vim_tiny", "eager", 9.0, asked={"scenario": "periodic"}, deadlines=deadlines),
        record("vim_tiny", "eager", 9.0, asked={"beside": beside}, beside=BESIDE),
        server("eager", 20.0),
        server("custom", 40.0),
        net("snn_stbif_resnet18", SPIKING, 4.0, 0.004),
        net("qann_resnet18", QANN, 2.0, 0.002),
    ]


def written(found):
    """Return each format's text by its name."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "records.jsonl").write_bytes(b"".join(encode(one) + b"\n" for one in found))
        report.report([folder], list(report.FORMATS), folder, StringIO())
        return {form: (folder / f"report.{form}").read_text() for form in report.FORMATS}


@pytest.fixture(scope="module")
def kept():
    pytest.importorskip("jinja2", reason="the extra `report` is not installed")
    return list(map(Essentials(), whole()))


@pytest.fixture(scope="module")
def shown(kept):
    return written(kept)


def test_a_report_of_what_is_kept_is_that_of_the_whole_records(shown):
    assert shown == written(whole())


@pytest.mark.parametrize("form", ["html", "md", "json"])
def test_a_report_has_the_line_of_a_spiking_net_and_its_ann(shown, form):
    line = "SNN/ANN b1 T 8: snn_stbif_resnet18 over qann_resnet18: latency 2x [1.96, 2.05] (eager 4 ms over eager 2 ms)"
    assert line in shown[form]
    assert "; energy 2x [" in shown[form]
    assert "] (eager 4 mJ over eager 2 mJ)" in shown[form]


def is_noticed(found, shown):
    try:
        return written(found) != shown
    except ValueError:  # a server that found its rate is ranked by those of its processes
        return True


def optional(of):
    return {field.name: field for field in msgspec.structs.fields(of) if not field.required}


def empty(field):
    return field.default_factory() if field.default is msgspec.NODEFAULT else field.default


@pytest.mark.parametrize("name", sorted(optional(Record).keys() - DROPPED - UNSHOWN))
def test_each_part_that_is_kept_is_shown(kept, shown, name):
    nothing = empty(optional(Record)[name])
    assert is_noticed([msgspec.structs.replace(one, **{name: nothing}) for one in kept], shown)


@pytest.mark.parametrize("name", ["timing", "window", "energy", "interference", "requests"])
def test_each_part_of_a_process_that_is_kept_is_shown(kept, shown, name):
    bare = [
        msgspec.structs.replace(
            one, processes=[msgspec.structs.replace(process, **{name: None}) for process in one.processes]
        )
        for one in kept
    ]
    assert is_noticed(bare, shown)


def test_what_no_format_shows_is_left_out(kept):
    fields = optional(Record)
    assert all(getattr(one, name) == empty(fields[name]) for one in kept for name in DROPPED)
    of_a_process = optional(ProcessResult).keys() - {"timing", "window", "energy", "interference", "requests"}
    nothing = ProcessResult(status="ok")
    for one in kept:
        for part in one.processes:
            assert all(getattr(part, name) == getattr(nothing, name) for name in of_a_process)


def test_equal_environments_are_one(kept):
    assert len({id(one.environment) for one in kept}) == 1
