"""Terminal output: progress while cases run, then one table; for programs one JSON line per record."""

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TextIO

import msgspec
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

from benchd.daemon.errors import NotAvailable
from benchd.daemon.measuring.plan import Planned
from benchd.daemon.measuring.protocol import StageName
from benchd.daemon.measuring.session import Sink
from benchd.daemon.records import Check, Energy, Environment, Record, Timing, Variant, all_variants
from benchd.daemon.reporting.scenario_note import scenario_note
from benchd.daemon.verdicts import accuracy
from benchd.daemon.verdicts.compare import Comparison
from benchd.daemon.verdicts.disturbed import disturbed
from benchd.daemon.verdicts.recommend import (
    Decision,
    Requirements,
    agreement,
    decide,
    exclusions,
    line,
    memory_mib,
    untried,
    variant_name,
)
from benchd.daemon.verdicts.results import process_medians_ms
from benchd.daemon.verdicts.statistics import median
from benchd.kernels.shipped import CannotCompile, Compiled, compile_all, triton_version
from benchd.models.catalog import LIBRARIES, MODELS, Model

PLAIN_WIDTH = 180  # columns if there is no terminal


class Screen(Sink):
    """A progress bar and a table on a terminal, else plain lines. The bar moves between stages, never during one."""

    def __init__(self, out: TextIO, err: TextIO, as_json: bool, requirements: Requirements | None = None) -> None:
        self._out, self._json = console_on(out), as_json
        self._requirements = requirements or Requirements()
        self._err = console_on(err)
        self._records: list[Record] = []
        self._progress = _progress(self._err) if self._err.is_terminal else None
        self._total = self._place = 0

    def begin(self, plan: Sequence[Planned]) -> None:
        """Show the bar."""
        self._total, self._plan = len(plan), list(plan)
        self._seconds = [planned.seconds for planned in plan]
        self._err.print(f"{_cases(len(plan))}, at most about {self._left()}")
        if self._progress:
            self._progress.start()
            self._task = self._progress.add_task("starting", total=self._total, left=self._left())

    def _left(self) -> str:
        """Return the longest time that the remaining cases can take."""
        return _clock(sum(self._seconds[self._place :]))

    def stage(self, planned: Planned, process: int, stage: StageName, percent: int | None = None) -> None:
        """Show the running case, its process and its stage."""
        case, self._place = planned.case, self._plan.index(planned)  # a search may skip cases
        of = f" {process + 1}/{planned.limits.processes}" if planned.limits.processes > 1 else ""
        text = f"{case.model} {case.variant.label} b{case.batch_size} {case.direction}{of}: {stage.replace('_', ' ')}"
        text += "" if percent is None else f" {percent} %"
        if self._progress:
            self._progress.update(self._task, completed=self._place, description=text, refresh=True)
        else:
            self._err.print(f"[{self._place + 1}/{self._total}] {text}", markup=False)

    def publish(self, record: Record, body: bytes) -> None:
        """Count the case as done; print its JSON if requested."""
        self._records.append(record)
        if self._progress:
            self._place += 1
            self._progress.update(self._task, completed=self._place, left=self._left(), refresh=True)
        if self._json:
            self._out.file.write(body.decode() + "\n")
            self._out.file.flush()

    def end(self) -> None:
        """Remove the bar and print the table, then which variants to ship; with JSON only why nothing may ship."""
        if self._progress:
            self._progress.stop()
        decisions = decide(self._records, self._requirements)
        if self._json:
            for decision in decisions:
                if decision.mixed:
                    self._err.print(line(decision), markup=False)
        elif self._records:
            print_table(self._out, self._records)
            _print_decisions(self._out, decisions)


def console_on(file: TextIO) -> Console:
    """Return rich's console on this file: as wide as the terminal, without line wrapping elsewhere."""
    terminal = file.isatty()
    return Console(file=file, width=None if terminal else PLAIN_WIDTH, highlight=False, soft_wrap=not terminal)


def _progress(console: Console) -> Progress:
    left = TextColumn("at most {task.fields[left]} left")
    columns = [MofNCompleteColumn(), BarColumn(), TimeElapsedColumn(), left, TextColumn("{task.description}")]
    return Progress(*columns, console=console, auto_refresh=False, transient=True)


