"""Terminal output: progress while cases run, then a table; for programs, one JSON line per record."""

import math
import shutil
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TextIO

import msgspec
from rich.console import Console
from rich.text import Text

from benchd.daemon.machine.ticker import show
from benchd.daemon.measuring.plan import START_S, PlannedCase, in_rounds
from benchd.daemon.measuring.protocol import SILENT, StageName
from benchd.daemon.measuring.session import Sink
from benchd.daemon.records import Accuracy, Case, Energy, Record, Timing, Variant, of_range, usable_variants
from benchd.daemon.reporting.results_table import ALL_COLUMNS, NO_SENSOR, figure, print_table, terms
from benchd.daemon.reporting.scenario_note import scenario_note
from benchd.daemon.reporting.tables import figures, print_rows
from benchd.daemon.runtimes import FILE_BACKENDS
from benchd.daemon.verdicts import accuracy, alarms, baseline, doubts
from benchd.daemon.verdicts.alarms import Budget
from benchd.daemon.verdicts.compare import centre_ms, runs_ms
from benchd.daemon.verdicts.effects import LOOKS, MIN_EFFECT, SAME_MARGIN
from benchd.daemon.verdicts.figures import worker_peak_bytes
from benchd.daemon.verdicts.noise_floor import FEWEST, NEWEST_DAYS, NoiseFloor
from benchd.daemon.verdicts.recommend import Decision, Requirements, decide, exclusions, line, untried
from benchd.daemon.verdicts.results import process_medians_ms
from benchd.daemon.verdicts.spiking import comparisons
from benchd.daemon.verdicts.statistics import minimum_samples
from benchd.daemon.verdicts.timings import disturbed, two_levels
from benchd.models.catalog import LIBRARIES, MODELS, Model

NO_INTERVAL = "timing.low_ms"  # a key of `missing`
COLD_START: tuple[StageName, ...] = ("import", "build", "export", "load")  # the stages whose sum is its time
SAY_S = 10.0
LATE = 1.25  # times as long as planned, beyond which that is said
PLAIN_WIDTH = 180  # columns, if there is no terminal


