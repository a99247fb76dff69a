"""The tables of comparisons, baselines, noise floors and plans at every width: whole numbers, trouble first."""

import io
import re

import pytest
from records_made import PASSED, made, timing

from benchd.daemon.config import LimitsConfig, Suite
from benchd.daemon.measuring import plan
from benchd.daemon.measuring.plan import Machine
from benchd.daemon.records import Case, ModelFacts, ProcessResult, Variant
from benchd.daemon.reporting.comparisons import print_comparisons
from benchd.daemon.reporting.console import (
    print_baseline,
    print_decisions,
    print_noise_floors,
    print_plan,
)
from benchd.daemon.verdicts.alarms import DAILY, Budget
from benchd.daemon.verdicts.compare import Comparison
from benchd.daemon.verdicts.effects import Interval, Verdict
from benchd.daemon.verdicts.noise_floor import NoiseFloor
from benchd.daemon.verdicts.recommend import Requirements, decide

WIDTHS = (60, 80, 100, 120, 200)
OPTIONS = {"time_steps": 16, "level": 8, "encoding": "repeat"}
CASE = Case(model="snn_stbif_resnet18", variant=Variant.parse("custom-fp16"), batch_size=64, options=OPTIONS)


def compared(answer, median_ms, *, check_failed=False):
    verdict = Verdict(answer=answer, effect=0.12345, interval=Interval(0.10, 0.1468), confidence=0.9983)
    sides = {"first_ms": [median_ms] * 7, "second_ms": [1.12345 * median_ms] * 11}
    sides["medians_ms"] = median_ms, 1.12345 * median_ms
    return Comparison(
        first=CASE.case_id,
        second=f"{CASE.case_id},threads={median_ms:.0f}",
        verdict=verdict,
        check_failed=check_failed,
        **sides,
    )


COMPARED = [compared("faster", 104.3161), compared("slower", 1234567.8), compared("same", 10.6321, check_failed=True)]
PROCESSES = [ProcessResult(status="ok", timing=timing(104.3161))]
KEPT = [made(case=CASE, suite_id=f"s{n}", run_id=f"r{n}", processes=PROCESSES) for n in range(3)]
FLOORS = [NoiseFloor(device_id="bench-abc123", device="cpu", case_id=CASE.case_id, stored=12, counted=10, floor=0.0123)]
PLANNED = plan.plan(
    [Suite(models=["snn_onepass"], options={"time_steps": [16]}, variants=["eager"])],
    LimitsConfig(),
    Machine("cpu", True),
)


@pytest.fixture
def terminal(monkeypatch):
    """Return a function that returns what a print function writes to a terminal of a width."""
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)

    def write(width, print_, *arguments):
        monkeypatch.setenv("COLUMNS", str(width))
        written = io.StringIO()
        written.isatty = lambda: True
        print_(written, *arguments)
        return written.getvalue()

    return write


def plain(text):
    return re.sub(r"\x1b\[[0-9;]*m", "", text)


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize(
    ("print_", "arguments", "numbers"),
    [
        (print_comparisons, (COMPARED, False), ["104.3", "1234568", "10.63", "+12.35 % [+10.00, +14.68 at 99.83 %]"]),
        (print_baseline, (KEPT, "stored in kept", Budget(1, {CASE.case_id: DAILY})), ["104.3"]),
        (print_noise_floors, (FLOORS,), ["1.2 %", "12"]),
        (print_plan, (PLANNED, {}), [f"{PLANNED[0].seconds:.0f} s", "time_steps=16"]),
    ],
    ids=["compare", "baseline", "noise-floor", "plan"],
)
def test_no_number_is_cut_or_broken_and_no_line_too_long(terminal, width, print_, arguments, numbers):
    text = plain(terminal(width, print_, *arguments))
    assert "…" not in text
    assert max(map(len, text.splitlines())) <= width
    for number in numbers:
        assert number in text
    for line in text.splitlines():  # no option broken within its name or its value
        assert not re.search(r"\b(time_step|leve|encodin)$|(time_steps|size|level)=$|=1$", line.rstrip(" │"))


@pytest.mark.parametrize("width", WIDTHS)
def test_a_failed_check_is_first_and_red_and_each_answer_has_its_colour(terminal, width):
    text = terminal(width, print_comparisons, COMPARED, False)
    places = [text.index(word) for word in ("check FAILED", "SLOWER", "FASTER")]
    assert places == sorted(places)
    for code, word in (("1;31", " check FAILED"), ("1;31", "SLOWER"), ("32", "FASTER")):
        assert re.search(rf"\x1b\[{code}m{word} *\x1b\[0m", text)


def test_variants_that_an_own_module_could_also_run_are_named(terminal):
    facts = ModelFacts(
        options={}, input_shape=[4], parameters=1, weights="of the module", weights_sha256="0", data="random"
    )
    own = Case(model="own.net.build", variant=Variant(), batch_size=1)
    decisions = decide([made(case=own, model=facts, check=PASSED)], Requirements())
    assert "not tried: fp16, bf16, amp, compile" in " ".join(terminal(80, print_decisions, decisions, False).split())