def _cases(count: int) -> str:
    return f"{count} case{'s' if count > 1 else ''}"


def _clock(seconds: float) -> str:
    return time.strftime("%H:%M:%S", time.gmtime(seconds))


def print_table(console: Console, records: Sequence[Record]) -> None:
    """Print one row per record, then notes on what the rows cannot show."""
    table = Table(title=_title(records[0].environment), title_justify="left", title_style="")
    for heading in ("model", "variant", "batch"):
        table.add_column(heading, no_wrap=heading != "model", overflow="fold")
    # headings on two lines, so that a row fits 160 columns
    figures = ("median ms\n[95 %]", "p99\nms", "x of\nfloor", "per\nsecond", "energy\nmJ", "power\nW", "memory\nMiB")
    for heading in figures:
        table.add_column(heading, justify="right")
    has_accuracy = any(record.accuracy for record in records)
    if has_accuracy:
        table.add_column("top-1 %\n[95 %]", justify="right")
    table.add_column("check")
    for record in records:
        table.add_row(*map(escape, _row(record, has_accuracy)))
    console.print(table)
    for note in _notes(records):
        console.print(note, markup=False)


def _title(environment: Environment) -> str:
    """Return the device, its clocks and its power mode."""
    device = environment.gpu if environment.device.startswith("cuda") else environment.cpu_model
    threads = f", {environment.threads} threads" if environment.threads and environment.device == "cpu" else ""
    locked = {True: "clocks locked", False: "clocks not locked", None: "clocks unknown"}[environment.clocks_locked]
    mode = f"power mode {environment.power_mode or 'unknown'}"
    return escape(f"{environment.device}: {device}{threads} | {locked} | {mode}")


def _row(record: Record, has_accuracy: bool) -> list[str]:
    case = record.case
    options = "".join(f" {name}={value}" for name, value in case.options.items())
    unusual = [word for word in (case.direction, case.scenario) if word not in ("inference", "single_stream")]
    variant = " ".join([variant_name(record), *unusual])
    options += f" threads={case.threads}" if case.threads else ""
    head = [f"{case.model}{options}", variant, str(case.batch_size)]
    if record.timing is None:
        return [*head, record.status, *[""] * (8 if has_accuracy else 7)]
    return [
        *head,
        _median(record.timing),
        _figure(record.timing.p99_ms),
        _x_of_floor(record),
        _figure(record.throughput_per_s),
        _energy(record),
        _power(record),
        _figure(memory_mib(record)),
        *([accuracy.top1(record.accuracy) if record.accuracy else "-"] if has_accuracy else []),
        _check(record.check),
    ]


def _median(timing: Timing) -> str:
    if timing.low_ms is None or timing.high_ms is None:
        return _figure(timing.median_ms)
    return f"{_figure(timing.median_ms)} [{_figure(timing.low_ms)}, {_figure(timing.high_ms)}]"


def _figure(value: float | None) -> str:
    """Return four significant digits, or a dash if not measured."""
    if value is None:
        return "-"
    return f"{value:.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def _x_of_floor(record: Record) -> str:
    """Return the run time as a multiple of the roofline, and which resource bounds it."""
    if record.x_of_floor is None or record.floor is None:
        return "-"
    return f"{record.x_of_floor:.3g} ({record.floor.bound_by.replace('exponentials', 'exp')})"


def _energy(record: Record) -> str:
    if record.energy is None:
        return "-"
    share = record.energy.energy_err_j / record.energy.energy_j if record.energy.energy_j else 0.0
    return f"{_figure(record.energy.gross_per_inference_j * 1e3)} ±{100 * share:.2g} %"


def _power(record: Record) -> str:
    powers = [summary.mean for name, summary in record.telemetry.items() if name.partition("@")[0] == "power_w"]
    return _figure(powers[0]) if len(powers) == 1 else "-"


def _check(check: Check | None) -> str:
    if check is None:
        return "-"
    flipped = f", {check.flipped_share:.0e} flipped" if check.flipped_share else ""
    is_counted = check.images_off <= check.images_off_allowed or not check.passed  # otherwise the mean decides
    off = f", {check.images_off} of {check.images} off" if check.images_off and is_counted else ""
    verdict = "ok" if check.passed else "void" if check.void else "FAILED"
    return f"{verdict} {check.typical_error_share:.1e}{off}{flipped}{agreement(check)}"