class Screen(Sink):
    """Shows a status line with a clock on a terminal, else progress lines; finally a table."""

    def __init__(self, out: TextIO, err: TextIO, as_json: bool, requirements: Requirements | None = None) -> None:
        self._out, self._json = console_on(out), as_json
        self._requirements = requirements or Requirements()
        self._err, self._lines = err, _Lines(err)
        self._records: list[Record] = []
        self._total = self._place = 0
        self._ended: Counter[str] = Counter()  # number of ended processes by case
        self._running: tuple[PlannedCase, int] | None = None

    def begin(self, plan: Sequence[PlannedCase]) -> None:
        """Report roughly how long the run takes."""
        groups = in_rounds(plan)
        self._total, self._plan = len(plan), [entry for group in groups for entry in group]
        self._began_s, self._spent_s = time.monotonic(), 0.0
        self._starts = [self._plan.index(group[0]) for group in groups for _ in group]
        for text in _extent(plan):
            self._err.write(f"{text}\n")

    def _ahead(self) -> str:
        """Return the place in the plan and how long the rest takes, at the pace of the processes that have ended."""
        done_s = sum(entry.seconds * self._share_ended(entry) for entry in self._plan)
        left_s = sum(entry.seconds * (1.0 - self._share_ended(entry)) for entry in self._plan[self._place :])
        pace = self._spent_s / done_s if done_s else 1.0
        running_s, place = time.monotonic() - self._began_s - self._spent_s, f"[{self._place + 1}/{self._total}]"
        if self._running and running_s > pace * self._running[0].seconds / self._running[0].limits.processes:
            return f"{place} longer than planned: "
        late = ", longer than planned" if pace > LATE else ""
        return f"{place} about {duration(left_s * pace - running_s)} left{late}: "

    def _share_ended(self, entry: PlannedCase) -> float:
        return self._ended[entry.case.case_id] / entry.limits.processes

    def _note(self, planned: PlannedCase, process: int) -> None:
        """Count the process before this one as ended."""
        if self._running and self._running != (planned, process):
            self._ended[self._running[0].case.case_id] += 1
            self._spent_s = time.monotonic() - self._began_s
        self._running = planned, process

    def stage(self, planned: PlannedCase, process: int, stage: StageName, done: str = "") -> None:
        """Show the running case, its process and its stage."""
        case, place = planned.case, self._plan.index(planned)
        self._note(planned, process)
        self._place = max(self._place, self._starts[place])  # a search may skip cases
        process_of = f", process {process + 1} of {planned.limits.processes}" if planned.limits.processes > 1 else ""
        text = f"{_name(case)}{process_of}: {_stage(stage, done)}"
        if not show(self._err, f"{text}{_silence(planned, stage)}", ticks=_ticks(case, stage), ahead=self._ahead):
            self._lines.say(f"[{place + 1}/{self._total}] {text}", (case.case_id, process, stage))

    def publish(self, record: Record, body: bytes) -> None:
        """Count the case as done; print its JSON if requested."""
        self._records.append(record)
        self._place += 1
        if self._json:
            self._out.file.write(body.decode() + "\n")
            self._out.file.flush()

    def end(self) -> None:
        """Print the table, then the variants to ship; with JSON, only the reasons why nothing may be shipped."""
        show(self._err, "")
        decisions = decide(self._records, self._requirements)
        if self._json:
            self._err.writelines(f"{line(decision)}\n" for decision in decisions if decision.mixed)
        elif self._records:
            if warning := doubts.warning(self._records):
                self._out.print(warning, markup=False, soft_wrap=True)
            print_table(self._out, self._records)
            for note in (*terms(self._records, self._out.width), *_notes(self._records, self._out.width)):
                self._out.print(note, markup=False)
            interrupted = [decision.subject for decision in decisions if _is_interrupted(decision)]
            for subject in interrupted:
                self._out.print(f"{subject}: interrupted: no variant is recommended before all have run", markup=False)
            _print_decisions(self._out, [decision for decision in decisions if decision.subject not in interrupted])
            for ratio in comparisons(self._records):
                self._out.print(ratio.line, markup=False)


class _Lines:
    """Progress lines for an output without a clock: the progress of a stage, at most once every SAY_S."""

    def __init__(self, err: TextIO) -> None:
        self._err, self._said_s = err, 0.0
        self._said: tuple[str, int, StageName] | None = None

    def say(self, text: str, stage: tuple[str, int, StageName]) -> None:
        """Print the line if it is due, or always if the `stage` of a case's process is a new one."""
        if stage != self._said or time.monotonic() - self._said_s >= SAY_S:
            self._said, self._said_s = stage, time.monotonic()
            self._err.write(f"{text}\n")
            self._err.flush()


class SlowStages(Sink):
    """Shows a line with a clock on a terminal, else a line for each early stage that may take minutes.

    With `counts`, the terminal also shows how many processes of the case run at most.
    """

    def __init__(self, err: TextIO, *, counts: bool = False) -> None:
        self._err, self._lines, self._counts = err, _Lines(err), counts

    def stage(self, planned: PlannedCase, process: int, stage: StageName, done: str = "") -> None:
        """Show the stage; without a terminal, only an export or check in the first process."""
        most = planned.limits.processes
        process_of = f", process {process + 1} of at most {most}" if self._counts and most > 1 else ""
        text = f"{_name(planned.case)}{process_of}: {_stage(stage, done)}"
        if show(self._err, f"{text}{_silence(planned, stage)}", ticks=_ticks(planned.case, stage)):
            return
        if process == 0 and (stage == "check" or (stage == "export" and planned.case.variant.backend in FILE_BACKENDS)):
            self._lines.say(text, (planned.case.case_id, process, stage))


def _name(case: Case) -> str:
    training = " training" if case.direction == "training" else ""
    return f"{case.model} {case.variant.label} b{case.batch_size}{training}"


