"""A record as lines of text: the roofline as bars."""

from pathlib import Path

from records_made import floor, made, timing

from benchd.daemon.reporting.record_text import WIDTH, lines
from benchd.daemon.verdicts.rows import row


def test_the_roofline_shows_how_much_of_each_probed_rate_a_run_uses():
    cost = floor(
        floor_ms=4.0,
        bound_by="matrix",
        matrix_ms=4.0,
        bytes_ms=0.8,
        synaptic_flops=4_000_000_000,
        bytes=40_000_000,
        uncounted=["fft"],
    )
    text = "\n".join(lines(made(run_id="r", timing=timing(8.0), floor=cost)))
    assert (
        "roofline\n"
        "  products                ██████████░░░░░░░░░░ 50 %, 500 of 1000 GFLOP/s, at\n"
        "                          least: without fft\n"
        "  bytes                   ██░░░░░░░░░░░░░░░░░░ 10 %, 5 of 50 GB/s\n"
    ) in text
    assert max(map(len, text.partition("measure it again")[0].splitlines())) <= WIDTH


def test_the_headline_says_what_puts_the_time_in_doubt():
    record = made(flags=["two_levels", "busy_machine"], timing=timing(4.0))
    assert next(lines(record)) == f"{record.case_id}: ok (doubtful: busy machine, jumps between two speeds)"


def test_every_field_is_explained_on_the_page_about_records_and_missing_energy_in_words():
    page = (Path(__file__).parents[3] / "docs/records.md").read_text()
    assert [name for name in row(made()) if f"`{name}`" not in page] == []
    text = " ".join("\n".join(lines(made(missing={"energy": "no_sensor"}))).split())
    assert "energy no power sensor was read; run `benchd doctor` for the reason" in text
