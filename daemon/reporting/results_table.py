"""Prints the table of a run, fitted to the terminal's width: numbers are never cut, and failures come first."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from rich import box
from rich.cells import cell_len
from rich.console import Console
from rich.table import Table
from rich.text import Text

from benchd.daemon.records import Check, Environment, Record
from benchd.daemon.reporting.tables import ALARM
from benchd.daemon.verdicts import accuracy, doubts
from benchd.daemon.verdicts.figures import dropped_half, energy_error_share, memory_mib, power_w, worker_peak_bytes
from benchd.daemon.verdicts.recommend import agreement, variant_name

ALL_COLUMNS, FEW_COLUMNS, ONE_LINE = 160, 120, 80  # minimum terminal width for each form
FOLDED = 8  # minimum width of a column of text
MEANINGS = {
    "eager": "plain PyTorch",
    "custom": "our own kernels, (c) in C or (triton) in Triton",
    "compile": "torch.compile",
    "aoti": "compiled ahead by AOTInductor",
    "cudagraph": "replayed as a CUDA graph",
    "amp": "half precision by torch.autocast",
    "fp16": "half precision",
    "bf16": "half precision",
    "int8": "8-bit integers",
}
"""The meanings of those parts of a variant's name that are not the name of a runtime."""

NO_SENSOR = "no power sensor was read; run `benchd doctor` for the reason"


@dataclass(frozen=True)
class _Column:
    """A column of the wide forms: its two-line heading, its cell, and the minimum width at which it is shown."""

    heading: str
    cell: Callable[[Record], str]
    least_width: int = FEW_COLUMNS


def print_table(console: Console, records: Sequence[Record]) -> None:
    """Print the device for each number of threads, then one row per record; below 80 columns, one block per record."""
    measured = [record for record in records if record.timing] or records
    for line in dict.fromkeys(machine(record.environment) for record in measured):
        console.print(line, markup=False)
    records = sorted(records, key=lambda record: not _is_alarming(record))
    if console.width >= FEW_COLUMNS and _fits(wide := _wide(records, console.width), console.width):
        console.print(wide)
    elif console.width >= ONE_LINE:
        for name in dict.fromkeys(map(_model, records)):
            console.print(_narrow(name, [record for record in records if _model(record) == name]))
    else:
        for record in records:
            console.print(_block(record))


def _fits(table: Table, width: int) -> bool:
    """Return whether the figures fit into a table this wide, and the other columns are readable."""
    longest = (max(map(cell_len, map(str, column.cells))) if column.no_wrap else FOLDED for column in table.columns)
    return sum(longest) + 3 * len(table.columns) + 1 <= width


def terms(records: Sequence[Record], width: int) -> list[str]:
    """Return explanations of the terms that appear in a table of this width."""
    timed = [record for record in records if record.timing]
    checks = [record.check for record in timed if record.check]
    parts = {part for record in timed for part in record.case.variant.label.split("-")}
    doubted = set(map(doubts.short, timed))
    most = max((record.case.batch_size for record in timed), default=1)
    size = f"b{most} is {most} inputs at a time" if most > 1 else "b1 is one input at a time"
    named = "; ".join([*(f"{part} is {meaning}" for part, meaning in MEANINGS.items() if part in parts), size])
    explanations = {
        f"variants: {named}": bool(timed),
        "(c, ...%): the share of convolutions that ran in these 8-bit instructions of the CPU": any(
            "%" in (record.kernels_ran or "") for record in timed
        ),
        "[95 %] or ±: where the true median lies with 95 % confidence": any(
            record.timing and record.timing.low_ms for record in timed
        ),
        **dict.fromkeys(doubts.meanings(doubted), True),
        "p99: 99 % of the runs are faster; needs 662 runs per process": width >= ALL_COLUMNS
        and any(record.timing and record.timing.p99_ms for record in timed),
        "check: the largest error against float64, as a share of the largest answer": bool(checks),
        "x of floor: the time over the shortest that the device's peak rates allow; in brackets, what limits it": any(
            width >= ALL_COLUMNS and record.x_of_floor is not None for record in records
        ),
        "off: images whose error is above the limit, of which a variant may have a few": any(map(_off, checks)),
        "void: the check cannot give a verdict, often because weights are random": any(map(_is_void, checks)),
        "images agree: the variant gives them the same class as float64": any(map(agreement, checks)),
        "ties: images for which float64 itself finds several classes equally likely": any(
            "ties" in agreement(check) for check in checks
        ),
        "flipped: the share of spikes that differ from float64": any(check.flipped_share for check in checks),
    }
    return [term for term, is_shown in explanations.items() if is_shown]


