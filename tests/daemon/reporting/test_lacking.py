"""A record that lacks what it may lack is shown without it, by all that reads results."""

import io
import itertools
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec
import pytest
from records_made import made, timing
from test_essentials import whole

from benchd.daemon.errors import SchemaError
from benchd.daemon.records import Case, ProcessResult, Record, Stages, TimeSlice, encode
from benchd.daemon.reporting.console import print_decisions
from benchd.daemon.reporting.record_text import lines
from benchd.daemon.reporting.report_page import page
from benchd.daemon.reporting.scenario_note import scenario_note
from benchd.daemon.reporting.spool import spooled
from benchd.daemon.verdicts import compare, results
from benchd.daemon.verdicts.demand import Demand
from benchd.daemon.verdicts.recommend import OBJECTIVES, Requirements, decide
from benchd.daemon.verdicts.spiking import comparisons

STAGES = Stages(spawn_s=0.1, import_s=2.0, build_s=0.5, load_s=0.2, first_run_s=0.3, second_run_s=0.01)
COURSE = [TimeSlice(start_s=at, end_s=at + 30, median_ms=4.0, telemetry={"power_w": 7.0}) for at in (0.0, 570.0)]


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
    for one in found:
        list(lines(one))
        compare.command(one)
        scenario_note(one)
    for objective in OBJECTIVES:
        print_decisions(io.StringIO(), decide(found, Requirements(objective=objective)), as_json=False)
    decide(found, Requirements(max_latency_ms=9, demand=Demand(rate_hz=15.0, deadline_ms=50.0, streams=1)))
    compare.compare(found, found, 0.005)
    (folder / "records.jsonl").write_bytes(b"".join(encode(one) + b"\n" for one in found))
    with spooled([folder], folder) as spool:
        page(spool, decide(spool.decisive, Requirements()), [], [])
        comparisons(spool.decisive)


@pytest.mark.parametrize("number", range(len(kinds())))
def test_no_part_that_a_record_may_lack_is_needed(number, tmp_path):
    found, seen = kinds(), []
    plain = msgspec.to_builtins(found[number])
    # all kinds have the first one's environment, which the same code reads
    own = [path for path in paths(plain) if number == 0 or path[0] != "environment" or len(path) == 1]
    for path, then in itertools.product(own, ("null", "empty", "missing")):
        with suppress(SchemaError):  # it may not lack that
            changed = results.decoded(msgspec.json.encode(lacking(plain, path, then)))
            if changed not in seen:
                seen.append(changed)
                show([changed, found[5]], tmp_path)
    assert seen