def _notes(records: Sequence[Record]) -> list[str]:
    """Return why cases did not run, and what the figures cannot show."""
    notes = [
        f"{record.status}: {record.case.model} {record.case.variant.label} b{record.case.batch_size}: {record.reason}"
        for record in records
        if record.status != "ok"
    ]
    notes += _check_notes(records)
    measured = [record for record in records if record.timing]
    notes += _accuracy_notes(measured)
    notes += [note for record in measured if (note := scenario_note(record))]
    if any(record.timing and record.timing.p99_ms is None for record in measured):
        notes.append("p99: shown only with at least 662 runs per process")
    notes += _file_notes(measured)
    notes += _energy_notes(measured)
    notes += [note for record in measured if (note := _disturbed_note(record))]
    notes += _audit_notes(measured)
    busy = [record.case.model for record in measured if "busy_machine" in record.flags]
    if busy:
        names = ", ".join(dict.fromkeys(busy))
        notes.append(f"busy machine: other processes used the CPU while {names} ran; run it again")
    below = [record.case.model for record in measured if "faster_than_floor" in record.flags]
    if below:
        names = ", ".join(dict.fromkeys(below))
        notes.append(f"x of floor: {names} below 1: it fits in caches or skips zeros, or the probes were disturbed")
    unsettled = [record for record in measured if any(_unconverged(record))]
    if unsettled:
        notes.append(f"interval: {len(unsettled)} of {len(measured)} did not reach the requested half-width")
    return notes


def _accuracy_notes(measured: Sequence[Record]) -> list[str]:
    """Return each variant's loss against plain fp32, on which images, and why some have no accuracy."""
    found = [(record, record.accuracy) for record in measured if record.accuracy]
    notes = sorted({f"top-1: over {one.data}" for _, one in found})
    notes += [
        f"top-1: {record.case_id}: drop against plain fp32 {accuracy.drop(one)} %: {one.gained} gained, {one.lost} lost"
        for record, one in found
        if record.case.variant != Variant()
    ]
    reasons = {record.missing.get("accuracy", accuracy.NOT_ASKED) for record in measured if not record.accuracy}
    return notes + [f"top-1: not measured: {reason}" for reason in sorted(reasons - {accuracy.NOT_ASKED})]


def _check_notes(records: Sequence[Record]) -> list[str]:
    """Return the notes of the checks, each with its models."""
    models: dict[str, dict[str, None]] = {}
    for record in records:
        if record.check and record.check.note:
            models.setdefault(record.check.note, {})[record.case.model] = None
    return [f"check: {', '.join(models[note])}: {note}" for note in sorted(models)]


def _disturbed_note(record: Record) -> str | None:
    found = disturbed(record.processes)
    if found is None:
        return None
    return (
        f"interference: {record.case_id}: {found.disturbed} of {found.blocks} blocks disturbed by "
        f"{', '.join(found.reasons)}: {_figure(found.clean_ms)} ms excluding them, "
        f"{_figure(found.as_experienced_ms)} ms including them"
    )


def _audit_notes(measured: Sequence[Record]) -> list[str]:
    """Return what the audits found about the device and the cases."""
    cached = [record.case_id for record in measured if "repeated_input_faster" in record.flags]
    notes = [f"audit: {name} is faster on inputs that it has seen before: it caches answers" for name in cached]
    if any("probes_moved" in record.flags for record in measured):
        notes.append("x of floor: probed peak rates changed by more than 3 % during this run (clocks or load)")
    return notes


def _file_notes(measured: Sequence[Record]) -> list[str]:
    """Return how many files existed already, and how long the others took to make."""
    files = {artifact.key: artifact for record in measured for artifact in record.artifacts}
    if not files:
        return []
    made = [artifact for artifact in files.values() if not artifact.reused]
    seconds = sum(artifact.seconds for artifact in made)
    text = f"{len(files) - len(made)} of {len(files)} existed already"
    told = sorted({f"exported files: {artifact.note}" for artifact in files.values() if artifact.note})
    return [f"exported files: {text}" + (f", the others took {seconds:.1f} s" if made else ""), *told]


