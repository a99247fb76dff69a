"""A record as lines of text: the roofline as bars."""

from records_made import made, timing

from benchd.daemon.records import Floor
from benchd.daemon.reporting.record_text import WIDTH, lines

COST = {"matrix_flops": 8_000_000_000, "elementwise_flops": 0, "bytes": 40_000_000, "parameters_bytes": 1}


def test_the_roofline_shows_how_much_of_each_probed_rate_a_run_uses():
    floor = Floor(
        floor_ms=4.0,
        bound_by="matrix",
        matrix_ms=4.0,
        bytes_ms=0.8,
        exponentials_ms=0.0,
        exponentials=0,
        synaptic_flops=4_000_000_000,
        uncounted=["fft"],
        **COST,
    )
    text = "\n".join(lines(made(run_id="r", timing=timing(8.0), floor=floor)))
    assert (
        "roofline\n"
        "  products                ██████████░░░░░░░░░░ 50 %, 500 of 1000 GFLOP/s, at\n"
        "                          least: without fft\n"
        "  bytes                   ██░░░░░░░░░░░░░░░░░░ 10 %, 5 of 50 GB/s\n"
    ) in text
    assert max(map(len, text.partition("measure it again")[0].splitlines())) <= WIDTH
