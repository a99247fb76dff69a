"""Explains another tool's number from ours: the same file under that tool's protocol, changed one switch at a time.

Switches interact, as a queue does with threads. Each is therefore applied on the way from our protocol to theirs, once
in a fixed order and once in reverse, and is assigned the mean of the two effects (the Shapley value for two orders).
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from statistics import fmean, median
from typing import Any

import msgspec
from msgspec import Struct

from benchd.daemon.errors import NotAvailable, UsageError
from benchd.daemon.measuring.paired import Request
from benchd.daemon.measuring.protocol import Compare
from benchd.daemon.records import Case
from benchd.daemon.verdicts.effects import LOOK_ALPHA, Verdict, judge, paired_effect
from benchd.daemon.why.comparisons import Comparing, FinishedComparison
from benchd.daemon.why.environments import with_parts
from benchd.daemon.why.foreign import Foreign

ENOUGH = 0.03
"""A comparison ends once the half-width of its log ratio is this small."""

FEWEST_PAIRS, MOST_PAIRS = 3, 9
Part = str | dict[str, Any]
"""What a switch changes in our case: one of its parts, or fields of `Compare`."""


class Switch(Struct, frozen=True):
    """Something that the other tool does differently, and the ms that it adds to our number: mean, and each order."""

    name: str
    ms: float
    of_orders_ms: list[float]


class Bridge(Struct, frozen=True, kw_only=True):
    """The steps from `ours_ms`, the median of a single call, to `theirs`; `unexplained_ms` is the remainder.

    `untried` lists those of their switches that this case does not support, with the reasons. `mark` says what
    disturbed ours.
    """

    case_id: str
    theirs: Foreign
    ours_ms: float
    switches: list[Switch]
    unexplained_ms: float
    untried: list[str] = []
    mark: str = ""

    @property
    def explained(self) -> float:
        """The share of the gap that the switches explain."""
        gap = self.theirs.quoted_ms - self.ours_ms
        return 1.0 - abs(self.unexplained_ms / gap) if gap else 1.0


@dataclass
class Bridging:
    """The search for the differences between one of our cases and another tool's result."""

    theirs: Foreign
    request: Request
    comparing: Comparing
    _parts: dict[str, Part] = field(default_factory=dict)
    _lines: dict[frozenset[str], FinishedComparison] = field(default_factory=dict)
    _case_id: str = ""

    def bridge(self) -> Bridge:
        """Measure the switches; raise Interrupted after a signal, NotAvailable if the case cannot run here."""
        case = self.comparing.planned(self.request)[0].case
        self._case_id = case.case_id
        self._parts, untried = self._possible(case)
        switches = list(self._parts)
        self.comparing.err.write("".join(f"difference: {name}\n" for name in switches))
        orders = [switches, switches[::-1]]
        ways = [[self._log(order[:end]) for end in range(len(order) + 1)] for order in orders]
        whole = self._line(switches)
        ours_ms = median(ms for line in self._lines.values() for ms in line.first_ms)
        added = {
            name: [
                ours_ms * (math.exp(way[order.index(name) + 1]) - math.exp(way[order.index(name)]))
                for way, order in zip(ways, orders, strict=True)
            ]
            for name in switches
        }
        steps = [Switch(name, fmean(added_ms), added_ms) for name, added_ms in added.items()]
        end_ms = ours_ms * math.exp(ways[0][-1])
        waiting = self.theirs.in_flight / self.theirs.streams - 1.0
        if waiting > 0.0:
            queue = f"{self.theirs.in_flight} requests in flight, {self.theirs.streams} of them running"
            steps.append(_computed(queue, end_ms * waiting))
            end_ms *= 1.0 + waiting  # Little's law: requests in flight divided by the rate at which they end
        if self.theirs.quoted == "mean":
            steps.append(_computed("mean, not median", end_ms * (whole.mean_over_median - 1.0)))
            end_ms *= whole.mean_over_median
        return Bridge(
            case_id=case.case_id,
            theirs=self.theirs,
            ours_ms=ours_ms,
            switches=steps,
            unexplained_ms=self.theirs.quoted_ms - end_ms,
            untried=untried,
            mark=self.comparing.mark,
        )

    def _possible(self, case: Case) -> tuple[dict[str, Part], list[str]]:
        """Return the switches that this case supports, by name, and why it does not support the others."""
        possible: dict[str, Part] = {}
        untried = []
        for name, part in _switches(case, self.theirs):
            reason = self._why_not(part)
            if reason:
                untried.append(f"{name}: {reason}")
            else:
                possible[name] = part
        return possible, untried

    def _why_not(self, part: Part) -> str:
        if not isinstance(part, str):
            return ""
        try:
            self.comparing.planned(replace(self.request, cases=[with_parts(self._case_id, [part])]))
        except (UsageError, NotAvailable) as error:
            return str(error)
        return ""

    def _log(self, switches: Sequence[str]) -> float:
        """Return the log ratio of our case with these switches to our case."""
        return paired_effect(self._line(switches).ratios).log_ratio if switches else 0.0

    def _line(self, switches: Sequence[str]) -> FinishedComparison:
        """Return the comparison of our case with these switches with our case; each set is measured only once."""
        known = frozenset(switches)
        if known not in self._lines:
            self._lines[known] = self._measured(switches)
        return self._lines[known]

    def _measured(self, switches: Sequence[str]) -> FinishedComparison:
        parts = [self._parts[name] for name in switches]
        cases = [self._case_id, with_parts(self._case_id, (part for part in parts if isinstance(part, str)))]
        fields = {name: value for part in parts if isinstance(part, dict) for name, value in part.items()}
        request = replace(self.request, cases=cases, recipes=[Compare(), Compare(**fields)])
        line = self.comparing.pairs(f"ours with {', '.join(switches) or 'nothing changed'}", request, _decide, fields)
        if not line.ratios:
            raise NotAvailable(f"{cases[1]}: {line.reason}")
        return line