def _energy_notes(measured: Sequence[Record]) -> list[str]:
    """Return the scope of each energy, and why some are missing; energies of different scopes are not comparable."""
    reasons = {r.missing.get("energy", "") for r in measured if r.energy is None}
    if reasons and reasons <= {"no_sensor", ""}:
        return ["energy: no power sensor was read; run `benchd doctor` for the reason"]
    scopes: dict[str, list[Energy]] = {}
    for record in measured:
        if record.energy:
            scopes.setdefault(f"{record.energy.scope}, by {record.energy.source}", []).append(record.energy)
    notes = [f"energy: {scope}{_net(energies)}" for scope, energies in scopes.items()]
    if len(scopes) > 1:
        notes.append("energy: different scopes are not comparable")
    return notes + [f"energy: not measured: {reason}" for reason in sorted(reasons - {""})]


def _net(energies: Sequence[Energy]) -> str:
    idle = [energy.idle_w for energy in energies if energy.idle_w is not None]
    return f", gross; idle power {min(idle):.3g} to {max(idle):.3g} W" if idle else ", gross; idle power unknown"


def _unconverged(record: Record) -> list[bool]:
    return [bool(p.blocks and not p.blocks.converged) for p in record.processes if record.preset != "quick"]


def print_decisions(out: TextIO, decisions: Sequence[Decision], as_json: bool) -> None:
    """Print one line per model, what excluded each variant, and notes; or JSON."""
    if as_json:
        out.write(msgspec.json.encode([_plain(decision) for decision in decisions]).decode() + "\n")
    else:
        _print_decisions(console_on(out), decisions)


def _plain(decision: Decision) -> dict[str, Any]:
    """Return the decision with each record replaced by its run_id."""
    candidates = {name: record.run_id for name, record in decision.candidates.items()}
    return msgspec.structs.asdict(decision) | {"candidates": candidates}


def _print_decisions(console: Console, decisions: Sequence[Decision]) -> None:
    for decision in decisions:
        console.print(line(decision), markup=False)
        for text in exclusions(decision):
            console.print(f"    {text}", markup=False)
        left = untried(decision)
        if left:
            console.print(f"    not tried: {', '.join(left)} (--variants)", markup=False)


def print_comparisons(out: TextIO, comparisons: Sequence[Comparison], as_json: bool) -> None:
    """Print one row per comparison, and why any is inconclusive; or JSON."""
    if as_json:
        out.write(msgspec.json.encode(comparisons).decode() + "\n")
        return
    console = console_on(out)
    table = Table(title="B against A, + is slower", title_justify="left", title_style="")
    table.add_column("case", overflow="fold")
    for heading in ("A ms", "B ms", "change [interval]", "processes"):
        table.add_column(heading, justify="right")
    table.add_column("verdict")
    for one in comparisons:
        table.add_row(*map(escape, _comparison_row(one)))
    console.print(table)
    for one in comparisons:
        if one.verdict.reason:
            console.print(f"{one.verdict.answer}: {_case(one)}: {one.verdict.reason}", markup=False)
        for note in one.notes:
            console.print(f"note: {_case(one)}: {note}", markup=False)


def _case(one: Comparison) -> str:
    return one.second if one.first == one.second else f"{one.second} against {one.first}"


def _comparison_row(one: Comparison) -> list[str]:
    verdict = one.verdict
    change = "-" if verdict.effect is None else f"{100 * verdict.effect:+.2f} %"
    if verdict.interval and verdict.confidence:
        interval = f"{100 * verdict.interval.low:+.2f}, {100 * verdict.interval.high:+.2f}"
        change += f" [{interval} at {100 * verdict.confidence:.4g} %]"
    answer = verdict.answer.upper() + (" check FAILED" if one.check_failed else "")
    return [_case(one), *map(_figure, one.medians_ms), change, f"{len(one.first_ms)}, {len(one.second_ms)}", answer]


