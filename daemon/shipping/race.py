"""A race between the candidates of a plan: processes are run as long as the outcome is open.

Processes measured after only two candidates are left, or one has won, also confirm the winner against the runner-up, in
random order. The promise is based only on those processes, because the best of many similar candidates looks too fast
in the race.
"""

import math
import random
import time
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from statistics import geometric_mean
from typing import TextIO

import msgspec
from msgspec import Struct

from benchd.daemon.measuring import protocol, recording
from benchd.daemon.measuring.plan import PlannedCase
from benchd.daemon.measuring.protocol import Limits, Outcome
from benchd.daemon.measuring.recording import RunId
from benchd.daemon.measuring.supervisor import ABREAST, NOT_RUN, Supervisor, Turn, interleaved_rule
from benchd.daemon.records import KERNELS, Record
from benchd.daemon.runtimes import BACKENDS, PRECISIONS
from benchd.daemon.shipping import race_limits, race_log, racing
from benchd.daemon.shipping.manifest import ShipLimits
from benchd.daemon.shipping.race_limits import Miss
from benchd.daemon.shipping.race_log import LoggedProcess, Phase, RaceLog
from benchd.daemon.shipping.racing import Behind
from benchd.daemon.verdicts import doubts, effects, recommend, sameness
from benchd.daemon.verdicts.effects import Verdict
from benchd.daemon.verdicts.recommend import Requirements
from benchd.daemon.verdicts.statistics import StopRule

LOG = "race.jsonl"
PRESET = "ship"
LIMITS = Limits(processes=1, warm_up_cap_s=2.0, rule=StopRule(5, 1, 0.25, 2.0, None), check_images=64)
"""Many short processes reveal more than a few long ones, because no single one shows how processes differ."""

FINALISTS = 2
"""When only this many candidates are left, their processes also confirm the winner."""

LATER_IMAGES = 8
"""The number of images checked by each process after a candidate's first one, which checks all images."""


@dataclass
class Candidate:
    """A variant in the race: its processes and the reason why it left, with `behind` if a different variant is faster.

    All its processes are `raced`; the last ones are also `confirmed` if it got that far. `missed` lists the limits that
    eliminated it.
    """

    planned: PlannedCase
    name: str
    raced: list[Outcome] = field(default_factory=list)
    confirmed: list[Outcome] = field(default_factory=list)
    left: str | None = None
    behind: Behind | None = None
    missed: list[Miss] = field(default_factory=list)

    def times_ms(self, rounds: int) -> list[float]:
        """Return the milliseconds per inference of each process of the first `rounds`."""
        return per_inference_ms(self.raced[:rounds], self.planned)


class RaceResult(Struct, frozen=True, kw_only=True):
    """The result of a race: the winner, its runner-up and the verdict between them, or the `reason` why nothing ships.

    The winner is the simplest of the `tied` candidates. `flags` cast doubt on the winner's promise, including its
    energy if that is limited. `is_open` is set if more time may settle the race.
    """

    winner: str | None = None
    runner_up: str | None = None
    tied: list[str] = []
    verdict: Verdict | None = None
    flags: list[str] = []
    reason: str = ""
    is_open: bool = False


STEADIER = "change the limit, or stop other programs"


class _RaceStopped(Exception):
    """A signal, the time limit or a machine that cannot start processes ended the race; the message says which."""


def per_inference_ms(outcomes: Sequence[Outcome], planned: PlannedCase) -> list[float]:
    """Return the median milliseconds per inference of each process that was timed."""
    timings = [outcome.process.timing for outcome in outcomes]
    return [timing.median_ms / planned.case.batch_size for timing in timings if timing]


def simplicity(one: Candidate) -> tuple[int, int, int, int]:
    """Return the sort key for equally fast variants: simplest first, then smallest, then most exact.

    Plain kernels come first, with runtimes in the order of `benchd list`, then small batches, then fp32.
    """
    variant, case = one.planned.case.variant, one.planned.case
    kinds = KERNELS.index(variant.kernels), BACKENDS.index(variant.backend)
    return *kinds, case.batch_size, PRECISIONS.index(variant.precision)


