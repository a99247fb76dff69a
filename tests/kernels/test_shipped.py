"""What ships, compiled for each architecture: nothing spills, Orin's SMs are half full, the page says what is."""

import re
from importlib import util
from pathlib import Path

import pytest

from benchd.kernels import shipped

pytest.importorskip("triton")

PAGE = Path(__file__).parents[2] / "docs" / "occupancy.md"
ORIN = 87


@pytest.fixture(scope="module")
def everything():
    """Everything that ships."""
    return shipped.compile_all()


@pytest.fixture(scope="module", params=["Orin", pytest.param("all", marks=pytest.mark.slow)])
def rows(request):
    """Everything that ships, for an Orin or for all architectures."""
    is_all = request.param == "all"
    return request.getfixturevalue("everything") if is_all else shipped.compile_all(architectures=[ORIN])


@pytest.fixture(scope="module")
def made():
    """The kernels of tests/kernels/made_op, by name and architecture."""
    counts = []
    rows = shipped.compile_all(["made_op.triton_impl"], lambda done, total: counts.append((done, total)))
    assert counts == [(done, len(rows)) for done in range(1, len(rows) + 1)]
    return {(row.kernel, row.sm): row for row in rows}


def test_each_kernel_is_compiled_for_the_architectures_it_names(made):
    assert list(made) == [*(("add", sm) for sm in (75, 86, 87, 89, 90)), ("scan", 87), ("scan", 90), ("too wide", 87)]
    assert {row.op for row in made.values()} == {"made_op"}


def test_a_small_kernel_fills_every_sm(made):
    for (kernel, _), row in made.items():
        if kernel == "add":
            assert (row.occupancy, row.spilled_bytes, row.shared_bytes, row.warps) == (1, 0, 0, 4)
            assert 8 < row.registers <= 32


def test_shared_memory_and_blocks_count(made):
    assert made["scan", ORIN].shared_bytes == 8  # a sum for each of the two warps
    assert (made["scan", ORIN].occupancy, made["scan", ORIN].limits) == (pytest.approx(2 / 3), ("blocks",))
    assert made["scan", 90].occupancy == 1


def test_a_spill_is_seen(made):
    row = made["too wide", ORIN]
    assert (row.registers, row.limits) == (255, ("registers",))
    assert row.spilled_bytes > 0


def test_the_page_shows_registers_spills_limits_and_gaps(made):
    text = shipped.page_tables(made.values())
    assert text.startswith(
        f"Made with Triton {shipped.triton_version()}.\n\n## made_op\n\nExecuted as PTX at the tests' "
    )
    assert "for sm_75, sm_87, sm_90. Only compiled: sm_86, sm_89.\n\n| kernel | warps | shared |" in text
    assert re.search(r"^\| add \| 4 \| 0 B (\| \d+: 100 % ){5}\|$", text, re.MULTILINE)
    assert re.search(r"^\| scan \| 2 \| 8 B \| - \| - \| \d+: 67 % blocks \| - \| \d+: 100 % \|$", text, re.MULTILINE)
    assert re.search(r"\| 255, spills \d+ B: 17 % registers \|", text)


def test_a_kernel_that_does_not_compile_is_named(tmp_path, monkeypatch):
    source = Path(__file__).with_name("made_op") / "triton_impl.py"
    broken = tmp_path / "broken_op" / "triton_impl.py"
    broken.parent.mkdir()
    broken.write_text(source.read_text().replace("tl.cumsum(values, 0)", "tl.no_such_thing(values)"))
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(shipped.CannotCompile, match=r"(?s)broken_op: scan for sm_87: .*no_such_thing"):
        shipped.compile_all(["broken_op.triton_impl"])


def test_without_triton_the_reason_is_given(monkeypatch):
    monkeypatch.setattr(util, "find_spec", lambda name: None)
    with pytest.raises(shipped.CannotCompile, match="'triton' is not installed"):
        shipped.compile_all()


def test_every_op_with_a_triton_kernel_ships_some(rows):
    assert {f"benchd.kernels.{row.op}.triton_impl" for row in rows} == set(shipped.modules())
    names = [(row.op, row.kernel, row.sm) for row in rows]
    assert len(names) == len(set(names))


def test_nothing_that_ships_spills(rows):
    assert [row for row in rows if row.spilled_bytes] == []


@pytest.fixture
def tables():
    """The generated part of the page, where this Triton made it."""
    written = PAGE.read_text().partition(f"{shipped.GENERATED}\n")[2]
    version = re.match(r"Made with Triton (\S+)\.\n", written).group(1)
    if version != shipped.triton_version():
        pytest.skip(f"Triton {shipped.triton_version()} allots other registers than {version}, which made the page")
    return written


def column(text, sm):
    """Return what a page says of each kernel for one architecture."""
    found, headings = [], []
    for line in text.splitlines():
        cells = line.strip("| ").split(" | ")
        if cells[0] == "kernel":
            headings = cells
        elif f"sm_{sm}" in headings and len(cells) == len(headings):
            found.append((*cells[:2], cells[headings.index(f"sm_{sm}")]))
    return [row for row in found if row[-1] != "-"]


def test_the_page_holds_what_is_compiled(rows, tables):
    made = shipped.page_tables(rows)
    for sm in {row.sm for row in rows}:
        assert column(tables, sm) == column(made, sm) != [], "make occupancy writes it anew"


@pytest.mark.slow
def test_the_page_is_what_make_occupancy_writes(everything, tables):
    assert tables == shipped.page_tables(everything), "make occupancy writes it anew"


@pytest.mark.usefixtures("tables")
def test_what_ships_fills_half_of_an_orin_sm(rows):
    assert [row for row in rows if row.sm == ORIN and row.occupancy < 0.5] == []