def figure(value: float | None, scale: float = 1.0) -> str:
    """Return the value times `scale` with four significant digits, or a dash if it was not measured."""
    if value is None:
        return "-"
    scaled = value * scale
    return f"{scaled:.0f}" if 1000 <= abs(scaled) < 1e15 else f"{scaled:.4g}"


def machine(environment: Environment) -> str:
    """Return a description of the device, with its clocks and power mode if they are known."""
    device = environment.gpu if environment.device.startswith("cuda") else environment.cpu_model
    count = environment.threads if environment.device == "cpu" else None
    threads = f", {count} thread{'s' * (count != 1)}" if count else ""
    locked = {True: "clocks locked", False: "clocks not locked", None: ""}[environment.clocks_locked]
    mode = f"power mode {environment.power_mode}" if environment.power_mode else ""
    return " | ".join(filter(None, [f"{environment.device}: {device}{threads}", locked, mode]))


def _is_alarming(record: Record) -> bool:
    is_wrong = record.check is not None and _verdict(record.check) == "FAILED"
    return is_wrong or record.status not in ("ok", "unsupported")


def _wide(records: Sequence[Record], width: int) -> Table:
    table = Table()
    for heading in ("model", "variant", "batch"):
        table.add_column(heading, no_wrap=heading != "model", overflow="fold")
    fitting = [column for column in _COLUMNS if width >= column.least_width]
    columns = [column for column in fitting if any(column.cell(record) != "-" for record in records if record.timing)]
    columns = columns or fitting[:1]  # a column that says why nothing was timed
    for column in columns:
        heading = f"{accuracy.heading(records)}\n[95 %]" if column is _ACCURACY else column.heading
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("check", overflow="fold")
    for record in records:
        cells = [column.cell(record) for column in columns] if record.timing else ["" for _ in columns]
        cells[0] = cells[0] or record.status
        head = (_model(record), _variant(record), str(record.case.batch_size))
        table.add_row(*map(Text, (*head, *cells)), _check(record), style=ALARM if record.timing is None else "")
    return table


