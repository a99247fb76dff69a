"""A record that lacks what it may lack is shown without it, by all that reads results."""

import io
import itertools
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec
import pytest
from records_made import ENERGY, ENVIRONMENT, PASSED, QANN, accuracy, floor, made, requests, timing

from benchd.daemon.errors import SchemaError
from benchd.daemon.records import (
    BlocksResult,
    Case,
    Deadlines,
    Interference,
    Load,
    Memory,
    Neighbour,
    NeighbourResult,
    ProcessResult,
    Record,
    Stages,
    Summary,
    TimeSlice,
    Variant,
    Window,
    encode,
)
from benchd.daemon.reporting.console import print_decisions
from benchd.daemon.reporting.record_text import lines
from benchd.daemon.reporting.report_page import page
from benchd.daemon.reporting.scenario_note import scenario_note
from benchd.daemon.verdicts import compare, results
from benchd.daemon.verdicts.demand import Demand
from benchd.daemon.verdicts.recommend import OBJECTIVES, Requirements, decide
from benchd.daemon.verdicts.spiking import comparisons

STAGES = Stages(spawn_s=0.1, import_s=2.0, build_s=0.5, load_s=0.2, first_run_s=0.3, second_run_s=0.01)
COURSE = [TimeSlice(start_s=at, end_s=at + 30, median_ms=4.0, telemetry={"power_w": 7.0}) for at in (0.0, 570.0)]


FAST = msgspec.structs.replace(ENVIRONMENT, cpu_max_hz=3e9, temperature_c={"cpu": 50.0}, command="bench-once")
SPIKING = msgspec.structs.replace(QANN, options=QANN.options | {"time_steps": 8})
ASKED = requests(asked=100, late=1, rate_hz=20.0)
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
    answered = [msgspec.structs.replace(ASKED, rate_hz=rate_hz * share) for share in (0.99, 1.0, 1.01)]
    load = {"scenario": "server", "load": Load(deadline_ms=50.0)}
    processes = [process(5.0, requests=served) for served in answered]
    return record("vim_tiny", variant, 5.0, asked=load, requests=answered[1], processes=processes)


def whole():
    """Return records that together have each part that a report shows."""
    fields = {
        "preset": "quick",
        "kernels_ran": "avx2",
        "throughput_per_s": 200.0,
        "throughput_basis": "measured",
        "telemetry": {"power_w@in": WATTS, "cpu_clock_hz": Summary(1e9, 1.2e9, 2e9, 9, "procfs")},
        "memory": Memory(rss_peak_bytes=2**30),
        "accuracy": accuracy(),
        "x_of_floor": 2.0,
        "floor": floor(),
        "flags": ["simulated"],
        "processes": several(5.0, interference=DISTURBED),
    }
    deadlines = [Deadlines(60, 100, 3, 1.5)]
    beside = Neighbour("square,eager,b1", 10.0)
    failed = {"status": "failed", "reason": "out of memory", "timing": None, "check": None, "processes": []}
    return [
        record("vim_tiny", "custom", 5.0, **fields),
        record("vim_tiny", "compile", 5.0, **failed),
        record("vim_tiny", "eager", 9.0, asked={"scenario": "periodic"}, deadlines=deadlines),
        record("vim_tiny", "eager", 9.0, asked={"beside": beside}, beside=BESIDE),
        server("eager", 20.0),
        server("custom", 40.0),
        net("snn_stbif_resnet18", SPIKING, 4.0, 0.004),
        net("qann_resnet18", QANN, 2.0, 0.002),
    ]


def kinds():
    """Return one record per kind, and a second of the server, which is ranked against it."""
    scenarios = {
        "cold_start": {"processes": [ProcessResult(status="ok", timing=timing(), stages=STAGES)]},
        "sustained": {"processes": [ProcessResult(status="ok", timing=timing(), timeline=COURSE)]},
        "wake_up": {"parts": {"gap_0_ms": timing(), "gap_10_ms": timing()}},
        "pipeline": {"parts": {"decode": timing(), "model": timing()}},
    }
    others = [made(run_id=name, case=Case(model="square", scenario=name), **it) for name, it in scenarios.items()]
    trained = made(run_id="t", case=Case(model="square", direction="training"), parts={"forward": timing()})
    return [*whole(), *others, trained]


def paths(value: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """Yield where the parts of a decoded record lie, those of the items of a list as one."""
    if isinstance(value, dict):
        for name, inner in value.items():
            yield (*path, name)
            yield from paths(inner, (*path, name))
    elif isinstance(value, list):
        yield from dict.fromkeys(each for item in value for each in paths(item, (*path, "*")))


def lacking(value: Any, path: tuple[str, ...], then: str) -> Any:
    """Return a decoded record whose part at `path` is null, empty or missing."""
    name, *rest = path
    if name == "*":
        return [lacking(item, tuple(rest), then) for item in value]
    if not isinstance(value, dict) or name not in value:
        return value
    if rest:
        return value | {name: lacking(value[name], tuple(rest), then)}
    if then == "missing":
        return {each: inner for each, inner in value.items() if each != name}
    return value | {name: None if then == "null" else type(value[name])()}


def show(found: list[Record], folder: Path) -> None:
    """Show the records as each command does."""
    for entry in found:
        list(lines(entry))
        compare.command(entry)
        scenario_note(entry)
    for objective in OBJECTIVES:
        print_decisions(io.StringIO(), decide(found, Requirements(objective=objective)), as_json=False)
    decide(found, Requirements(max_latency_ms=9, demand=Demand(rate_hz=15.0, deadline_ms=50.0, streams=1)))
    compare.compare(found, found, 0.005)
    (folder / "records.jsonl").write_bytes(b"".join(encode(entry) + b"\n" for entry in found))
    records, _ = results.newest([folder])
    page(records, decide(records, Requirements()), [], [])
    comparisons(records)


@pytest.mark.parametrize("number", range(len(kinds())))
def test_no_part_that_a_record_may_lack_is_needed(number, tmp_path):
    records, seen = kinds(), []
    plain = [msgspec.to_builtins(entry) for entry in records[: number + 1]]
    # the inner parts that an earlier kind has too are read by the same code
    earlier = {path for entry in plain[:-1] for path in paths(entry) if len(path) > 1}
    own = [path for path in paths(plain[-1]) if path not in earlier]
    for path, then in itertools.product(own, ("null", "empty", "missing")):
        with suppress(SchemaError):  # it may not lack that
            changed = results.decoded(msgspec.json.encode(lacking(plain[-1], path, then)))
            if changed not in seen:
                seen.append(changed)
                show([changed, records[5]], tmp_path)
    assert seen
