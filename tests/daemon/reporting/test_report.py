"""A report in each format: what a row holds, and a page that stands alone and says what strangers wrote as text."""

import csv
import errno
import json
import os
import re
from html.parser import HTMLParser
from io import StringIO

import msgspec
import pytest
import records_made
from records_made import ENVIRONMENT, PASSED, QANN, floor, made, timing

from benchd.daemon.errors import Full, UsageError
from benchd.daemon.records import (
    BlocksResult,
    Case,
    Interference,
    ProcessResult,
    Summary,
    Variant,
    encode,
)
from benchd.daemon.reporting import report
from benchd.daemon.verdicts import results as results_of

ENERGY = msgspec.structs.replace(records_made.ENERGY, energy_j=10.0, energy_err_j=0.2, gross_per_inference_j=0.031)
EVIL = "</script><b>|x"


def record(run, variant, median_ms, **fields):
    case = Case(
        model="vim_tiny",
        variant=Variant.parse(variant),
        batch_size=fields.pop("batch", 1),
        provider=fields.pop("provider", None),
    )
    processes = [ProcessResult(status="ok", timing=timing(median_ms * share)) for share in (0.999, 1.0, 1.001)]
    given = {"check": PASSED, "energy": ENERGY, "throughput_per_s": median_ms and 1e3 / median_ms}
    given |= {"processes": processes}
    given |= {"suite_id": f"s{run}", "t_wall": f"2026-01-{run:02d}T00:00:00.000Z", "timing": timing(median_ms)}
    return made(run_id=f"{run}{variant}{case.batch_size}", case=case, **given | fields)


@pytest.fixture
def results(tmp_path):
    """A year's start of two variants, the second of which turns slower, two batch sizes, and a case that failed."""
    records = [record(run, "eager", 9.0 + 0.01 * (run % 2)) for run in range(1, 13)]
    records += [record(run, "custom", (4.0 if run < 7 else 4.5) + 0.01 * (run % 2)) for run in range(1, 13)]
    records += [record(12, "eager", 30.0, batch=4)]
    records += [
        record(13, "fp16", 1.0, status="failed", reason=EVIL, timing=None, energy=None, check=None, processes=[])
    ]
    records[-1] = msgspec.structs.replace(records[-1], device_id=EVIL, throughput_per_s=None)
    path = tmp_path / "records.jsonl"
    path.write_bytes(b"".join(encode(entry) + b"\n" for entry in records))
    return path


@pytest.fixture
def written(results, tmp_path):
    """Return a function that writes one format and returns its text and what was printed."""

    def write(name):
        out = StringIO()
        report.report([results], [name], tmp_path / "out", out)
        return (tmp_path / "out" / f"report.{name}").read_text(), out.getvalue()

    return write


def test_csv_is_one_flat_row_a_record_with_units_in_its_header(written, tmp_path):
    text, printed = written("csv")
    rows = list(csv.DictReader(StringIO(text)))
    assert len(rows) == 26
    assert {"median_ms", "throughput_per_s", "energy_per_inference_j", "memory_mib"} <= rows[0].keys()
    last = {row["variant"]: row for row in rows}["custom"]
    assert (last["median_ms"], last["energy_error_share"], last["check"]) == ("4.5", "0.02", "passed")
    assert rows[-1]["reason"] == EVIL
    assert rows[-1]["median_ms"] == ""
    assert (
        "vim_tiny b1 on bench-abc123: ship: custom  4.5 ms  31 mJ ±2 %  check ok  (eager takes 2x [2, 2] as long)\n"
        in printed
    )
    assert printed.endswith(f"{tmp_path / 'out' / 'report.csv'}\n")


def test_json_holds_the_decisions_and_the_rows(written):
    document = json.loads(written("json")[0])
    assert document["decisions"][0]["ship"] == "custom"
    assert document["decisions"][-1]["excluded"] == {"eager-fp16": f"failed: {EVIL}"}
    assert len(document["records"]) == 26


class Page(HTMLParser):
    """The tags, the text outside scripts, and each script of a page."""

    def __init__(self, text):
        super().__init__()
        self.tags, self.scripts, self.words, self._inside = [], [], [], None
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        self.tags.append((tag, dict(attributes)))
        self._inside = tag

    def handle_endtag(self, tag):
        self._inside = None

    def handle_data(self, data):
        (self.scripts if self._inside == "script" else self.words).append(data)


@pytest.fixture
def page(written):
    pytest.importorskip("jinja2", reason="the extra `report` is not installed")
    return Page(written("html")[0])