def print_baseline(out: TextIO, kept: Sequence[Record], path: Path) -> None:
    """Print how many runs of each case a baseline has, and its path."""
    console = console_on(out)
    table = Table(title=f"baseline of {kept[0].device_id}", title_justify="left", title_style="")
    for heading in ("case", "runs", "processes", "median ms"):
        table.add_column(heading, overflow="fold")
    for case_id in dict.fromkeys(record.case_id for record in kept):
        of_case = [record for record in kept if record.case_id == case_id]
        runs, times_ms = {record.suite_id for record in of_case}, process_medians_ms(of_case)
        table.add_row(escape(case_id), str(len(runs)), str(len(times_ms)), _figure(median(times_ms)))
    console.print(table)
    console.print(f"stored in {path}", markup=False)


def print_plan(out: TextIO, plan: Sequence[Planned], cannot_run: Mapping[str, Sequence[str]]) -> None:
    """Print every case of a plan, the variants that cannot run here by reason, and the longest time it can take."""
    console = console_on(out)
    table = Table(title="plan", title_justify="left", title_style="")
    for heading in ("case", "processes", "at most"):
        table.add_column(heading, overflow="fold")
    for planned in plan:
        length = planned.reason or f"{planned.seconds:.0f} s"
        table.add_row(escape(planned.case.case_id), str(planned.limits.processes), escape(length))
    console.print(table)
    longest = _clock(sum(planned.seconds for planned in plan))
    console.print(f"{_cases(len(plan))}, at most about {longest}")
    if any(planned.accuracy for planned in plan):
        console.print("plus accuracy, whose time depends on the number of images")
    for reason, names in cannot_run.items():
        console.print(f"cannot run here: {reason}: {', '.join(names)}", markup=False)


def print_catalog(out: TextIO, as_json: bool) -> None:
    """Print the models with their options, and the names of the variants."""
    variants = [variant.name for variant in all_variants()]
    known = {**MODELS, **{f"{library}:NAME": model for library, model in LIBRARIES.items()}}
    if as_json:
        models = {name: {"summary": model.summary, "options": _options(model)} for name, model in known.items()}
        out.write(msgspec.json.encode({"models": models, "variants": variants}).decode() + "\n")
        return
    console = console_on(out)
    for name, model in known.items():
        console.print(f"{name}: {model.summary}", markup=False)
        for option, facts in _options(model).items():
            choices = f" ({', '.join(map(str, facts['choices']))})" if facts["choices"] else ""
            console.print(f"    {option}={facts['default']}{choices}: {facts['help']}", markup=False)
    console.print(f"variants: {', '.join(variants)}", markup=False)


def _options(model: Model) -> dict[str, dict[str, Any]]:
    return {
        name: {"default": option.default, "choices": list(option.choices), "help": option.help}
        for name, option in model.options.items()
    }


def print_kernels(out: TextIO, err: TextIO, as_json: bool) -> None:
    """Compile the Triton kernels for every architecture; print the resources of each and its occupancy of an SM."""
    try:
        rows, version = _compiled(console_on(err)), triton_version()
    except CannotCompile as error:
        raise NotAvailable(f"unavailable: the kernels cannot be compiled here: {error}") from error
    if as_json:
        out.write(msgspec.json.encode({"triton": version, "kernels": rows}).decode() + "\n")
    else:
        console_on(out).print(_kernel_table(rows, version))


def _kernel_table(rows: Sequence[Compiled], version: str) -> Table:
    table = Table(title=f"compiled by Triton {version}", title_justify="left", title_style="")
    for heading in ("op", "kernel", "sm"):
        table.add_column(heading, overflow="fold")
    for heading in ("warps", "registers", "spills B", "shared B", "occupancy %"):
        table.add_column(heading, justify="right")
    table.add_column("limited by")
    for row in rows:
        figures = (row.sm, row.warps, row.registers, row.spilled_bytes, row.shared_bytes, f"{100 * row.occupancy:.0f}")
        table.add_row(row.op, escape(row.kernel), *map(str, figures), ", ".join(row.limits))
    return table


def _compiled(console: Console) -> list[Compiled]:
    """Return the compiled kernels; shows a progress bar meanwhile, or a line if there is no terminal."""
    if not console.is_terminal:
        console.print("compiling the kernels: up to a minute, or seconds if Triton has cached them")
        return compile_all()
    columns = [MofNCompleteColumn(), BarColumn(), TimeElapsedColumn(), TimeRemainingColumn()]
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("", total=None)
        return compile_all(progress=lambda done, total: progress.update(task, completed=done, total=total))