def _stage(stage: StageName, done: str) -> str:
    return ", ".join(filter(None, [stage.replace("_", " "), done]))


def _ticks(case: Case, stage: StageName) -> bool:
    """Return whether the clock may tick in this stage; a drawing thread would disturb a timed section."""
    return stage not in COLD_START if case.scenario == "cold_start" else stage != "measure"


def _silence(planned: PlannedCase, stage: StageName) -> str:
    """Return how long a cold start is silent until its first answer; other workers say it themselves."""
    if planned.case.scenario != "cold_start" or _ticks(planned.case, stage):
        return ""
    return f", about {duration(START_S)} {SILENT} until its first answer"


def console_on(file: TextIO) -> Console:
    """Return a rich console for this file: as wide as the terminal, or without line wrapping for other files.

    Emoji codes are off, so that a file name such as net.py:fire: is printed unchanged.
    """
    if not file.isatty():
        return Console(file=file, width=PLAIN_WIDTH, highlight=False, emoji=False, soft_wrap=True)
    size = shutil.get_terminal_size()  # rich assumes 80 columns for a dumb terminal unless both are given
    return Console(file=file, width=size.columns, height=size.lines, highlight=False, emoji=False)


def duration(seconds: float) -> str:
    """Return a rough duration in the unit that a person would use."""
    if seconds < 100.0:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60.0)
    return f"{minutes} min" if minutes < 100 else f"{minutes / 60.0:.1f} h"


def _notes(records: Sequence[Record], width: int) -> list[str]:
    """Return notes on why cases did not run, and on the limits of the figures in a table of this width."""
    notes = [f"{record.status}: {_name(record.case)}: {record.reason}" for record in records if record.status != "ok"]
    notes += check_notes(records)
    measured = [record for record in records if record.timing]
    notes += _accuracy_notes(measured)
    notes += [note for record in measured if (note := scenario_note(record))]
    peaks = [(peak, record) for record in measured if (peak := worker_peak_bytes(record))]
    if peaks:
        peak, largest = max(peaks, key=lambda pair: pair[0])
        notes.append(f"memory: up to {figure(peak, 1 / 2**20)} MiB including build and check ({_name(largest.case)})")
    notes += _file_notes(measured)
    notes += _energy_notes(measured)
    notes += [note for record in measured if (note := _disturbed_note(record))]
    notes += _audit_notes(measured)
    unset = next((record for record in records if "clock_not_set" in record.flags), None)
    notes += [f"clock: never set ({unset.t_wall}), so the time of the measurement is unknown"] if unset else []
    notes += list(dict.fromkeys(note for record in measured for note in _cpu_notes(record)))
    notes += [_slow_clock(record) for record in measured if "clock_below_range" in record.flags]
    notes += _floor_notes(measured) if width >= ALL_COLUMNS else []
    notes += [note for record in measured if (note := levels_note(record))]
    without = [record for record in measured if NO_INTERVAL in record.missing]
    for reason in dict.fromkeys(record.missing[NO_INTERVAL] for record in without):
        names = ", ".join(_name(record.case) for record in without if record.missing[NO_INTERVAL] == reason)
        notes.append(f"no interval: {names}: {reason}")
    if any(record.timing and record.timing.interval_basis == "between_processes" for record in measured):
        notes.append("interval: covers 95 % of the processes of one run; other runs may differ by more")
    settling = [record for record in measured if record.limits.get("half_width") is not None]
    unsettled = [record for record in settling if any(p.blocks and not p.blocks.converged for p in record.processes)]
    if unsettled:
        notes.append(f"interval: {len(unsettled)} of {len(measured)} stayed wider than the preset asks for")
    return notes