def test_a_page_beside_a_folder_leaves_that_as_it_is_even_on_a_full_disk(results, tmp_path, monkeypatch):
    pytest.importorskip("jinja2", reason="the extra `report` is not installed")
    folder = tmp_path / "shipped"
    folder.mkdir()
    results.rename(folder / "records.jsonl")
    assert report.page(folder, tmp_path / "shipped.html").read_text().startswith("<!")

    def half(*_):
        yield "<!"
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(report, "_html", half)
    with pytest.raises(Full, match=r"shipped\.html: No space left on device"):
        report.page(folder, tmp_path / "shipped.html")
    left = sorted(str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*"))
    assert left == ["shipped", "shipped.html", "shipped/records.jsonl"]


def charts(page):
    return json.loads(re.search(r"const charts = (.*);\n", page.scripts[-1])[1])


def test_the_page_stands_alone(page):
    assert not [attributes for _, attributes in page.tags if attributes.keys() & {"src", "href"}]
    assert sum(tag == "script" for tag, _ in page.tags) == 2
    assert sum(tag == "div" and attributes.get("class") == "chart" for tag, attributes in page.tags) == 4


def test_the_page_shows_what_strangers_wrote_as_text(page):
    assert not [tag for tag, _ in page.tags if tag == "b"]
    assert EVIL in "".join(page.words)


def test_the_charts_hold_the_front_and_the_new_level(page):
    by_title = {chart["title"]: chart for chart in charts(page)}
    front = next(trace for trace in by_title["Latency against energy"]["data"] if trace["name"] == "vim_tiny b1: front")
    assert front["text"] == ["vim_tiny,custom,b1"]
    (ring,) = [trace for trace in by_title["History by device"]["data"] if "a new level" in trace["name"]]
    assert ring["x"] == ["2026-01-07T00:00:00.000Z"]
    batches = next(trace for trace in by_title["Throughput by batch size"]["data"] if trace["name"] == "vim_tiny eager")
    assert batches["x"] == [1, 4]


@pytest.fixture
def drawn(tmp_path):
    """Return a function that returns the charts of these records by title, and the words of their page."""
    pytest.importorskip("jinja2", reason="the extra `report` is not installed")

    def draw(*records):
        (tmp_path / "drawn").write_bytes(b"".join(encode(entry) + b"\n" for entry in records))
        report.report([tmp_path / "drawn"], ["html"], tmp_path / "drawn-out", StringIO())
        report_page = Page((tmp_path / "drawn-out" / "report.html").read_text())
        return {chart["title"]: chart["data"] for chart in charts(report_page)}, "".join(report_page.words)

    return draw


def points(traces):
    """Return the texts of the points by the name of their trace."""
    return {trace["name"]: trace["text"] for trace in traces}


def test_the_roofline_places_a_case_by_its_products_below_the_roof_of_its_probes(drawn):
    times = {"floor_ms": 2.0, "bound_by": "matrix", "matrix_ms": 2.0, "bytes_ms": 0.5}
    least = floor(**times, matrix_flops=4_000_000, bytes=1_000_000, uncounted=["aten::sort"])
    traces, words = drawn(made(check=PASSED, timing=timing(8.0), floor=least))
    roof, placed = traces["Roofline"]
    assert (placed["x"], placed["y"]) == ([4.0], [0.5])
    assert placed["text"] == ["vim_tiny,eager,b1 (at least: without aten::sort)"]
    assert roof["x"] == pytest.approx([0.5, 1.0, 8.0])
    assert roof["y"] == pytest.approx([1.0, 2.0, 2.0])
    assert "probed bandwidth" in words


def test_what_cannot_win_is_a_cross_and_neither_ringed_nor_joined(drawn):
    wrong = msgspec.structs.replace(PASSED, passed=False)
    by_title, _ = drawn(
        record(1, "eager", 9.0),
        record(1, "custom", 4.0, check=wrong),
        record(2, "eager", 1.0, batch=4, flags=["provider_fallback"]),
    )
    crosses = ["vim_tiny,custom,b1: fails its numerical check"]
    crosses += ["vim_tiny,eager,b4: did not run as requested (provider_fallback)"]
    energy, batches, variants = list(by_title.values())[:3]
    assert points(energy)["vim_tiny b1: front"] == ["vim_tiny,eager,b1"]
    assert points(batches) == {"vim_tiny eager": ["vim_tiny,eager,b1"], "cannot win": crosses}
    assert points(variants) == {"eager": ["vim_tiny,eager,b1"], "cannot win": crosses}
    assert points(energy)["cannot win"] == crosses


def test_variants_of_two_models_are_crosses_in_the_charts_where_they_meet(drawn):
    first, second = (
        msgspec.structs.replace(PASSED, outputs=["scores 10"], inputs_sha256="i", projections=[along])
        for along in (1.0, 1.7)
    )
    by_title, words = drawn(
        record(1, "eager", 9.0, check=first, model=QANN),
        record(2, "custom", 4.0, check=second, model=QANN),
        record(3, "eager", 1.0, batch=4, check=second, model=QANN),
    )
    energy, _, variants = list(by_title.values())[:3]
    assert "nothing to ship: its exact answers to the same inputs differ" in words
    assert [text.partition(":")[0] for text in points(variants)["cannot win"]] == [
        "vim_tiny,eager,b1",
        "vim_tiny,custom,b1",
    ]
    assert points(variants)["eager"] == ["vim_tiny,eager,b4"]
    assert [name for name in points(energy) if name.endswith("front")] == ["vim_tiny b4: front"]


def test_charts_tell_devices_power_modes_and_scopes_apart(drawn):
    cuda, low = (
        msgspec.structs.replace(ENVIRONMENT, **fields) for fields in ({"device": "cuda"}, {"power_mode": "15W"})
    )
    board = msgspec.structs.replace(ENERGY, scope="GPU board")
    by_title, _ = drawn(
        record(1, "eager", 9.0),
        record(2, "eager", 10.0, environment=low),
        record(3, "eager", 1.0, environment=cuda, energy=board),
    )
    energy, batches, variants, _ = by_title.values()
    fronts = {name for name in points(energy) if name.endswith("front")}
    places = ("on cpu{}", "on cpu at 15W{}", "on cuda{}")
    module, card = " of module: front", " of GPU board: front"
    assert fronts == {
        f"vim_tiny b1 {place.format(end)}" for place, end in zip(places, (module, module, card), strict=True)
    }
    assert points(batches).keys() == {f"vim_tiny eager {place.format('')}" for place in places}
    assert sorted(variants[0]["y"]) == [f"vim_tiny b1 {place.format('')}" for place in places]


def test_a_time_of_zero_is_left_out_of_the_charts_and_named(drawn):
    blocks = BlocksResult(median_ms=0.0, low_ms=None, high_ms=None, blocks=1)
    interference = Interference(reasons=[["steal"]], clean=blocks, as_experienced=blocks, all_flagged=True)
    stopped = [ProcessResult(status="ok", timing=timing(0.0), interference=interference)]
    zeros = [record(run, "custom", 0.0, throughput_per_s=None, processes=stopped) for run in (1, 2)]
    by_title, words = drawn(record(1, "eager", 9.0), record(2, "eager", 9.0), *zeros)
    assert points(by_title["Variants by model"]) == {"eager": ["vim_tiny,eager,b1"]}
    assert "Left out of the charts: vim_tiny,custom,b1 reports an impossible time of 0 ms." in words
    assert "vim_tiny b1: ship: eager" in words


def test_one_process_is_said_with_hardware_clocks_and_units(drawn):
    clocks = {"cpu_clock_hz": Summary(1e9, 1.2e9, 2e9, 9, "procfs")}
    fast = msgspec.structs.replace(ENVIRONMENT, cpu_max_hz=3e9, power_mode="15W")
    single = record(1, "eager", 9.0, processes=[ProcessResult(status="ok", timing=timing(9.0))])
    _, words = drawn(msgspec.structs.replace(single, environment=fast, telemetry=clocks))
    for text in (
        "bench-abc123: cpu: cpu, 2 threads | power mode 15W | ran at 1200 of 3000 MHz",
        "1 of 1 records with only one process",
        "energy: module",
        "median ms [95 %]",
        "9 [8.91, 9.09]",
        "energy mJ",
        "31 ±2 %",
    ):
        assert text in words


def test_a_format_that_fails_leaves_the_last_report(results, tmp_path, monkeypatch):
    report.report([results], ["csv"], tmp_path, StringIO())
    last = (tmp_path / "report.csv").read_text()

    def cut_off(records, left_out, decisions):
        yield "half a report"
        raise OSError("no space left on device")

    monkeypatch.setitem(report.FORMATS, "csv", cut_off)
    with pytest.raises(UsageError, match="no space"):
        report.report([results], ["csv"], tmp_path, StringIO())
    assert (tmp_path / "report.csv").read_text() == last


def test_a_report_shows_the_newest_records_and_says_how_many_older_ones_it_left_out(tmp_path, monkeypatch):
    monkeypatch.setattr(results_of, "NEWEST", 3)
    by_day = [record(day, "eager", 5.0) for day in (4, 1, 5, 2, 3)]
    (tmp_path / "records.jsonl").write_bytes(b"".join(encode(entry) + b"\n" for entry in [*by_day, by_day[0]]))
    out = StringIO()
    report.report([tmp_path], ["csv", "json", "md"], tmp_path, out)
    days = [line["t_wall"][8:10] for line in csv.DictReader((tmp_path / "report.csv").read_text().splitlines())]
    assert days == ["03", "04", "05"]
    note = "2 older records left out: a report shows the newest 3"
    assert note in out.getvalue()
    assert note in (tmp_path / "report.md").read_text()
    assert json.loads((tmp_path / "report.json").read_text())["left_out"] == 2
