"""`benchd compare --live`: two cases, or one case under two installs, in fresh processes by turns; and A/A.

Lots decide who goes first in a pair. Processes that follow each other resemble each other, and in a fixed order such as
A B B A that noise takes sides: identical code is called different more often than the looks allow.
"""

import random
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass, field
from datetime import datetime, timezone
from importlib.metadata import version
from pathlib import Path
from typing import TextIO, TypeVar

import msgspec

from benchd.daemon import config
from benchd.daemon.config import Config
from benchd.daemon.errors import NotAvailable, UsageError
from benchd.daemon.journal import Journal
from benchd.daemon.machine import environment, folders, identity
from benchd.daemon.machine.lock import when_free
from benchd.daemon.measuring import plan, recording
from benchd.daemon.measuring.plan import OwnModule, Planned
from benchd.daemon.measuring.protocol import Outcome
from benchd.daemon.measuring.recording import Begun, Pass
from benchd.daemon.measuring.supervisor import Settings, Supervisor
from benchd.daemon.records import Record
from benchd.daemon.sampling import sources
from benchd.daemon.verdicts import noise_floor, statistics
from benchd.daemon.verdicts.compare import Comparison, comparison
from benchd.daemon.verdicts.results import JOURNAL
from benchd.daemon.verdicts.statistics import ALPHA, LOOKS, Verdict

T = TypeVar("T")

_VERSIONS = """
import importlib.metadata, json, sys
names = sys.argv[1:]
found = {d.metadata["Name"].lower(): d.version for d in importlib.metadata.distributions()}
print(json.dumps({name: found[name] for name in names if name in found}))
"""


@dataclass(frozen=True)
class Request:
    """What the command line asks for. `pairs` fixes their number; None looks after 7, 11 and 15.

    With `modules` of the user's own, one for both sides or one each, cases name what is left of them: `eager,b4`.
    """

    cases: list[str]
    pythons: list[str]
    pairs: int | None
    min_effect: float
    preset: str
    config: Path | None
    device: str
    threads: int | None
    output: Path
    is_aa: bool
    modules: list[OwnModule] = field(default_factory=list)
    wait: bool = False


@dataclass
class Side:
    """One of the two sides: its case, the interpreter that runs it, what it is called, and what came of it."""

    planned: Planned
    python: str
    name: str
    shared: Pass
    begun: Begun
    outcomes: list[Outcome] = field(default_factory=list)

    @property
    def medians_ms(self) -> list[float]:
        """Return the median of each process that ended well."""
        return [outcome.process.timing.median_ms for outcome in self.outcomes if outcome.process.timing]

    def record(self) -> Record:
        """Return the Record of all its processes."""
        return recording.record(self.planned.case, self.planned.preset, self.shared, self.begun, self.outcomes)


def compare(request: Request, err: TextIO) -> tuple[Comparison, int]:
    """Measure both sides by turns until there is a verdict; return it and the exit code of the measurement.

    The code is 0, 2 for what a command line got wrong, 1 where a process did not end well, 7 where a side cannot run
    here, or 130 after an interrupt; the verdict's own is the caller's. Both records are appended to the output's
    records.jsonl, whatever ends the measurement, and the effect of an A/A comparison to the noise floor.
    """
    if request.pairs is not None and request.pairs < 2:
        raise UsageError(f"--pairs {request.pairs}: at least 2")
    settings = config.read(request.config) if request.config else Config()
    machine = plan.inspect(request.device)
    sides = _sides(request, settings, machine)
    device_id = sides[0].shared.device_id
    min_effect = noise_floor.min_effect(device_id, machine.device, request.min_effect)
    noise_floor.tell(min_effect, request.min_effect, err)
    supervisor = _supervisor(request, settings, machine, sides)
    try:
        verdict = when_free(lambda: _alternate(supervisor, sides, request.pairs, min_effect, err), request.wait, err)
    finally:
        _keep(sides, request.output)
    if request.is_aa and verdict.effect is not None:
        _add_to_noise_floor(verdict, sides[0], len(sides[0].medians_ms))
    first, second = ([side.record()] if side.outcomes else [] for side in sides)
    names, times_ms = (sides[0].name, sides[1].name), (sides[0].medians_ms, sides[1].medians_ms)
    made = comparison(names, verdict, times_ms, (first, second))
    return made, 130 if supervisor.interrupted else _code(sides)


def _code(sides: Sequence[Side]) -> int:
    """Return the exit code of how the processes ended."""
    outcomes = [outcome for side in sides for outcome in side.outcomes]
    statuses = {outcome.process.status for outcome in outcomes}
    if any("usage_error" in outcome.flags for outcome in outcomes):
        return 2
    is_mixed = any(recording.other_model(side.outcomes) for side in sides)
    return 7 if "unsupported" in statuses else int(statuses != {"ok"} or is_mixed)


def _sides(request: Request, settings: Config, machine: plan.Machine) -> tuple[Side, Side]:
    pythons = _both(request.pythons) or [sys.executable] * 2
    modules: Sequence[OwnModule | None] = _both(request.modules) or [None, None]
    planned = [
        _planned(case, own, request, settings, machine) for case, own in zip(_both(request.cases), modules, strict=True)
    ]
    suite_id = uuid.uuid4().hex
    first, second = (
        Side(
            entry,
            python,
            _called(entry, python, pythons, modules),
            _pass(settings, machine, suite_id, python),
            Begun.now(time.monotonic_ns()),
        )
        for entry, python in zip(planned, pythons, strict=True)
    )
    return first, second


def _both(given: Sequence[T]) -> list[T]:
    """Return what each side has where one or two were given."""
    return list(given) * (2 if len(given) == 1 else 1)