def _cpu_notes(record: Record) -> Iterator[str]:
    """Yield notes on what limited the case's threads: a quota, too few CPUs, or the module itself."""
    threads, cpus, requested = record.environment.threads, record.environment.cpu_count, record.case.threads
    running = f"{threads} thread{'s' * (threads != 1)}"
    if "cpu_quota_throttled" in record.flags:
        limit = record.environment.system.get("cpu_limit")
        yield f"cpu quota: {record.case.model}: {running}, throttled to the {limit} of its control group"
    if "shared_cpus" in record.flags:
        streams = f" in each of {record.case.streams} streams" if record.case.streams > 1 else ""
        yield f"threads: {record.case.model}: {running}{streams} on the {cpus} CPU{'s' * (cpus > 1)} it may use"
    if "other_threads" in record.flags:
        yield f"threads: {record.case_id}: {threads} ran, not {requested}: the model sets its own number"


def _slow_clock(record: Record) -> str:
    mean_hz, most_hz = of_range(record.environment, record.telemetry) or (0.0, 0.0)
    device = "CPU" if record.environment.device == "cpu" else "GPU"
    clock = f"{mean_hz / 1e6:.0f} of {most_hz / 1e6:.0f} MHz"
    return (
        f"low clock: {record.case_id}: the {device} ran at {clock} throughout; raise the power mode or lock the clocks"
    )


def _uncounted(record: Record) -> str:
    lacking = record.floor.uncounted if record.floor else []
    return f"x of floor: {record.case.model}: too high, because it leaves out {', '.join(lacking)}" if lacking else ""


def _below_floor(record: Record) -> str:
    why = record.floor.reference_because if record.floor else None
    return f"x of floor: {record.case.model} below 1: {why or 'something disturbed the measurement of the peak rates'}"


def _counted(score: Accuracy) -> str:
    if score.gained is None:
        return ""
    return f": it alone gets {score.gained} of the images right, fp32 alone {score.lost}"


def _accuracy_notes(measured: Sequence[Record]) -> list[str]:
    """Return each variant's loss relative to plain fp32, the images used, and why some variants have no accuracy."""
    with_accuracy = [(record, record.accuracy) for record in measured if record.accuracy]
    notes = sorted({f"{score.metric}: over {score.data}" for _, score in with_accuracy})
    notes += [
        f"{score.metric}: {record.case_id}: drop against plain fp32 {accuracy.drop(score)}{_counted(score)}"
        for record, score in with_accuracy
        if record.case.variant != Variant()
    ]
    reasons = {record.missing.get("accuracy", accuracy.NOT_ASKED) for record in measured if not record.accuracy}
    return notes + [f"top-1: not measured: {reason}" for reason in sorted(reasons - {accuracy.NOT_ASKED})]


def check_notes(records: Sequence[Record]) -> list[str]:
    """Return each note of a check, with the models that it applies to."""
    models: dict[str, dict[str, None]] = {}
    for record in records:
        if record.check and record.check.note:
            models.setdefault(record.check.note, {})[record.case.model] = None
    return [f"check: {', '.join(models[note])}: {note}" for note in sorted(models)]


def _disturbed_note(record: Record) -> str | None:
    """Return what disturbed the case, or None if the median without the disturbed blocks is within its interval."""
    disturbance = disturbed(record.processes)
    if disturbance is None or _holds(record.timing, disturbance.clean_ms):
        return None
    return (
        f"interference: {record.case_id}: {disturbance.disturbed} of {disturbance.blocks} blocks of runs disturbed by "
        f"{doubts.words(disturbance.reasons)}: {figure(disturbance.clean_ms)} ms excluding them, "
        f"{figure(disturbance.as_experienced_ms)} ms including them"
    )


def levels_note(record: Record) -> str | None:
    """Return the levels between which processes, or the runs within one, jump; None if they do not."""
    levels, subject = two_levels(process_medians_ms([record])), "the processes"
    if not levels:
        levels = next((process.blocks.levels for process in record.processes if process.blocks), [])
        subject = "the time of a process"
    if not levels:
        return None
    shares = " and ".join(f"{level.ms:.4g} ms ({100 * level.share:.0f} % of {subject})" for level in levels)
    cause = doubts.words(doubts.busy([record])) or "the cause is not known"
    return f"{record.case_id}: jumps between {shares}: {cause}; a repeat run may show a different median"


