"""The page of counted instructions holds what the kernels execute: a change of one shows in it."""

import re
from multiprocessing import get_context
from pathlib import Path

import pytest

from benchd.kernels import shipped
from tests.ptx import counts

pytest.importorskip("triton")

PAGE = (Path(__file__).parents[2] / "docs" / "roofline.md").read_text().partition(shipped.GENERATED)[2]


BOTH = "fp16 fp32"


@pytest.mark.parametrize(
    ("sm", "precisions"), [(87, "fp32"), *(pytest.param(sm, BOTH, marks=pytest.mark.slow) for sm in (75, 87, 90))]
)
def test_the_page_holds_what_is_executed(sm, precisions):
    version = re.search(r"Made with Triton (\S+)\.\n", PAGE)[1]
    if version != shipped.triton_version():
        pytest.skip(f"Triton {shipped.triton_version()} makes other PTX than {version}, which made the page")
    with get_context("spawn").Pool(1) as pool:  # a process is of one architecture for good
        rows = pool.apply(counts.count, (sm, precisions.split()))
    lines = [line.strip("| ").split(" | ")[:-2] for line in PAGE.splitlines() if f" | {sm} | " in line]
    written = [line for line in lines if {*line[0].split()} & {*precisions.split()}]
    assert written == list(map(counts.cells, rows)), "make occupancy writes it anew"


def test_the_least_time_is_that_of_the_scarcest_rate():
    row = counts.Counted(
        op="lif", kernel="lif", sm=87, images=1, elements=10**6, loaded_bytes=2**20, stored_bytes=0, matrix_flops=0,
        lanes={"special": 16 * 10**9, "fp32": 64 * 10**9},
    )  # fmt: skip
    least = row.least_s()
    assert max(least, key=least.get) == "special"
    assert least["special"] == pytest.approx(10**9 / (16 * 1.3e9))
    assert least["memory"] == pytest.approx(2**20 / 204.8e9)