def _narrow(name: str, records: Sequence[Record]) -> Table:
    """Return one model's table with the figures that decide between its variants."""
    table = Table(title=Text(name), title_justify="left", title_style="bold", box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("variant", overflow="fold")
    has_accuracy, has_energy = (any(getattr(record, name) for record in records) for name in ("accuracy", "energy"))
    headings = ["median ms", *["energy mJ"] * has_energy, *[accuracy.heading(records)] * has_accuracy]
    for heading in headings:
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("check", overflow="fold")
    for record in records:
        cells = [
            f"{_variant(record)} b{record.case.batch_size}",
            _median_and_error(record),
            *[energy_and_error(record)] * has_energy,
            *[_ACCURACY.cell(record).partition(" ")[0]] * has_accuracy,
        ]
        table.add_row(*map(Text, cells), _check(record))
    return table


def _block(record: Record) -> Text:
    unit = " ms" if record.timing and not dropped_half(record) else ""
    lines = [f"{_model(record)} {_variant(record)} b{record.case.batch_size}"]
    lines += [f"  median {_median_and_error(record)}{unit}"]
    lines += [f"  energy {energy_and_error(record).replace(' ', ' mJ ', 1)}"] if record.energy else []
    lines += [f"  {record.accuracy.metric:6} {accuracy.figure(record.accuracy)}"] if record.accuracy else []
    check = [Text.assemble("  check  ", _check(record))] if record.timing else []
    return Text("\n").join([*map(Text, lines), *check])


def _model(record: Record) -> str:
    case = record.case
    options = "".join(f" {name}={value}" for name, value in case.options.items())
    return f"{case.model}{options}" + (f" threads={case.threads}" if case.threads else "")


def _variant(record: Record) -> str:
    return " ".join([variant_name(record), *record.case.usage, *record.case.demand])


def median_and_interval(record: Record) -> str:
    """Return the median in ms with its 95 % interval, or a remark that there is none; a dash if it was not timed.

    What puts the time most in doubt follows it (`doubts.SHORT`). If the median request was dropped, it is `dropped`.
    """
    timing = record.timing
    if timing and dropped_half(record):
        return "dropped"
    if timing is None:
        return figure(None)
    if timing.low_ms is None or timing.high_ms is None:
        return f"{figure(timing.median_ms)}, no interval{_doubt(record)}"
    return f"{figure(timing.median_ms)} [{figure(timing.low_ms)}, {figure(timing.high_ms)}]{_doubt(record)}"


def _median_and_error(record: Record) -> str:
    """Return the median and its interval's half-width, rounded to the second digit of the latter; or the status.

    An interval wider than twice the median is shown without a half-width.
    """
    timing = record.timing
    if timing is None:
        return record.status
    if dropped_half(record) or timing.low_ms is None or timing.high_ms is None:
        return median_and_interval(record)
    half_ms = (timing.high_ms - timing.low_ms) / 2
    if not half_ms or half_ms >= timing.median_ms:  # a time cannot be 0 or negative
        return median_and_interval(record)
    digits = max(0, 1 - math.floor(math.log10(half_ms)))
    return f"{timing.median_ms:.{digits}f} ± {half_ms:.{digits}f}{_doubt(record)}"


def _doubt(record: Record) -> str:
    word = doubts.short(record)
    return f" {word}" if word else ""


def _x_of_floor(record: Record) -> str:
    if record.x_of_floor is None or record.floor is None:
        return "-"
    return f"{record.x_of_floor:.3g} ({record.floor.bound_by.replace('exponentials', 'exp')})"


def energy_and_error(record: Record) -> str:
    """Return the energy per inference in mJ with its error bar, or a dash if it was not measured."""
    if record.energy is None:
        return "-"
    share = energy_error_share(record.energy) or 0.0
    return f"{figure(record.energy.gross_per_inference_j * 1e3)} ±{100 * share:.2g} %"


def memory_and_peak(record: Record) -> str:
    """Return the memory in MiB, and the worker's peak if it is larger: `1431 (1866)`."""
    peak = worker_peak_bytes(record)
    return figure(memory_mib(record)) + (f" ({figure(peak, 1 / 2**20)})" if peak else "")


def _check(record: Record) -> Text:
    check = record.check if record.timing else None
    if check is None:
        return Text("-" if record.timing else "")
    flipped = f", {check.flipped_share:.0e} flipped" if check.flipped_share else ""
    is_int8 = record.case.variant.precision == "int8" and check.mean_error_share is not None
    error = f"{check.typical_error_share:.1e}"
    if is_int8:
        error = f"{check.error_share:.1e} max, {check.mean_error_share:.1e} mean"
    verdict = _verdict(check)
    figures = f" {error}{_off(check)}{flipped}{agreement(check)}"
    return Text.assemble((verdict, ALARM if verdict == "FAILED" else ""), figures)


def _off(check: Check) -> str:
    """Return, after a comma, how many images are off their limit; empty if their mean is judged instead."""
    is_counted = check.images_off <= check.images_off_allowed < check.images or not check.passed
    return f", {check.images_off} of {check.images} off" if check.images_off and is_counted else ""


def _is_void(check: Check) -> bool:
    return _verdict(check) == "void"


def _verdict(check: Check) -> str:
    return "ok" if check.passed else "void" if check.void else "FAILED"


_ACCURACY = _Column(
    "accuracy", lambda record: accuracy.figure(record.accuracy).removesuffix(" %") if record.accuracy else "-"
)
_COLUMNS = (
    _Column("median ms\n[95 %]", median_and_interval),
    _Column("p99\nms", lambda record: figure(record.timing.p99_ms if record.timing else None), ALL_COLUMNS),
    _Column("x of\nfloor", _x_of_floor, ALL_COLUMNS),
    _Column("per\nsecond", lambda record: figure(record.throughput_per_s), ALL_COLUMNS),
    _Column("energy\nmJ", energy_and_error),
    _Column("power\nW", lambda record: figure(power_w(record)), ALL_COLUMNS),
    _Column("memory\nMiB", memory_and_peak),
    _ACCURACY,
)