def _holds(timing: Timing | None, median_ms: float) -> bool:
    """Return whether the timing's interval contains this median."""
    if timing is None or timing.low_ms is None or timing.high_ms is None:
        return False
    return timing.low_ms <= median_ms <= timing.high_ms


def _audit_notes(measured: Sequence[Record]) -> list[str]:
    cached = [record.case_id for record in measured if "repeated_input_faster" in record.flags]
    return [f"audit: {name} is faster on inputs that it has seen before: it caches answers" for name in cached]


def _floor_notes(measured: Sequence[Record]) -> list[str]:
    notes = list(dict.fromkeys(filter(None, map(_uncounted, measured))))
    notes += list(dict.fromkeys(_below_floor(record) for record in measured if "faster_than_floor" in record.flags))
    if any("probes_moved" in record.flags for record in measured):
        notes.append("x of floor: the probed peak rates changed by more than 3 % during this run (clocks or load)")
    return notes


def _file_notes(measured: Sequence[Record]) -> list[str]:
    """Return how many files already existed, and how long it took to make the others."""
    files = {artifact.key: artifact for record in measured for artifact in record.artifacts}
    if not files:
        return []
    exported = [artifact for artifact in files.values() if not artifact.reused]
    seconds = sum(artifact.seconds for artifact in exported)
    text = f"{len(files) - len(exported)} of {len(files)} existed already"
    notes = sorted({f"exported files: {artifact.note}" for artifact in files.values() if artifact.note})
    return [f"exported files: {text}" + (f"; exporting the rest took {seconds:.1f} s" if exported else ""), *notes]


def _energy_notes(measured: Sequence[Record]) -> list[str]:
    """Return the scope of each energy, and why some are missing; energies with different scopes are not comparable."""
    reasons = {r.missing.get("energy", "") for r in measured if r.energy is None}
    if reasons and reasons <= {"no_sensor", ""}:
        return [f"energy: {NO_SENSOR}"]
    scopes: dict[str, list[Energy]] = {}
    for record in measured:
        if record.energy:
            scopes.setdefault(f"{record.energy.scope}, by {record.energy.source}", []).append(record.energy)
    notes = []
    for scope, energies in scopes.items():
        idle_w = [energy.idle_w for energy in energies if energy.idle_w is not None]
        idle = f"{min(idle_w):.3g} to {max(idle_w):.3g} W" if idle_w else "unknown"
        notes.append(f"energy: {scope}, including idle power ({idle})")
    if len(scopes) > 1:
        notes.append("energy: different scopes are not comparable")
    return notes + [f"energy: not measured: {reason}" for reason in sorted(reasons - {""})]


def print_decisions(out: TextIO, decisions: Sequence[Decision], as_json: bool) -> None:
    """Print one line per model, the reasons that excluded variants, and notes; or print JSON."""
    if as_json:
        out.write(msgspec.json.encode([_plain(decision) for decision in decisions]).decode() + "\n")
    else:
        _print_decisions(console_on(out), decisions)


def _plain(decision: Decision) -> dict[str, Any]:
    """Return the decision with each record replaced by its run_id."""
    candidates = {name: record.run_id for name, record in decision.candidates.items()}
    return msgspec.structs.asdict(decision) | {"candidates": candidates}


def _is_interrupted(decision: Decision) -> bool:
    return any(reason.startswith("aborted") for reason in decision.excluded.values())


def _print_decisions(console: Console, decisions: Sequence[Decision]) -> None:
    for decision in decisions:
        sentence = Text(line(decision))
        sentence.highlight_words([f"ship: {decision.ship}", f": {decision.fastest};", "nothing to ship"], "bold")
        console.print(sentence)
        for text in exclusions(decision):
            console.print(f"    {text}", markup=False)
        left = untried(decision)
        if left:
            console.print(f"    not tried: {', '.join(left)} (--variants)", markup=False)