def _switches(case: Case, theirs: Foreign) -> Iterator[tuple[str, Part]]:
    """Yield each way in which the other tool's protocol differs from ours, as far as its file shows, and our switch."""
    if theirs.same_input:
        yield "one input, which stays in the caches", {"one_input": True}
    if theirs.span:
        yield f"inputs drawn from {theirs.span[0]:g} to {theirs.span[1]:g}", {"span": theirs.span}
    if theirs.precision and theirs.precision != case.variant.precision:
        variant = msgspec.structs.replace(case.variant, precision=theirs.precision)
        yield f"{theirs.precision}, not {case.variant.precision}", variant.name
    if theirs.batch and theirs.batch != case.batch_size:
        yield f"batch {theirs.batch}, not {case.batch_size}", f"b{theirs.batch}"
    if theirs.threads and theirs.threads != case.threads:
        yield f"{_plural(theirs.threads, 'thread')}, not {case.threads or 'all'}", f"threads={theirs.threads}"
    if theirs.streams != case.streams:
        yield f"{_plural(theirs.streams, 'stream')}, not {case.streams}", f"streams={theirs.streams}"


def _plural(count: int, noun: str) -> str:
    return f"{count} {noun}{'s' * (count != 1)}"


def _computed(name: str, ms: float) -> Switch:
    return Switch(name, ms, [ms])


def _decide(ratios: Sequence[float]) -> Verdict | None:
    if len(ratios) < FEWEST_PAIRS:
        return None
    verdict = judge(paired_effect(ratios), LOOK_ALPHA, 0.0)
    width = verdict.interval.high - verdict.interval.low if verdict.interval else 0.0
    return verdict if width / 2.0 <= ENOUGH or len(ratios) >= MOST_PAIRS else None


def lines(bridge: Bridge) -> Iterator[str]:
    """Yield the steps from our number to theirs, one switch per line, with any disturbances of ours."""
    return (f"{line}{bridge.mark}" for line in _lines(bridge))


def _lines(bridge: Bridge) -> Iterator[str]:
    theirs = bridge.theirs
    yield f"{bridge.case_id}: {bridge.ours_ms:.4g} ms, the median of single calls"
    for switch in bridge.switches:
        spread = max(switch.of_orders_ms) - min(switch.of_orders_ms)
        yield f"  {switch.ms:+10.4g} ms  {switch.name}{f' (±{spread / 2:.2g} by order)' if spread else ''}"
    yield f"  {bridge.unexplained_ms:+10.4g} ms  unexplained"
    yield f"{theirs.tool}: {theirs.quoted_ms:.4g} ms, {theirs.quoted}: {theirs.means}"
    for note in (*bridge.untried, *theirs.notes, *([f"their warm-up: {theirs.warm_up}"] if theirs.warm_up else [])):
        yield f"  note: {note}"
