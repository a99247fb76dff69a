"""Formats a record as lines of text: what was measured, the environment, and what is missing."""

import textwrap
from collections.abc import Iterator, Mapping

import msgspec

from benchd.daemon.records import Floor, Record
from benchd.daemon.reporting.results_table import NO_SENSOR, figure
from benchd.daemon.verdicts import doubts
from benchd.daemon.verdicts.compare import command
from benchd.daemon.verdicts.rows import row

WIDTH, INDENT, BAR = 80, 26, 20


def lines(record: Record, where: str = "") -> Iterator[str]:
    """Yield a record's lines, at most 80 columns wide, except for the command, which must be copied in one piece.

    `where` is the file or folder to use in that command.
    """
    environment = msgspec.structs.asdict(record.environment)
    groups = {name: value for name, value in environment.items() if isinstance(value, dict)}
    missing = {name: NO_SENSOR if why == "no_sensor" else why for name, why in record.missing.items()}
    doubt = doubts.words(doubts.of(record))
    more = [f", {record.reason}" if record.reason else "", f" (doubtful: {doubt})" if record.timing and doubt else ""]
    yield "".join([f"{record.case_id}: {record.status}", *more])
    yield from _section("", {name: value for name, value in row(record).items() if name not in ("status", "reason")})
    if record.floor and record.timing:
        yield from _section(f"roofline{doubts.mark([record])}", _roofline(record.floor, record.timing.median_ms))
    yield from _section("environment", {name: value for name, value in environment.items() if name not in groups})
    for name, group in {**groups, "limits": record.limits, "missing": missing}.items():
        yield from _section(name, group)
    yield "measure it again"
    yield f"  {command(record, records=where)}"
    yield ""


def _roofline(floor: Floor, median_ms: float) -> dict[str, str]:
    """Return which share of each probed rate a run uses; the highest one bounds it."""
    at_least = f", at least: without {', '.join(floor.uncounted)}" if floor.uncounted else ""
    products = floor.matrix_flops if floor.synaptic_flops is None else floor.synaptic_flops
    work = {
        "products": (products, f"GFLOP/s{at_least}", floor.matrix_ms),
        "bytes": (floor.bytes, "GB/s", floor.bytes_ms),
        "exponentials": (floor.exponentials, "G/s", floor.exponentials_ms),
    }
    return {
        name: f"{'█' * round(BAR * min(least_ms / median_ms, 1.0)):░<{BAR}} {100 * least_ms / median_ms:.0f} %, "
        f"{figure(amount / median_ms / 1e6)} of {figure(amount / least_ms / 1e6)} {unit}"
        for name, (amount, unit, least_ms) in work.items()
        if least_ms
    }


def _section(name: str, facts: Mapping[str, object]) -> Iterator[str]:
    """Yield a heading and a line for each known fact; nothing if there are none."""
    known = {name: _text(value) for name, value in facts.items() if value not in (None, "", [], {})}
    yield from [name] if known and name else []
    for key, text in known.items():
        first = f"  {key}".ljust(INDENT - 1) + " "
        rest = " " * INDENT
        yield textwrap.fill(text, WIDTH, initial_indent=first, subsequent_indent=rest, break_on_hyphens=False)


def _text(value: object) -> str:
    if isinstance(value, float):
        return figure(value)
    return " ".join(map(str, value)) if isinstance(value, list) else str(value)