def print_baseline(out: TextIO, kept: Sequence[Record], place: str, budget: Budget) -> None:
    """Print the runs of each case in a baseline, the slowdown that raises an alarm, and the baseline's path."""
    console, lacking, rows, doubted = console_on(out), "", [], set[str]()
    for case_id in dict.fromkeys(record.case_id for record in kept):
        of_case = baseline.newest_environment([record for record in kept if record.case_id == case_id])
        runs = runs_ms(of_case)
        bound = alarms.least_change(budget, of_case)
        lacking = lacking or (alarms.too_few(of_case) if bound is None else "")
        counts = map(str, (len(runs), len(alarms.apart(of_case)), sum(map(len, runs))))
        least = "-" if bound is None else f"{100 * max(math.expm1(bound), MIN_EFFECT):+.1f} %"
        doubted.add(word := doubts.short(*of_case))
        rows.append([case_id, *counts, f"{figure(centre_ms(runs))} {word}".strip(), least])
    columns = ["case", *figures("runs", "12 h apart", "processes", "median ms", "alarm from")]
    if warning := doubts.warning(kept):
        console.print(warning, markup=False)
    print_rows(console, columns, rows, f"baseline of {kept[0].device_id}")
    for meaning in doubts.meanings(doubted):
        console.print(meaning, markup=False)
    console.print(f"Alarm: {alarms.SLOWER_DAYS} results this much slower, at least a day apart.\n{budget}")
    if lacking:
        console.print(f"No alarm yet: {lacking}", markup=False)
    console.print(place, markup=False)


def print_noise_floors(out: TextIO, floors: Sequence[NoiseFloor]) -> None:
    """Print the noise floor of each case and the number of A/A comparisons on which it is based."""
    console = console_on(out)
    rows = []
    for entry in floors:
        floor = "-" if entry.floor is None else f"{100 * entry.floor:.2g} %"
        how = "alternating" if entry.interleaved else "one by one"
        rows.append(
            [entry.case_id, f"{entry.device_id} {entry.device}", how, str(entry.stored), str(entry.counted), floor]
        )
    if rows:
        print_rows(console, ["case", "device", "pairs", *figures("comparisons", "counted", "noise floor")], rows)
    console.print(
        f"A noise floor needs {FEWEST} comparisons from the last {NEWEST_DAYS} days with at least {LOOKS[0]} pairs and "
        f"an interval of at most {100 * SAME_MARGIN:g} % either way: benchd compare --aa CASE"
    )


def _extent(plan: Sequence[PlannedCase]) -> Iterator[str]:
    """Yield the number of cases in a plan, roughly how long they take, and what may take additional time."""
    cases = f"{len(plan)} case{'s' if len(plan) > 1 else ''}"
    about = duration(sum(planned.seconds for planned in plan))
    yield f"{cases}, about {about} on a quiet machine; a model's first check may add a minute"
    if any(planned.inputs.accuracy for planned in plan):
        yield "plus accuracy, whose time depends on the number of images"
    for percentile in sorted({case.searched_percentile for case in plan if case.searched_percentile is not None}):
        yield (
            f"--find-rate takes longer at low rates: p{percentile:g} needs {minimum_samples(percentile)} requests "
            "for each trial that comes close to the deadline"
        )


def print_plan(out: TextIO, plan: Sequence[PlannedCase], cannot_run: Mapping[str, Sequence[str]]) -> None:
    """Print every case of a plan, the variants that cannot run here with the reasons, and the estimated duration."""
    console = console_on(out)
    rows, reasons = [], []
    for planned in plan:
        case_id, reason = planned.case.case_id, planned.reason
        rows.append([case_id, str(planned.limits.processes), "-" if reason else f"{planned.seconds:.0f} s"])
        reasons += [f"not run: {case_id}: {reason}"] if reason else []
    print_rows(console, ["case", *figures("processes", "about")], rows, "plan")
    for text in reasons:
        console.print(text, markup=False)
    for text in _extent(plan):
        console.print(text)
    for reason, names in cannot_run.items():
        console.print(f"cannot run here: {reason}: {', '.join(names)}", markup=False)


def print_catalog(out: TextIO, as_json: bool) -> None:
    """Print the models with their options, and the names of the variants."""
    variants = usable_variants()
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