class Race:
    """The candidates of a supervisor's plan, raced in its session's folder, where a log may resume an earlier race.

    Hold the machine's lock before creating it, because the log of a different race is replaced immediately. `minutes`
    limits the time measured from now on; enough of it is reserved for 5 confirming pairs. `out` receives a line for
    each step.
    """

    def __init__(self, supervisor: Supervisor, ship_limits: ShipLimits, minutes: float, out: TextIO) -> None:
        self._supervisor, self._asked, self._minutes, self._out = supervisor, ship_limits, minutes, out
        names = _names(supervisor.plan)
        self.candidates = [Candidate(entry, name) for entry, name in zip(supervisor.plan, names, strict=True)]
        self._limits = race_limits.limits(ship_limits)
        self._started_s, self._rounds = time.monotonic(), 0
        run = supervisor.session.run(supervisor.suite_id)
        digest = race_log.digest(supervisor.plan, run.environment, run.device_id)
        self._log = RaceLog(supervisor.session.output / LOG, digest)
        if self._mixed():
            self._log.clear()
        self._read()

    @property
    def measured_s(self) -> float:
        """Return the total time of all processes in the log, including earlier starts."""
        return math.fsum(entry.seconds for entry in self._log.entries)

    def _read(self) -> None:
        """Assign the processes in the log to their candidates, and report them."""
        by_case = {candidate.planned.case.case_id: candidate for candidate in self.candidates}
        for entry in self._log.entries:
            candidate = by_case[entry.case_id]
            # a first process that failed earlier may succeed now
            if candidate.raced or entry.outcome.process.status == "ok":
                self._keep(candidate, entry)
        resumed = sum(len(candidate.raced) for candidate in self.candidates)
        if self._log.is_other:
            self._tell("the earlier race used a different plan, machine or version; starting over")
        elif resumed:
            self._tell(f"resuming after {resumed} processes measured earlier")

    def _keep(self, candidate: Candidate, entry: LoggedProcess) -> None:
        candidate.raced.append(entry.outcome)
        if entry.phase == "confirm":
            candidate.confirmed.append(entry.outcome)

    def run(self) -> RaceResult:
        """Race until there is a potential winner and confirm it; an interrupt leaves the race open."""
        self._started_s = time.monotonic()
        try:
            result = self._decided()
        except _RaceStopped as stopped:
            result = RaceResult(reason=str(stopped), is_open=True)
        if result.winner:
            return msgspec.structs.replace(result, flags=self._flags(result.winner))
        mark = self._mark(*(candidate.name for candidate in self.candidates))
        return msgspec.structs.replace(result, reason=f"{result.reason}{mark}")

    def _flags(self, winner: str) -> list[str]:
        candidate = self.named(winner)
        is_of_joules = bool(self._asked.max_energy_j or self._asked.max_power_w)
        flags = doubts.of(self.record(candidate, candidate.confirmed), joules=is_of_joules)
        return [*flags, *["wide_interval"] * racing.is_vague(self._confirmed_ms(candidate))]

    def records(self) -> list[Record]:
        """Return the record of each candidate that was measured, with all of its processes."""
        return [self.record(candidate, candidate.raced) for candidate in self.candidates if candidate.raced]

    def record(self, one: Candidate, outcomes: Sequence[Outcome]) -> Record:
        """Return the record of these processes of a candidate."""
        run = self._supervisor.session.run(self._supervisor.suite_id)
        limits = msgspec.structs.replace(one.planned.limits, processes=len(outcomes))
        return recording.record(one.planned.case, PRESET, run, RunId.new(), outcomes, limits=limits)

    def _apart(self, candidate: Candidate, outcomes: Sequence[Outcome]) -> list[Record]:
        """Return a separate record for each process."""
        return [self.record(candidate, [outcome]) for outcome in outcomes]

    def limits_of(self, winner: str) -> list[str]:
        """Return a line for each limit that was set, with the winner's figure."""
        candidate = self.named(winner)
        record = self.record(candidate, candidate.raced)
        return [limit.stated(record) for limit in self._limits]

    def named(self, name: str) -> Candidate:
        """Return the candidate with this name."""
        return next(candidate for candidate in self.candidates if candidate.name == name)

    def clear_if_mixed(self, outcome: Outcome) -> str | None:
        """Clear the log if this process, which is not in it, ran a different model; return the reason, else None."""
        mixed = self._mixed(outcome)
        if mixed:
            self._log.clear()
        return mixed and f"{mixed}; the same command starts over"

    def _mixed(self, *more: Outcome) -> str | None:
        """Return why the processes in the log and `more` did not all run the same model from the same files, else None.

        Changed files may be equally fast, but only the latest ones are shipped.
        """
        ran = [*(entry.outcome for entry in self._log.entries), *more]
        changed = ", ".join(sameness.files_changed(ran))
        return sameness.model_difference(ran) or (f"{changed} changed" if changed else None)

    def _left(self) -> list[Candidate]:
        return [candidate for candidate in self.candidates if candidate.left is None]

    def _decided(self) -> RaceResult:
        result = self._raced()
        return self._confirmed(result) if result.winner else result

    def _raced(self) -> RaceResult:
        for rounds in racing.LOOKS:
            for number in range(rounds):
                if self._round(number):
                    return self._raced()
            if not self._left():
                return RaceResult(reason=self._nearest())
            result = self._look(rounds)
            if result:
                return result
        return RaceResult(reason=self._undecided(), is_open=True)

    def _round(self, number: int) -> bool:
        """Run the missing processes of a round in random order; candidates that cannot ship leave.

        Return whether other candidates, which lack rounds, came back as a result.
        """
        missing = [candidate for candidate in self._left() if len(candidate.raced) <= number]
        phase: Phase = "confirm" if number and len(self._left()) <= FINALISTS else "race"
        self._measure(missing, phase, is_limited=number > 0)
        unfit = {candidate.name: why for candidate in self._left() if (why := self._unfit(candidate, number))}
        return self._leave(unfit)

    def _leave(self, reasons: Mapping[str, str]) -> bool:
        """Eliminate candidates that cannot ship; return whether others, only behind one of these, come back."""
        for name, why in reasons.items():
            self.named(name).left = why
            self._tell(f"  not {name}: {why}", name)
        back = [candidate for candidate in self.candidates if candidate.behind and candidate.behind.than in reasons]
        for candidate in back:
            candidate.left = candidate.behind = None
            self._tell(f"  {candidate.name} is back in the race")
        return bool(back)

    def _is_late(self, phase: Phase) -> bool:
        """Return whether the remaining time is only enough to confirm."""
        reserved = FINALISTS * racing.PROMISED if phase == "race" else ABREAST
        reserved_s = reserved * self.measured_s / max(len(self._log.entries), 1)
        return time.monotonic() - self._started_s + reserved_s > 60.0 * self._minutes

    def _measure(self, missing: Sequence[Candidate], phase: Phase, *, is_limited: bool = False) -> None:
        """Run one process of each of these candidates in random order, and log it.

        Raises _RaceStopped after a signal, if a process cannot run or, if `is_limited`, once the time is up.
        """
        started_s = time.monotonic()
        is_final = phase == "confirm" and len(missing) == FINALISTS
        in_blocks = is_final and self._supervisor.can_interleave([candidate.planned for candidate in missing])

        def turn(candidate: Candidate) -> Turn:
            if is_limited and self._is_late(phase):
                raise _RaceStopped(self._undecided())
            return _turn(candidate, phase, in_blocks=in_blocks)

        with closing(self._supervisor.in_turn(random.sample(missing, len(missing)), turn)) as running:
            for candidate, outcome in running:
                if self._supervisor.session.interrupted:
                    raise _RaceStopped("interrupted: the same command continues from here")
                if reason := _not_run(outcome):
                    raise _RaceStopped(f"{reason}; the same command continues from here")
                entry = LoggedProcess(candidate.planned.case.case_id, phase, time.monotonic() - started_s, outcome)
                self._log.add(entry)
                self._keep(candidate, entry)
                started_s = time.monotonic()
        if mixed := self._mixed():
            raise _RaceStopped(f"{mixed}; the same command starts over")

    def _unfit(self, candidate: Candidate, number: int) -> str | None:
        """Return why process `number` disqualifies the candidate, else None; process 0 checks the most images."""
        record = self.record(candidate, [candidate.raced[number]])
        if number:
            return recommend.disqualified(record)
        requirements = Requirements(
            min_agreement=self._asked.min_agreement, max_accuracy_drop=self._asked.max_accuracy_drop
        )
        return recommend.why_not(record, requirements)

    def _look(self, rounds: int) -> RaceResult | None:
        """Eliminate candidates that miss a limit or are behind; return the result if that settles the race."""
        self._rounds = rounds
        bounds = len(self._limits) * len(self.candidates)
        for candidate in self._left():
            candidate.missed = self._missed(candidate, candidate.raced[:rounds], bounds)
        if self._leave({candidate.name: candidate.missed[0].words for candidate in self._left() if candidate.missed}):
            return self._raced()
        left = {candidate.name: candidate for candidate in self._left()}
        if not left:
            return RaceResult(reason=self._nearest())
        times_ms = {name: candidate.times_ms(rounds) for name, candidate in left.items()}
        fit = {name for name, candidate in left.items() if not self._doubts(candidate, candidate.raced[:rounds])}
        look = racing.look(times_ms, fit, len(self.candidates), self._asked.min_effect)
        self._tell(f"round {rounds}: {_means(times_ms)}", *left)
        for limit in self._limits:
            judged = (
                f"{name} {limit.spread(self._apart(candidate, candidate.raced[:rounds]))}"
                for name, candidate in left.items()
            )
            self._tell(f"  {limit.what}: {'; '.join(judged)}", *left)
        for name, behind in look.behind.items():
            left[name].behind, left[name].left = behind, _words(behind)
            self._tell(f"  not {name}: {left[name].left}", name, behind.than)
        if not look.may_win:
            return None
        tied = [left[name] for name in look.may_win]
        winner = min(tied, key=simplicity)
        return RaceResult(
            winner=winner.name, runner_up=self._runner_up(winner), tied=[candidate.name for candidate in tied]
        )

    def _missed(self, candidate: Candidate, outcomes: Sequence[Outcome], bounds: int) -> list[Miss]:
        """Return the limits that these processes are shown to miss; the error is shared by `bounds` bounds."""
        apart = self._apart(candidate, outcomes)
        return [miss for limit in self._limits if (miss := limit.miss(apart, bounds))]

    def _doubts(self, candidate: Candidate, outcomes: Sequence[Outcome]) -> list[Miss]:
        """Return the limits that the next process after these may miss."""
        apart = self._apart(candidate, outcomes)
        return [miss for limit in self._limits if (miss := limit.doubt(apart))]

    def _nearest(self) -> str:
        """Return which candidate comes closest to meeting its worst limit, and by how much it misses."""
        worst = [
            (max(candidate.missed, key=lambda miss: math.inf if miss.share is None else miss.share), candidate)
            for candidate in self.candidates
            if candidate.missed
        ]
        known = [(miss.share, miss.words, candidate.name) for miss, candidate in worst if miss.share is not None]
        if known:
            share, words, name = min(known)
            by = f", by {100 * share:.3g} %" if share > 0.0 else f"; more time will not help: {STEADIER}"
            return f"nothing meets the limits; {name} comes closest: {words}{by}"
        return "nothing can ship: " + "; ".join(f"{candidate.name} {candidate.left}" for candidate in self.candidates)

    def _runner_up(self, winner: Candidate) -> str | None:
        """Return the closest other candidate that could ship, judged by the rounds until it left or the race ended."""

        def ratio(candidate: Candidate) -> float:
            rounds = candidate.behind.rounds if candidate.behind else self._rounds
            return geometric_mean(candidate.times_ms(rounds)) / geometric_mean(winner.times_ms(rounds))

        others = [
            candidate
            for candidate in self.candidates
            if candidate is not winner and (candidate.left is None or candidate.behind)
        ]
        return min(others, key=ratio).name if others else None

    def _undecided(self) -> str:
        """Return which candidates could not be distinguished, why, and what would settle the race."""
        left = self._left()
        names = " and ".join(candidate.name for candidate in left)
        unclear = [
            f"{candidate.name}: {miss.words}" for candidate in left for miss in self._doubts(candidate, candidate.raced)
        ]
        open_ = f"it is undecided whether {names} can ship" if unclear else f"{names} cannot be told apart yet"
        undecided = "; ".join([open_, *unclear])
        rounds, needed = min(len(candidate.raced) for candidate in left), self._needed()
        if needed is None:
            return f"{undecided}; more time will not help: {STEADIER}"
        more = max(needed - rounds, 1)
        minutes = more * len(left) * self.measured_s / max(len(self._log.entries), 1) / 60.0
        words = f"{undecided}; about {more} more rounds ({minutes:.2g} minutes) would settle it (--minutes)"
        return words if needed <= racing.LOOKS[-1] else f"{words}, too many: raise --min-effect, or stop other programs"

    def _needed(self) -> int | None:
        """Return the approximate number of rounds until a decision, or None if a limit stays in doubt."""
        left, bounds = self._left(), len(self._limits) * len(self.candidates)
        rounds = min(len(candidate.raced) for candidate in left)
        apart = {candidate.name: self._apart(candidate, candidate.raced) for candidate in left}
        doubtful = [(limit, records) for limit in self._limits for records in apart.values() if limit.doubt(records)]
        by_limit = [limit.needed(records, bounds) for limit, records in doubtful]
        of_limits = [needed for needed in by_limit if needed is not None]
        if len(of_limits) < len(by_limit):
            return None
        if rounds < 3 or len(left) < 2:
            return max([racing.FEW, *of_limits])
        times_ms = {candidate.name: candidate.times_ms(rounds) for candidate in left}
        return max([racing.rounds_to_decide(times_ms, len(self.candidates), self._asked.min_effect), *of_limits])

    def _confirmed(self, raced: RaceResult) -> RaceResult:
        """Return the result after confirming it with fresh processes of the winner and the runner-up.

        A failing runner-up is replaced by the next one; if the winner fails or is in doubt, the race continues without
        it.
        """
        winner, other = self.named(str(raced.winner)), self.named(raced.runner_up) if raced.runner_up else None
        self._confirm(winner, other)
        failed = self._failed(winner) or self._in_doubt(winner)
        if failed:
            self._leave({winner.name: f"won the race, but in fresh processes it {failed}"})
            return self._decided()
        if vague := self._promises_nothing(winner):
            self._log.clear()
            return RaceResult(reason=vague, is_open=True)
        if other is None:
            return raced
        failed = self._failed(other)
        if failed:
            other.left, other.behind = failed, None
            self._tell(f"  not {other.name}: {other.left}", other.name)
            return self._confirmed(msgspec.structs.replace(raced, runner_up=self._runner_up(winner)))
        pairs = min(len(winner.confirmed), len(other.confirmed))
        first, second = (
            per_inference_ms(candidate.confirmed[:pairs], candidate.planned) for candidate in (winner, other)
        )
        sides = winner.name, other.name
        self._tell(f"confirmed by {pairs} processes each: {_means({winner.name: first, other.name: second})}", *sides)
        share = winner.planned.case.batch_size / other.planned.case.batch_size
        outcomes = zip(winner.confirmed[:pairs], other.confirmed[:pairs], strict=True)
        ratios = [share * effects.ratio(early.process, late.process) for early, late in outcomes]
        return _concluded(raced, effects.judge(effects.paired_effect(ratios), min_effect=self._asked.min_effect))

    def _confirm(self, winner: Candidate, other: Candidate | None) -> None:
        """Measure the winner until its promise has enough fresh processes, and the runner-up alongside it.

        The winner gets more processes while a limit is in doubt or its interval is wider than its time, because a small
        number may be spread out by chance.
        """
        for number in range(racing.PROMISED_AT_MOST):
            is_open = number < racing.PROMISED or self._in_doubt(winner) or self._promises_nothing(winner)
            if not is_open or (number >= racing.PROMISED and self._failed(winner)):
                return
            is_against = other and number < racing.needed_against(other.behind)
            sides = [winner, *([other] if other and is_against else [])]
            missing = [candidate for candidate in sides if len(candidate.confirmed) <= number]
            if missing:
                self._measure(missing, "confirm")

    def _failed(self, candidate: Candidate) -> str | None:
        """Return why a candidate's confirming processes fail, including a limit that they are shown to miss."""
        failed = recommend.disqualified(self.record(candidate, candidate.confirmed))
        if failed:
            return failed
        candidate.missed = self._missed(candidate, candidate.confirmed, len(self._limits))
        return f"misses a limit: {candidate.missed[0].words}" if candidate.missed else None

    def _in_doubt(self, candidate: Candidate) -> str | None:
        """Return the limit that a candidate's promise may miss."""
        candidate.missed = self._doubts(candidate, candidate.confirmed)
        return f"is in doubt: {candidate.missed[0].words}" if candidate.missed else None

    def _promises_nothing(self, candidate: Candidate) -> str | None:
        """Return why a candidate's confirming processes support no promise, else None.

        A limit of time that they meet is a promise, however far apart their times are.
        """
        times_ms = self._confirmed_ms(candidate)
        if self._asked.max_latency_ms or self._asked.rate_hz or not racing.is_vague(times_ms):
            return None
        record = self.record(candidate, candidate.confirmed)
        flags = [flag for flag in doubts.of(record) if flag not in doubts.BUSY]  # `run` adds those
        doubtful = f" ({doubts.words(flags)})" if flags else ""
        fewer = "" if record.case.threads == 1 else ", or give fewer --threads"
        return (
            f"{candidate.name} took {min(times_ms):.4g} to {max(times_ms):.4g} ms in {len(times_ms)} fresh processes"
            f"{doubtful}, and an interval wider than the time itself is no promise: stop other programs{fewer}; the "
            "same command starts over"
        )

    def _confirmed_ms(self, candidate: Candidate) -> list[float]:
        return per_inference_ms(candidate.confirmed, candidate.planned)

    def _mark(self, *names: str) -> str:
        return doubts.mark(
            self.record(candidate, candidate.raced) for candidate in map(self.named, names) if candidate.raced
        )

    def _tell(self, text: str, *names: str) -> None:
        """Print a line, followed by any reasons to doubt the times of these candidates."""
        self._out.write(f"{text}{self._mark(*names)}\n")
        self._out.flush()