def _called(entry: Planned, python: str, pythons: Sequence[str], modules: Sequence[OwnModule | None]) -> str:
    """Return the case, and what else tells one side from the other."""
    words = [entry.case.case_id]
    words += [f"of {entry.own.path}"] if isinstance(entry.own, OwnModule) and modules[0] != modules[1] else []
    words += [f"by {python}"] if len(set(pythons)) > 1 else []
    return " ".join(words)


def _planned(case_id: str, own: OwnModule | None, request: Request, settings: Config, machine: plan.Machine) -> Planned:
    if own and not f"{case_id},".startswith(f"{own.model},"):
        case_id = f"{own.model},{case_id}"
    suite = plan.suite_of(case_id, request.preset)
    if request.threads is not None:
        suite = msgspec.structs.replace(suite, threads=[request.threads])
    entry, *others = plan.plan([suite], settings.limits, machine, own)
    if others:
        raise UsageError(f"{case_id} names {1 + len(others)} cases; give its batch size, as in {entry.case.case_id}")
    if entry.reason:
        raise NotAvailable(f"{case_id}: {entry.reason}")
    return entry


def _pass(settings: Config, machine: plan.Machine, suite_id: str, python: str) -> Pass:
    described = machine.environment()
    if python != sys.executable:
        described = msgspec.structs.replace(described, versions=_versions(python))
        described = msgspec.structs.replace(described, fingerprint=environment.fingerprint(described))
    return Pass(
        device_id=identity.device_id(settings.device.id),
        boot_id=identity.boot_id(),
        suite_id=suite_id,
        tool_version=described.versions.get("benchd", version("benchd")),
        environment=described,
    )


def _versions(python: str) -> dict[str, str]:
    """Return the versions that another interpreter has installed; raise UsageError where it cannot say."""
    command = [python, "-c", _VERSIONS, *environment.DISTRIBUTIONS]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
        return msgspec.json.decode(done.stdout, type=dict[str, str])
    except (OSError, subprocess.SubprocessError, msgspec.DecodeError) as error:
        raise UsageError(f"--python {python}: {error}; give the interpreter of an environment with benchd") from error


def _supervisor(request: Request, configured: Config, machine: plan.Machine, sides: Sequence[Side]) -> Supervisor:
    request.output.mkdir(parents=True, exist_ok=True)
    settings = Settings(
        output=request.output.resolve(),
        cache=folders.cache(),
        artifacts=folders.artifacts(),
        device=machine.device,
        sources=configured.sampling.sources or sources.present(machine.device, machine.gpu_uuid),
        gpu_uuid=machine.gpu_uuid,
        period_s=configured.sampling.period_s,
    )
    return Supervisor([side.planned for side in sides], settings, sides[0].shared, sinks=[])


def _alternate(
    supervisor: Supervisor, sides: tuple[Side, Side], pairs: int | None, min_effect: float, err: TextIO
) -> Verdict:
    """Measure pair after pair, in each the sides in an order drawn by lot, until there is a verdict."""
    with supervisor.session(_ending()):
        started, done = time.monotonic(), 0
        for side in sides:
            side.begun = Begun.now(time.monotonic_ns())  # whatever it waited
        while True:
            for side in random.sample(sides, 2):
                name = f"{side.begun.run_id}.{done}"
                outcome = supervisor.process(side.planned, name, done, side.python, is_compared=True)
                side.outcomes.append(outcome)
                mixed = recording.other_model(side.outcomes)
                if outcome.process.status != "ok" or mixed:
                    return Verdict(answer="inconclusive", reason=f"{side.name}: {outcome.process.reason or mixed}")
            done += 1
            _tell(sides, done, pairs, time.monotonic() - started, err)
            verdict = _verdict(sides[0].medians_ms, sides[1].medians_ms, pairs, min_effect)
            if verdict:
                return verdict


def _ending() -> tuple[signal.Signals, ...]:
    """Return the signals that end it, a lost remote shell among them unless nohup holds that off."""
    is_held = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    return (signal.SIGINT, signal.SIGTERM, *([] if is_held else [signal.SIGHUP]))


def _verdict(first: Sequence[float], second: Sequence[float], pairs: int | None, min_effect: float) -> Verdict | None:
    if pairs is None:
        return statistics.look(first, second, min_effect)
    if len(first) < pairs:
        return None
    return statistics.judge(statistics.paired_effect(first, second), ALPHA, min_effect)


def _tell(sides: Sequence[Side], done: int, pairs: int | None, elapsed_s: float, err: TextIO) -> None:
    a, b = (side.medians_ms[-1] for side in sides)
    most = pairs or LOOKS[-1]
    left_s = (most - done) * elapsed_s / done
    err.write(
        f"pair {done} of {'' if pairs else 'at most '}{most}: {a:.4g} and {b:.4g} ms ({100 * (b / a - 1):+.2f} %), "
        f"{elapsed_s:.0f} s so far, {'' if pairs else 'at most '}{left_s:.0f} s left\n"
    )
    err.flush()


def _keep(sides: Sequence[Side], output: Path) -> None:
    """Append the record of each side that has a process."""
    made = [side.record() for side in sides if side.outcomes]
    if made:
        with closing(Journal(output / JOURNAL)) as journal:
            for record in made:
                journal.append(msgspec.json.encode(record))


def _add_to_noise_floor(verdict: Verdict, side: Side, pairs: int) -> None:
    wall = datetime.now(timezone.utc).isoformat(timespec="seconds").replace("+00:00", "Z")
    noise_floor.add(
        noise_floor.AaEffect(
            device_id=side.shared.device_id,
            device=side.shared.environment.device,
            case_id=side.planned.case.case_id,
            effect=verdict.effect or 0.0,
            answer=verdict.answer,
            pairs=pairs,
            t_wall=wall,
        )
    )
