"""The pages of a report and of a profile in a real browser: every chart is drawn, small, without a network."""

import msgspec
import pytest
from browsing import faults, running_browser
from profile_shown import shown
from test_report import ENERGY, PASSED, record

pytest.importorskip("jinja2", reason="the extra `report` is not installed")

from benchd.daemon.profiling.output import report as profiles
from benchd.daemon.records import encode
from benchd.daemon.reporting.report import page

MOST_BYTES = 1_000_000


@pytest.fixture(scope="module")
def browser():
    with running_browser() as chromium:
        yield chromium


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """Return the paths of a report and of a profile."""
    folder = tmp_path_factory.mktemp("pages")
    less = msgspec.structs.replace(ENERGY, gross_per_inference_j=0.02)
    records = [record(run, "custom", (4.0 if run < 7 else 4.5) + 0.01 * (run % 2)) for run in range(1, 13)]
    records += [record(12, "eager", 30.0, batch=4), record(12, "onnxruntime", 6.0, energy=less)]
    records += [record(12, "onnxruntime-int8", 3.0)]
    records += [record(12, "custom-compile-fp16", 4.0, batch=batch) for batch in (2, 3, 8)]
    records += [record(12, "fp16", 2.0, check=msgspec.structs.replace(PASSED, passed=False))]
    (folder / "records.jsonl").write_bytes(b"".join(encode(entry) + b"\n" for entry in records))
    profile = folder / "profile.html"
    profile.write_text(profiles.page(shown(), "self_device_ns"))
    return {"report": page(folder), "profile": profile}


@pytest.fixture
def opened(browser, made):
    """Return a function that opens one of the pages; an error of its scripts fails the test."""
    context, errors = browser.new_context(viewport={"width": 1000, "height": 800}), []

    def open_(name):
        shown_page = context.new_page()
        shown_page.on("pageerror", lambda error: errors.append(str(error)))
        shown_page.goto(made[name].as_uri())
        return shown_page

    yield open_
    context.close()
    assert errors == []


@pytest.mark.parametrize("name", ["report", "profile"])
def test_a_page_is_accessible_and_no_text_is_cut_or_on_another(name, opened):
    assert not faults(opened(name))


@pytest.mark.parametrize("name", ["report", "profile"])
def test_a_page_is_small_and_draws_every_chart(name, made, opened):
    assert made[name].stat().st_size < MOST_BYTES
    shown_page = opened(name)
    charts = shown_page.locator(".chart")
    assert charts.count() == {"report": 4, "profile": 3}[name]
    for place in range(charts.count()):
        assert charts.nth(place).locator("svg").locator("circle, rect, path").count() > 1
    assert "NaN" not in shown_page.content()


@pytest.mark.parametrize("type_", ["date", "linear", "log"])
def test_a_chart_of_a_fleet_s_year_has_its_scale(type_, opened):
    values = (
        "Array.from({ length: 200_000 }, (_, n) => type === 'date' ? new Date(1e9 * (n + 1)).toISOString() : n + 1)"
    )
    ticks = opened("report").evaluate(f"(type) => scaled({values}, {{ type }}, 0, 900).ticks.length", type_)
    assert 2 <= ticks <= 20


def test_a_point_names_its_record_and_what_cannot_win_is_a_cross(opened):
    energy = opened("report").locator("#chart0")
    titles = energy.locator("title").all_text_contents()
    assert "vim_tiny,custom,b1\n4.5, 31" in titles
    assert any(title.startswith("vim_tiny,fp16,b1: fails its numerical check") for title in titles)
    assert energy.locator(".legend").inner_text().split("\n")[-1] == "cannot win"
