"""A profile as text, Markdown and a page: every table, every unit, and names that strangers chose as text."""

import json
import re
from html.parser import HTMLParser
from io import StringIO

import msgspec
import pytest
from profile_shown import EVIL, FINDINGS, LAYERS, shown, shown_on_cpu
from rich.console import Console

from benchd.daemon.profiling.output import report, terminal
from benchd.daemon.profiling.output.sections import digits, finding_lines, sections
from benchd.daemon.profiling.output.terminal import print_profile
from benchd.daemon.profiling.profile import Finding, LayerRow
from benchd.daemon.profiling.rules.layer_rules import late_stages

GPU_SORT, CPU_SORT = "self_device_ns", "self_cpu_ns"


def tables(profile, sort=GPU_SORT):
    return {section.title: section for section in sections(profile, sort)}


def column(section, heading):
    return [row[section.headings.index(heading)] for row in section.rows]


def test_every_table_is_there_and_whole():
    by_title = tables(shown())
    assert list(by_title) == [
        "Profile",
        "Step time by category",
        "GPU",
        "Operators",
        "Modules",
        "Kernels",
        "Synchronisations",
        "Kernels, counted by ncu",
        "Kernels, by nsys",
        "Runtime calls, by nsys",
        "NVTX ranges, by nsys",
        "Memory at its peak",
        "Largest allocations",
        "Benchmark",
        "Components",
        "Layers",
        "Not measured",
    ]
    for section in by_title.values():
        assert {len(row) for row in section.rows} == {len(section.headings)}, section.title


def test_what_was_not_measured_is_a_dash_or_no_column_and_never_zero():
    by_title = tables(shown_on_cpu(), CPU_SORT)
    assert list(by_title) == ["Profile", "Step time by category", "Operators", "Modules"]
    assert [heading for heading in by_title["Operators"].headings if "device" in heading] == []
    assert column(tables(shown())["Kernels"], "est. occupancy %") == ["-", "33.30"]
    assert "measured occupancy %" not in tables(shown())["Kernels"].headings
    assert column(tables(shown())["Kernels, counted by ncu"], "measured occupancy %") == ["31.00"]


def test_the_layers_of_a_runtime_are_said_to_be_its_own_and_lead_to_no_conclusion_about_the_model():
    rows = [LayerRow(name=f"layer{n}/conv", ns=1e6, share=0.5) for n in (3, 4)]
    own = {"components": [], "layers": rows, "synchronised_ns": 2e6, "timed_by": "tensorrt", "notes": []}
    profile = shown(layers=msgspec.structs.replace(LAYERS, **own, measured_energy_j=2e-3, measured_energy_err_j=1e-4))
    by_title = tables(profile)
    assert "Components" not in by_title
    assert by_title["Layers"].note.startswith("Timed by tensorrt itself")
    assert "they take 2 ms in total, and a run without its profiler takes 6 ms" in by_title["Layers"].note
    assert "Measured: 2 ± 0.1 mJ per image" in by_title["Layers"].note
    assert late_stages(profile) is None
    assert late_stages(shown(layers=msgspec.structs.replace(profile.layers, timed_by=None))) is not None


def test_a_refuted_finding_says_so_with_both_figures():
    lines = finding_lines(FINDINGS[0], 2)
    assert "predicted: about 0.5 of the time (2x as fast)" in lines
    assert "measured: 1.25 of the time (0.8x as fast): REFUTED" in lines
    assert "tested by: --variants custom --option scan=two_level" in lines
    bare = Finding(rule="r", title="t", evidence=[], advice="a")
    assert finding_lines(bare, 2) == ["t", "do: a"]


def test_the_terminal_shows_fifteen_rows_of_each_table_and_the_findings():
    operators = [msgspec.structs.replace(shown().torch.operators[0], name=f"op{n}") for n in range(40)]
    profile = shown(torch=msgspec.structs.replace(shown().torch, operators=operators))
    out = StringIO()
    print_profile(out, profile, GPU_SORT)
    text = out.getvalue()
    assert len(re.findall(r"^op\d+ ", text, re.MULTILINE)) == 15
    assert "1. selective_scan_fwd_kernel takes 60.6 % of the device's time\n" in text
    assert "REFUTED" in text
    assert "<img" in text


def test_a_busy_machine_is_said_first_and_leaves_predictions_one_digit():
    busy = shown(foreign_cpus=1.26)
    warning = (
        "busy machine: other processes used 1.3 CPUs during the profile: times may be too long and gains are uncertain"
    )
    text = report.markdown(busy, GPU_SORT)
    assert text.index(warning) < text.index("## Findings")
    assert warning not in report.markdown(shown(foreign_cpus=0.1), GPU_SORT)
    assert tables(shown(foreign_cpus=0.1))["Profile"].rows[-1][1] == "used 0.1 CPUs during the profile"
    assert (digits(busy), digits(shown()), digits(shown_on_cpu())) == (1, 1, 2)