def _concluded(raced: RaceResult, verdict: Verdict) -> RaceResult:
    if verdict.answer != "faster":
        return msgspec.structs.replace(raced, verdict=verdict)
    by = f"{-100 * (verdict.effect or 0.0):.2g} %"
    return RaceResult(reason=f"{raced.winner} won, but in fresh processes {raced.runner_up} is faster by {by}")


def _not_run(outcome: Outcome) -> str | None:
    """Return why the machine, not the candidate, made this process impossible to run; None if it ran."""
    reason = outcome.process.reason or ""
    return reason if reason.startswith(NOT_RUN) else None


def _turn(candidate: Candidate, phase: Phase, *, in_blocks: bool) -> Turn:
    """Return the candidate's next process; the first one checks all images and measures the accuracy."""
    number, limits = len(candidate.raced), candidate.planned.limits
    if number:
        limits = msgspec.structs.replace(limits, check_images=min(LATER_IMAGES, limits.check_images))
    limits = msgspec.structs.replace(limits, rule=interleaved_rule(limits.rule.cap_s)) if in_blocks else limits
    if phase == "confirm":
        raced = number - len(candidate.confirmed)
        limits = msgspec.structs.replace(limits, processes=raced + racing.PROMISED_AT_MOST)
    accuracy = None if number else candidate.planned.inputs.accuracy
    name, recipe = (
        f"{candidate.planned.case.case_id}.{phase}.{number}",
        protocol.CompareDeployable(repeats=number == 0, layers=phase == "confirm"),
    )
    return Turn(replace(candidate.planned, limits=limits), name, number, recipe, accuracy=accuracy)


def _names(plan: Sequence[PlannedCase]) -> list[str]:
    """Return each candidate's name: its variant, and its batch size if several compete."""
    sizes = {entry.case.batch_size for entry in plan}
    return [entry.case.variant.label + (f" b{entry.case.batch_size}" if len(sizes) > 1 else "") for entry in plan]


def _means(times_ms: Mapping[str, Sequence[float]]) -> str:
    return ", ".join(f"{name} {geometric_mean(values):.4g} ms" for name, values in times_ms.items())


def _words(behind: Behind) -> str:
    low, high = 1.0 + behind.interval.low, 1.0 + behind.interval.high
    interval = f" [{low:.3g}, {high:.3g}]" if behind.rounds > 1 else ""
    return f"takes {1.0 + behind.share:.3g}x{interval} the time of {behind.than}"
