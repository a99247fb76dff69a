"""A report in each format: what a row holds, and a page that stands alone and says what strangers wrote as text."""

import csv
import json
import re
from html.parser import HTMLParser
from io import StringIO

import msgspec
import pytest
from records_made import made, timing

from benchd.daemon import report
from benchd.daemon.errors import UsageError
from benchd.daemon.records import BlocksResult, Case, Check, Energy, Interference, ProcessResult, Variant, encode

PASSED = Check(
    passed=True, rule="outputs", images=8, max_abs_error=0, error_share=1e-6, tolerance=1, argmax_disagreements=0
)
ENERGY = Energy(
    energy_j=10.0,
    energy_err_j=0.2,
    gross_per_inference_j=0.031,
    scope="module",
    source="ina3221",
    sensor_period_s=0.1,
    updates=99,
)
EVIL = "</script><b>|x"


def record(run, variant, median_ms, **fields):
    case = Case(model="vim_tiny", variant=Variant.parse(variant), batch_size=fields.pop("batch", 1))
    processes = [ProcessResult(status="ok", timing=timing(median_ms * share)) for share in (0.999, 1.001)]
    given = {"check": PASSED, "energy": ENERGY, "throughput_per_s": 1e3 / median_ms, "processes": processes}
    given |= {"suite_id": f"s{run}", "t_wall": f"2026-01-{run:02d}T00:00:00.000Z", "timing": timing(median_ms)}
    return made(run_id=f"{run}{variant}{case.batch_size}", case=case, **given | fields)


@pytest.fixture
def results(tmp_path):
    """A year's start of two variants, the second of which turns slower, two batch sizes, and a case that failed."""
    found = [record(run, "eager", 9.0 + 0.01 * (run % 2)) for run in range(1, 13)]
    found += [record(run, "custom", (4.0 if run < 7 else 4.5) + 0.01 * (run % 2)) for run in range(1, 13)]
    found += [record(12, "eager", 30.0, batch=4)]
    found += [record(13, "fp16", 1.0, status="failed", reason=EVIL, timing=None, energy=None, check=None, processes=[])]
    found[-1] = msgspec.structs.replace(found[-1], device_id=EVIL, throughput_per_s=None)
    path = tmp_path / "records.jsonl"
    path.write_bytes(b"".join(encode(one) + b"\n" for one in found))
    return path


@pytest.fixture
def written(results, tmp_path):
    """Return a function that writes one format and returns its text and what was printed."""

    def write(name):
        out = StringIO()
        assert report.report([results], [name], tmp_path / "out", out) == 0
        return (tmp_path / "out" / f"report.{name}").read_text(), out.getvalue()

    return write


def test_csv_is_one_flat_row_a_record_with_units_in_its_header(written, tmp_path):
    text, printed = written("csv")
    rows = list(csv.DictReader(StringIO(text)))
    assert len(rows) == 26
    assert {"median_ms", "throughput_per_s", "energy_per_inference_j", "memory_mib"} <= rows[0].keys()
    last = {row["variant"]: row for row in rows}["custom"]
    assert (last["median_ms"], last["energy_error_share"], last["check_passed"]) == ("4.5", "0.02", "True")
    assert rows[-1]["reason"] == EVIL
    assert rows[-1]["median_ms"] == ""
    assert "vim_tiny b1 on bench-abc123: ship: custom  4.5 ms  31 mJ ±2 %  check ok  (2x eager)\n" in printed
    assert printed.endswith(f"{tmp_path / 'out' / 'report.csv'}\n")


def test_a_row_tells_of_disturbed_blocks_with_both_medians():
    clean, all_of_it = (BlocksResult(median_ms=ms, low_ms=None, high_ms=None, blocks=2) for ms in (5.0, 5.5))
    found = Interference(reasons=[["steal"], []], clean=clean, as_experienced=all_of_it, all_flagged=False)
    row = report.row(made(processes=[ProcessResult(status="ok", interference=found)]))
    assert (row["disturbed_blocks"], row["clean_ms"], row["as_experienced_ms"]) == (1, 5.0, 5.5)
    row = report.row(made())
    assert (row["disturbed_blocks"], row["clean_ms"], row["as_experienced_ms"]) == (0, None, None)


def test_json_holds_the_decisions_and_the_rows(written):
    said = json.loads(written("json")[0])
    assert said["decisions"][0]["ship"] == "custom"
    assert len(said["records"]) == 26


def test_markdown_is_a_table_of_whole_rows(written):
    lines = written("md")[0].splitlines()
    table = [line for line in lines if line.startswith("|")]
    assert len(table) == 28
    assert len({len(re.findall(r"(?<!\\)\|", line)) for line in table}) == 1


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
    pytest.importorskip("plotly", reason="the extra `report` is not installed")
    return Page(written("html")[0])


def charts(page):
    return json.loads(re.search(r"const charts = (.*);\n", page.scripts[-1])[1])


def test_the_page_stands_alone(page):
    assert not [attributes for _, attributes in page.tags if attributes.keys() & {"src", "href"}]
    assert sum(tag == "script" for tag, _ in page.tags) == 2
    assert sum(tag == "div" and attributes.get("class") == "chart" for tag, attributes in page.tags) == 5


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
    assert len(by_title["Run-to-run consistency"]["data"][0]["y"]) == 24


def test_records_without_energy_say_so(page, tmp_path):
    path = tmp_path / "bare"
    path.write_bytes(encode(made()) + b"\n")
    report.report([path], ["html"], tmp_path / "bare-out", StringIO())
    bare = Page((tmp_path / "bare-out" / "report.html").read_text())
    assert "No record holds energy." in "".join(bare.words)


def test_no_records_are_no_report(tmp_path):
    (tmp_path / "empty").write_bytes(b"")
    with pytest.raises(UsageError, match="holds no record"):
        report.report([tmp_path / "empty"], ["csv"], tmp_path, StringIO())
