"""`benchd compare --live` and `--aa`: compares two cases, or two installations, in alternating fresh processes.

The order within each pair is random. Successive processes are correlated, and a fixed order such as A B B A would turn
that noise into bias: identical code would be found different more often than the error rate allows. On a CPU, both
processes of a pair measure alternating blocks on the same CPUs, so that anything that briefly slows the machine affects
both.
"""

import os
import random
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from functools import cache, partial
from typing import TextIO, TypeVar

import msgspec

from benchd.daemon.config import LimitsConfig
from benchd.daemon.errors import NotAvailable, UsageError
from benchd.daemon.machine import environment, interpreter
from benchd.daemon.machine.signals import ending
from benchd.daemon.measuring import plan, recording
from benchd.daemon.measuring.plan import PlannedCase
from benchd.daemon.measuring.protocol import Compare, Outcome
from benchd.daemon.measuring.recording import RunHeader, RunId
from benchd.daemon.measuring.session import Session
from benchd.daemon.measuring.supervisor import Supervisor, Turn, interleaved_rule
from benchd.daemon.records import PLAIN, Record, UserModel, wall_now
from benchd.daemon.verdicts import doubts, effects, noise_floor, sameness
from benchd.daemon.verdicts.compare import Comparison, comparison
from benchd.daemon.verdicts.effects import ALPHA, LOOKS, Verdict
from benchd.daemon.verdicts.statistics import STOP_RULES, StopRule

T = TypeVar("T")
Decide = Callable[[Sequence[float]], Verdict | None]
"""Returns the verdict based on the ratios of these pairs (B divided by A), or None to request another pair."""

SHORT = StopRule(5, 1, 0.25, 1.25, None)
INTERLEAVED = interleaved_rule(0.8)
WARM_UP_CAP_S = 0.1
"""Replaces the preset's cap for interleaved processes of the same case, because a longer drift affects both equally."""

_VERSIONS = """
import importlib.metadata, json, sys
names = sys.argv[1:]
installed = {d.metadata["Name"].lower(): d.version for d in importlib.metadata.distributions()}
print(json.dumps({name: installed[name] for name in names if name in installed}))
"""


@dataclass(frozen=True)
class Request:
    """A requested comparison. `pairs` fixes the number of pairs; None means interim analyses after 7, 11 and 15.

    It is one of `comparisons` comparisons that share the error rate. `layers` also requests a profile from each
    process. `pythons`, `variables`, `recipes` (other inputs) and `modules` (the user's modules or ONNX files) have
    one entry for both sides or one per side; with `modules`, the cases omit the model: `eager,b4`.
    """

    cases: list[str]
    preset: str
    min_effect: float
    pairs: int | None = None
    pythons: list[str] = field(default_factory=list)
    modules: Sequence[UserModel] = ()
    variables: Sequence[dict[str, str]] = ()
    recipes: Sequence[Compare] = ()
    samples: str | None = None
    is_aa: bool = False
    layers: bool = False
    comparisons: int = 1


@dataclass
class Side:
    """One of the two sides: its case, its interpreter and variables, its name and its outcomes."""

    planned: PlannedCase
    python: str
    variables: Mapping[str, str]
    recipe: Compare
    name: str
    run: RunHeader
    run_id: RunId = field(default_factory=RunId.new)
    outcomes: list[Outcome] = field(default_factory=list)

    @property
    def is_interleaved(self) -> bool:
        """Return whether its processes alternate block by block with the other side's."""
        return self.planned.limits.rule == INTERLEAVED

    @property
    def medians_ms(self) -> list[float]:
        """Return the median of each successful process."""
        return [outcome.process.timing.median_ms for outcome in self.outcomes if outcome.process.timing]

    def record(self) -> Record:
        """Return the Record of all its processes."""
        return recording.of_planned(self.planned, self.run, self.run_id, self.outcomes)


def compare(
    request: Request, planned: Sequence[PlannedCase], session: Session, err: TextIO, decide: Decide | None = None
) -> tuple[Comparison, int]:
    """Measure both planned sides alternately until there is a verdict; return it and the measurement's exit code.

    `decide` replaces the request's own rule.

    The code is 0, 2 for a usage error, 1 if a process failed, 7 if a side cannot run here, or 130 after an interrupt;
    the caller adds the verdict's code. However the measurement ends, the session's sinks get both records; the effect
    of an A/A comparison is added to the noise floor.
    """
    supervisor = Supervisor(session, planned)
    sides = _sides(request, supervisor)
    ratios: list[float] = []
    try:
        verdict = _alternate(supervisor, sides, request, decide, ratios, err)
    finally:
        first, second = ([side.record()] if side.outcomes else [] for side in sides)
        for record in (*first, *second):
            session.publish(record)
    if request.is_aa and verdict.effect is not None:
        _add_to_noise_floor(verdict, sides[0], session.failures)
    names, runs = (sides[0].name, sides[1].name), ([sides[0].medians_ms], [sides[1].medians_ms])
    result = comparison(names, verdict, runs, (first, second), ratios)
    code = 130 if session.interrupted else _code(sides)
    return msgspec.structs.replace(result, broken_off=code != 0), code