@pytest.mark.parametrize(
    ("layers", "words", "why"),
    [
        (
            {"synchronised_ns": 9.5e6},
            "contradictory times",
            "the layers add up to 9.5 ms, but a run takes 6 ms",
        ),
        (
            {"fused_ns": 13e6},
            "contradictory times",
            "a run takes 13 ms, but the benchmark's forward pass takes 6.2 ms",
        ),
        (
            {"run_ns": [6e6, 9e6] * 5},
            "jumps between two speeds",
            "a run takes either 6 ms or 9 ms",
        ),
    ],
)
def test_times_that_contradict_each_other_are_said_first_and_mark_every_finding(layers, words, why):
    quiet = shown(device="cpu")
    profile = msgspec.structs.replace(quiet, layers=msgspec.structs.replace(LAYERS, **layers))
    out = StringIO()
    print_profile(out, profile, GPU_SORT)
    text = out.getvalue()
    assert text.startswith(f"warning: {words}: {why}: times may be too long and gains are uncertain")
    assert f"1. selective_scan_fwd_kernel takes 60.6 % of the device's time ({words})\n" in text
    assert digits(profile) == 1
    assert not any(words in text for words in ("profiler adds", "synchronisation costs"))
    assert quiet.doubts == {}


def test_on_a_gpu_the_layers_may_add_up_to_more_than_a_run():
    assert shown(layers=msgspec.structs.replace(LAYERS, synchronised_ns=20e6)).doubts == {}


@pytest.mark.parametrize("width", [80, 100, 200])
def test_a_terminal_shows_whole_figures_and_names_the_columns_that_it_leaves_out(monkeypatch, width):
    monkeypatch.setattr(terminal, "console_on", lambda out: Console(file=out, width=width, highlight=False))
    out = StringIO()
    print_profile(out, shown(), GPU_SORT)
    text = out.getvalue()
    assert "…" not in text
    assert max(map(len, text.splitlines())) <= width
    words = " ".join(text.split())
    hidden = re.findall(rf"Not shown in {width} columns: (.*?)\.", words)
    assert "x of floor: the time over the shortest that the device's peak rates allow" in words
    layers = next(section for section in sections(shown(), GPU_SORT) if section.title == "Layers")
    for heading, cell in zip(layers.headings, layers.rows[0], strict=True):
        assert cell in text or heading in ", ".join(hidden).split(", ")


def test_markdown_holds_whole_rows_and_no_tag():
    text = report.markdown(shown(), GPU_SORT)
    for table in re.findall(r"(?:^\|.*\n)+", text, re.MULTILINE):
        assert len({len(re.findall(r"(?<!\\)\|", line)) for line in table.splitlines()}) == 1
    assert "<" not in text
    assert text.index("## Findings") < text.index("## Profile")
    assert "1. **selective_scan_fwd_kernel takes" in text


class Page(HTMLParser):
    """The tags, the text outside scripts, and the last script of a page."""

    def __init__(self, text):
        super().__init__()
        self.tags, self.words, self.script, self._inside = [], [], "", None
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        self.tags.append((tag, dict(attributes)))
        self._inside = tag

    def handle_endtag(self, tag):
        self._inside = None

    def handle_data(self, data):
        if self._inside == "script":
            self.script = data
        else:
            self.words.append(data)


@pytest.fixture(scope="module")
def page():
    pytest.importorskip("jinja2", reason="the extra `report` is not installed")
    return Page(report.page(shown(), GPU_SORT))


def charts(page):
    return {chart["title"]: chart for chart in json.loads(re.search(r"const charts = (.*);\n", page.script)[1])}


def test_the_page_stands_alone_and_shows_names_as_text(page):
    assert not [tag for tag, attributes in page.tags if tag == "img" or attributes.keys() & {"src", "href"}]
    assert sum(tag == "script" for tag, _ in page.tags) == 2
    assert EVIL in "".join(page.words)
    assert sum(tag == "table" for tag, _ in page.tags) == 17


def test_the_charts_hold_steps_layers_and_memory(page):
    by_title = charts(page)
    assert list(by_title) == ["Steps", "Layers", "Memory over a step"]
    assert by_title["Steps"]["data"][0]["x"] == [1227.437] * 3
    assert by_title["Layers"]["data"][0]["text"] == ["12.5x of floor (matrix)", ""]
    assert by_title["Memory over a step"]["data"][1]["y"] == [0, 150]
