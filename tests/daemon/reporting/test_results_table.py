"""The table of a run at every width: whole numbers, failures first and red, and a terminal's own width."""

import fcntl
import io
import os
import pty
import re
import struct
import subprocess
import sys
import termios

import msgspec
import pytest
from records_made import ENVIRONMENT, accuracy, made, requests, timing
from rich.console import Console
from test_console import ENERGY, check
from waiting import WAIT_S

from benchd.daemon.records import Case, Memory, ProcessResult, Summary, Variant, Window
from benchd.daemon.reporting.results_table import print_table, terms

RAILS = (("VDD_IN", 12.34), ("VDD_CPU_GPU_CV", 6.5), ("VDD_SOC", 2.1))
WIDTHS = (60, 80, 100, 120, 160, 200)
USUAL = ["variants", "[95 %] or ±", "p99", "check"]


def case(variant, **fields):
    return Case(**{"model": "snn_stbif_resnet18", "variant": Variant.parse(variant), "batch_size": 64} | fields)


RECORDS = [
    made(
        case=case("custom-fp16"),
        timing=timing(104.3161, low_ms=103.9, high_ms=104.7, p99_ms=131.45),
        energy=ENERGY,
        memory=Memory(rss_peak_bytes=1300 * 2**20),
        accuracy=accuracy(right=98),
        check=check(images=64, images_off=3, images_off_allowed=9, argmax_disagreements=1, ties=4),
        kernels_ran="c",
    ),
    made(case=case("onnxruntime"), timing=timing(10.6321, low_ms=10.59, high_ms=10.67), check=check()),
    made(case=case("eager", direction="training"), status="timeout", timing=None),
    made(case=case("eager"), timing=timing(1234567.8, low_ms=None, high_ms=None), check=check(passed=False)),
]


def table(width, records=RECORDS, **options):
    out = io.StringIO()
    print_table(Console(file=out, width=width, highlight=False, **options), records)
    return out.getvalue()


@pytest.mark.parametrize("width", WIDTHS)
def test_no_number_is_cut_and_no_line_too_long(width):
    text = table(width)
    assert "…" not in text
    assert max(map(len, text.splitlines())) <= width
    medians = ("104.3 [103.9, 104.7]", "10.63 [10.59, 10.67]") if width >= 120 else ("104.32 ± 0.40", "10.632 ± 0.040")
    assert "1234568, no interval" in text
    for number in (*medians, "31.5 ±2 %" if width >= 80 else "31.5 mJ ±2 %", "3.0e-07", "98"):
        assert number in text


def test_a_table_whose_figures_do_not_fit_into_its_columns_takes_the_narrower_form():
    memory = Memory(rss_peak_bytes=31431 * 2**20, worker_peak_bytes=41866 * 2**20)
    fields = {"case": case("custom-cudagraph-fp16"), "kernels_ran": "triton", "memory": memory, "flags": ["steal"]}
    text = table(120, [msgspec.structs.replace(RECORDS[0], **fields)])
    assert "…" not in text
    assert "104.32 ± 0.40 busy" in text


@pytest.mark.parametrize("width", WIDTHS)
def test_each_row_names_its_variant_and_what_failed_comes_first(width):
    text = table(width)
    places = [text.index(word) for word in ("timeout", "FAILED", "104.3", "10.63")]
    assert places == sorted(places)
    for name in ("custom (c)-fp16", "onnxruntime", "training"):
        assert name in re.sub(r"\s+", " ", text)


def test_each_number_of_threads_that_ran_has_a_heading():
    single, double = (
        made(case=case("eager"), timing=timing(1.0), environment=msgspec.structs.replace(ENVIRONMENT, threads=threads))
        for threads in (1, 2)
    )
    assert [line.split(" |")[0] for line in table(160, [single, double, double]).splitlines()[:2]] == [
        "cpu: cpu, 1 thread",
        "cpu: cpu, 2 threads",
    ]


@pytest.mark.parametrize("columns", [70, 130])
def test_a_terminal_that_is_called_dumb_keeps_its_width(columns):
    code = "import sys; from benchd.daemon.reporting.console import console_on; print(console_on(sys.stdout).width)"
    leader, follower = pty.openpty()
    fcntl.ioctl(follower, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    environment = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES")}
    run = subprocess.run(
        [sys.executable, "-c", code], stdout=follower, env=environment | {"TERM": "dumb"}, check=True, timeout=WAIT_S
    )
    assert run.returncode == 0
    assert os.read(leader, 100).decode().strip() == str(columns)
    os.close(leader)
    os.close(follower)


@pytest.mark.parametrize("width", WIDTHS)
def test_a_row_is_marked_by_what_makes_its_time_doubtful_most(width):
    flags = {"two_levels": "jumps", "correlated_blocks": "drifts", "warm_up_not_steady": "not warm", "steal": "busy"}
    for flag, mark in flags.items():
        found = [made(timing=timing(4.0, low_ms=3.9, high_ms=4.1), flags=["warm_up_not_steady", flag])]
        assert re.search(rf"(\] | 0\.100 ){mark}\b", table(width, found))
        assert f"{mark}: " in " ".join(terms(found, width))


@pytest.mark.parametrize("width", [160, 100, 60])
def test_the_median_of_a_server_that_dropped_half_its_requests_is_dropped(width):
    dropped = requests(dropped=900, met=None)
    text = table(width, [made(timing=timing(69.97, low_ms=None, high_ms=None), requests=dropped)])
    assert "dropped" in text
    assert "69.97" not in text


@pytest.mark.parametrize(
    ("fields", "watts"),
    [
        ({"telemetry": {f"power_w@{rail}": Summary(5, mean, 20, 50, "ina3221") for rail, mean in RAILS}}, "12.34"),
        ({"processes": [ProcessResult(status="ok", energy=ENERGY, window=Window(0, 4 * 10**9))]}, "2.5"),
    ],
    ids=["several rails", "a counter alone"],
)
def test_power_is_that_of_the_input_rail_or_of_the_counter(fields, watts):
    text = table(200, [made(energy=ENERGY, timing=timing(104.3), **fields)])
    (row,) = [line for line in text.splitlines() if "vim_tiny" in line]
    assert watts in re.split(r"[│\s]+", row)


def test_the_terms_of_a_table_are_explained_where_it_has_them():
    void = msgspec.structs.replace(RECORDS[0], check=check(passed=False, void=True, flipped_share=1e-5), x_of_floor=2.0)
    plain = msgspec.structs.replace(RECORDS[0], check=check(), x_of_floor=None)
    assert [term.partition(":")[0] for term in terms([void], 200)] == [*USUAL, "x of floor", "void", "flipped"]
    assert [term.partition(":")[0] for term in terms([void], 100)] == [
        *(term for term in USUAL if term != "p99"),
        "void",
        "flipped",
    ]
    assert [term.partition(":")[0] for term in terms([plain], 200)] == USUAL
    assert terms([plain], 200)[0] == (
        "variants: custom is our own kernels, (c) in C or (triton) in Triton; fp16 is half precision; "
        "b64 is 64 inputs at a time"
    )
    assert "images agree: the variant gives them the same class as float64" in terms(RECORDS, 200)


def test_terms_of_a_check_that_counts_images_and_of_kernels_that_ran_in_part_are_explained():
    partly = msgspec.structs.replace(RECORDS[0], kernels_ran="c, avx512_vnni in 68% (amx_int8 refused)")
    assert {"(c, ...%)", "off", "ties"} <= {term.partition(":")[0] for term in terms([partly], 200)}