def _code(sides: Sequence[Side]) -> int:
    outcomes = [outcome for side in sides for outcome in side.outcomes]
    statuses = {outcome.process.status for outcome in outcomes}
    if any("usage_error" in outcome.flags for outcome in outcomes):
        return 2
    is_mixed = any(sameness.model_difference(side.outcomes) for side in sides)
    return 7 if "unsupported" in statuses else int(statuses != {"ok"} or is_mixed)


def planned_sides(request: Request, limits: LimitsConfig, machine: plan.Machine) -> list[PlannedCase]:
    """Return the case of each side; raise UsageError, or NotAvailable for a case that cannot run here."""
    if request.pairs is not None and request.pairs < 2:
        raise UsageError(f"--pairs {request.pairs}: must be at least 2")
    for python in request.pythons:
        _versions(python)
    modules: Sequence[UserModel | None] = _both(request.modules) or [None, None]
    sides = zip(_both(request.cases), modules, strict=True)
    return [_planned(*side, request, limits, machine) for side in sides]


def _sides(request: Request, supervisor: Supervisor) -> tuple[Side, Side]:
    pythons, run = _both(request.pythons) or [sys.executable] * 2, supervisor.session.run(supervisor.suite_id)
    variables, recipes = _both(request.variables) or [{}, {}], _both(request.recipes) or [Compare(), Compare()]
    first, second = (
        Side(entry, python, own, recipe, _called(entry, python, request), _under(python, run))
        for entry, python, own, recipe in zip(supervisor.plan, pythons, variables, recipes, strict=True)
    )
    return first, second


def _both(given: Sequence[T]) -> list[T]:
    """Return one value per side from one or two values."""
    return list(given) * (2 if len(given) == 1 else 1)


def _called(entry: PlannedCase, python: str, request: Request) -> str:
    """Return the case id, followed by any other differences between the sides."""
    words, paths = [entry.case.case_id], {module.path for module in request.modules}
    words += [f"of {os.path.relpath(entry.own.path)}"] if entry.own and len(paths) > 1 else []
    words += [f"by {python}"] if len(set(request.pythons)) > 1 else []
    return " ".join(words)


def _planned(
    case_id: str, own: UserModel | None, request: Request, limits: LimitsConfig, machine: plan.Machine
) -> PlannedCase:
    if own and not f"{case_id},".startswith(f"{own.model},"):
        case_id = f"{own.model},{case_id}"
    suite = msgspec.structs.replace(plan.suite_of(case_id, request.preset), samples=request.samples)
    entry, *others = plan.plan([suite], limits, machine, own)
    if others:
        raise UsageError(f"{case_id} matches {1 + len(others)} cases; add the batch size, as in {entry.case.case_id}")
    if entry.case.load and entry.case.load.rate_hz is None:
        raise UsageError(f"{case_id}: different rates cannot be compared; give both the same, such as rate=30")
    if entry.reason:
        raise NotAvailable(f"{case_id}: {entry.reason}")
    return _short(entry)


def _short(entry: PlannedCase) -> PlannedCase:
    """Return the entry with shorter processes, unless the user chose how long each of them measures.

    The verdict depends on the variation between processes, about which longer processes reveal nothing.
    """
    is_chosen = entry.case.scenario not in PLAIN or entry.limits.rule != STOP_RULES["quick"]
    return entry if is_chosen else replace(entry, limits=msgspec.structs.replace(entry.limits, rule=SHORT))


def _under(python: str, run: RunHeader) -> RunHeader:
    """Return the run's header with the versions installed for this interpreter."""
    if python == sys.executable:
        return run
    described = msgspec.structs.replace(run.environment, versions=_versions(python))
    tool_version = described.versions.get("benchd", run.tool_version)
    return replace(run, environment=described, tool_version=tool_version)


@cache
def _versions(python: str) -> dict[str, str]:
    """Return the versions installed for a different interpreter; raise UsageError if they cannot be read."""
    command = interpreter.of_code(_VERSIONS, *environment.DISTRIBUTIONS, python=python)
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
        return msgspec.json.decode(done.stdout, type=dict[str, str])
    except (OSError, subprocess.SubprocessError, msgspec.DecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else error
        raise UsageError(
            f"--python {python}: {why}; give the interpreter of an environment that contains benchd"
        ) from error


def _alternate(
    supervisor: Supervisor,
    sides: tuple[Side, Side],
    request: Request,
    decide: Decide | None,
    ratios: list[float],
    err: TextIO,
) -> Verdict:
    """Measure pairs in random order until there is a verdict; append B divided by A for each pair to `ratios`."""
    with supervisor.session.measuring(ending()):
        started = time.monotonic()
        for side in sides:
            side.run_id = RunId.new()  # dated now, because the time spent waiting does not count
        if _can_interleave(sides, supervisor):
            _interleave(sides)
        decide = decide or partial(
            _verdict, request, _min_effect(sides, request, supervisor.session.machine.device, err)
        )
        while True:
            turn = partial(_turn, number=len(ratios), layers=request.layers)
            with closing(supervisor.in_turn(random.sample(sides, 2), turn)) as running:
                for side, outcome in running:
                    side.outcomes.append(outcome)
                    mixed = sameness.model_difference(side.outcomes)
                    if outcome.process.status != "ok" or mixed:
                        return Verdict(answer="inconclusive", reason=f"{side.name}: {outcome.process.reason or mixed}")
            ratios.append(effects.ratio(*(side.outcomes[-1].process for side in sides)))
            _tell(sides, ratios, request.pairs, time.monotonic() - started, err)
            verdict = decide(ratios)
            if verdict:
                return verdict


def _can_interleave(sides: Sequence[Side], supervisor: Supervisor) -> bool:
    """Return whether the blocks of a pair can alternate; not if the user chose how long each process measures."""
    is_short = all(side.planned.limits.rule == SHORT for side in sides)
    return is_short and supervisor.can_interleave([side.planned for side in sides])


def _interleave(sides: Sequence[Side]) -> None:
    """Make the sides alternate, with a short warm-up if both have the same case and the user did not set one."""
    is_one_case = len({side.planned.case.case_id for side in sides}) == 1
    for side in sides:
        limits = msgspec.structs.replace(side.planned.limits, rule=INTERLEAVED)
        if is_one_case and limits.warm_up_cap_s == plan.PRESETS["quick"].warm_up_cap_s:
            limits = msgspec.structs.replace(limits, warm_up_cap_s=WARM_UP_CAP_S)
        side.planned = replace(side.planned, limits=limits)


def _min_effect(sides: Sequence[Side], request: Request, device: str, err: TextIO) -> float:
    """Return the smallest relevant effect; print a line for each noise floor that raises it."""
    floors = noise_floor.of_device(sides[0].run.device_id, device, interleaved=sides[0].is_interleaved)
    case_ids = [side.planned.case.case_id for side in sides]
    noise_floor.report(floors, case_ids, request.min_effect, err)
    return max(request.min_effect, *(floors.get(case_id, 0.0) for case_id in case_ids))


def _turn(side: Side, number: int, *, layers: bool) -> Turn:
    return Turn(
        side.planned,
        f"{side.run_id.run_id}.{number}",
        number,
        msgspec.structs.replace(side.recipe, repeats=number == 0 and not side.recipe.one_input, layers=layers),
        side.python,
        side.variables,
    )


def _verdict(request: Request, min_effect: float, ratios: Sequence[float]) -> Verdict | None:
    if request.pairs is None:
        return effects.look(ratios, min_effect, request.comparisons)
    if len(ratios) < request.pairs:
        return None
    return effects.judge(effects.paired_effect(ratios), ALPHA / request.comparisons, min_effect)


def _tell(sides: Sequence[Side], ratios: Sequence[float], pairs: int | None, elapsed_s: float, err: TextIO) -> None:
    a = sides[0].medians_ms[-1]
    done, most = len(ratios), pairs or LOOKS[-1]
    left = f"about {(most - done) * elapsed_s / done:.0f} s {'left' if pairs else f'to pair {most}'}"
    change = f"{100 * (ratios[-1] - 1):+.2f} %"
    mark = doubts.mark(side.record() for side in sides)
    err.write(
        f"pair {done} of {'' if pairs else f'{LOOKS[0]} to '}{most}: A {a:.4g} ms, B {change}{mark}, "
        f"{elapsed_s:.0f} s so far{f', {left}' if done < most else ''}\n"
    )
    err.flush()


def _add_to_noise_floor(verdict: Verdict, side: Side, failures: list[str]) -> None:
    """Store the effect of an A/A comparison; if that fails, only add the reason to `failures`: the verdict holds."""
    effect = noise_floor.AaEffect(
        device_id=side.run.device_id,
        device=side.run.environment.device,
        case_id=side.planned.case.case_id,
        effect=verdict.effect or 0.0,
        effect_low=verdict.interval.low if verdict.interval else None,
        effect_high=verdict.interval.high if verdict.interval else None,
        answer=verdict.answer,
        pairs=len(side.medians_ms),
        interleaved=side.is_interleaved,
        t_wall=wall_now("seconds"),
    )
    try:
        noise_floor.add(effect)
    except UsageError as error:
        failures.append(f"noise floor of {effect.case_id}: {error}")
