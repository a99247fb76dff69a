"""Searches the differences of two environments with real processes: each step compares A with a mixture of A and B."""

import math
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import msgspec
from msgspec import Struct

from benchd.daemon.errors import Full, NotAvailable, UsageError
from benchd.daemon.measuring.paired import Decide, Request
from benchd.daemon.measuring.session import temporary_output
from benchd.daemon.verdicts.effects import LOOK_ALPHA, Verdict, judge, look, paired_effect
from benchd.daemon.verdicts.layers import LayerVerdict
from benchd.daemon.verdicts.statistics import Interval
from benchd.daemon.why import environments
from benchd.daemon.why.comparisons import Comparing, FinishedComparison
from benchd.daemon.why.environments import Difference, EnvironmentSide
from benchd.daemon.why.search import MOST_PAIRS, Applied, Cause, Estimate, Search, Spread, placed

CHANGES = ("faster", "slower")
LEAST_SHARE = 0.15
"""A share of the whole effect; smaller parts are not searched."""


class DifferenceCost(Struct, frozen=True, kw_only=True):
    """Differences that together change the time: the change as a share of A's time, with its interval."""

    differences: list[str]
    share: float
    interval: Interval


class Explanation(Struct, frozen=True, kw_only=True):
    """The reasons why B is slower or faster than A.

    `verdict` compares B, built from the packages and settings of both sides, with A; `outside` compares the original
    environments, if only these differ. `layers` attributes the change to layers. Each cost is that of its differences
    alone, applied to A. Each of the `alternatives` has the same cost on its own. Noise, or mixtures that do not run,
    hide which of the `unresolved` differences is a cause. `mark` says what disturbed the comparisons.
    """

    case_id: str
    differences: list[str]
    verdict: Verdict
    outside: Verdict | None = None
    layers: LayerVerdict | None = None
    causes: list[DifferenceCost] = []
    alternatives: list[DifferenceCost] = []
    unresolved: list[str] = []
    comparisons: int = 0
    mark: str = ""

    @property
    def is_open(self) -> bool:
        """Whether noise hides the answer."""
        return self.verdict.answer == "inconclusive" or bool(self.unresolved)


@dataclass
class Explaining:
    """A search: one case in two environments; `request` contains all other details of a comparison."""

    first: EnvironmentSide
    second: EnvironmentSide
    request: Request
    comparing: Comparing
    _differences: dict[str, Difference] = field(default_factory=dict)
    _spread: Spread = field(default_factory=Spread)
    _folder: Path = Path()
    _plain: str = ""

    def explain(self, originals: Sequence[str] = ()) -> Explanation:
        """Search for the causes; raise Interrupted after a signal, UsageError if the sides do not differ.

        `originals` are the interpreters of the two sides, which are compared directly if the mixtures do not differ.
        """
        planned = self.comparing.planned(self.request)  # rejects an invalid request before any work
        self.first, self.second = (
            msgspec.structs.replace(side, case=entry.case.case_id)
            for side, entry in zip((self.first, self.second), planned, strict=True)
        )
        differences, needs = environments.differences(self.first, self.second)
        if not differences:
            raise UsageError("both sides have the same packages, variables and case: there is nothing to search")
        self._differences = {difference.name: difference for difference in differences}
        with temporary_output() as self._folder:
            self._plain = environments.mixture(self._folder / "a", self.first.installed, [])
            explanation = self._explained(originals, needs)
        return msgspec.structs.replace(explanation, comparisons=self.comparing.done, mark=self.comparing.mark)

    def _explained(self, originals: Sequence[str], needs: Mapping[str, Applied]) -> Explanation:
        case_id, names = self.first.case, list(self._differences)
        self.comparing.err.write("".join(f"difference: {name}\n" for name in names))
        ends = self._compared(frozenset(names), self._looks, layers=True)
        ratios = ends.ratios
        if not ratios:
            raise NotAvailable(f"{case_id}: {ends.reason}")
        verdict = self._verdict(ratios)
        explanation = Explanation(case_id=case_id, differences=names, verdict=verdict, layers=ends.layers)
        if verdict.answer not in CHANGES:
            outside = self._outside(originals) if originals and verdict.answer == "same" else None
            return msgspec.structs.replace(explanation, outside=outside)
        self._spread.add(_logs(ratios))
        effect = paired_effect(ratios).log_ratio
        least = max(math.log1p(self.request.min_effect), LEAST_SHARE * abs(effect))
        causes = Search(names, self._measure, least, needs).run(effect)
        return msgspec.structs.replace(
            explanation,
            causes=[_cost(cause) for cause in causes.causes],
            alternatives=[_cost(cause) for cause in causes.alternatives],
            unresolved=list(causes.unresolved),
        )

    def _looks(self, ratios: Sequence[float]) -> Verdict | None:
        return look(ratios, self.request.min_effect)

    def _verdict(self, ratios: Sequence[float]) -> Verdict:
        return judge(paired_effect(ratios), LOOK_ALPHA, self.request.min_effect, LOOK_ALPHA)

    def _outside(self, originals: Sequence[str]) -> Verdict | None:
        """Return the verdict on the original environments, or None if they do not differ."""
        sides = (self.first, self.second)
        ratios = self._pairs("the unmodified environments", "originals", originals, sides, self._looks).ratios
        verdict = self._verdict(ratios) if ratios else None
        return verdict if verdict and verdict.answer in CHANGES else None

    def _measure(self, applied: Applied, low: float, high: float) -> Estimate | None:
        def decide(ratios: Sequence[float]) -> Verdict | None:
            if len(ratios) < 2:
                return None
            is_placed = placed(self._spread.of(_logs(ratios)), low, high, len(ratios)) is not None
            return self._verdict(ratios) if is_placed or len(ratios) >= MOST_PAIRS else None

        try:
            ratios = self._compared(applied, decide).ratios
        except Full:
            raise
        except (UsageError, NotAvailable):  # these parts of a case exclude each other
            return None
        if not ratios:
            return None
        estimate = self._spread.of(_logs(ratios))
        self._spread.add(_logs(ratios))
        return estimate

    def _compared(self, applied: Applied, decide: Decide, *, layers: bool = False) -> FinishedComparison:
        """Compare A with these differences applied against plain A."""
        chosen = [difference for name, difference in self._differences.items() if name in applied]
        with tempfile.TemporaryDirectory(dir=self._folder) as folder:
            pythons = [self._plain, environments.mixture(Path(folder), self.first.installed, chosen)]
            sides = (self.first, environments.mixed(self.first, self.second, chosen))
            names = "; ".join(difference.name for difference in chosen)
            description = f"{len(chosen)} of {len(self._differences)} applied: {names}"
            return self._pairs(description, names, pythons, sides, decide, layers=layers)

    def _pairs(
        self,
        description: str,
        key: str,
        pythons: Sequence[str],
        sides: tuple[EnvironmentSide, EnvironmentSide],
        decide: Decide,
        *,
        layers: bool = False,
    ) -> FinishedComparison:
        request = replace(
            self.request,
            pythons=list(pythons),
            variables=[side.variables for side in sides],
            cases=[side.case for side in sides],
            layers=layers,
        )
        return self.comparing.pairs(description, request, decide, (self.first.identity, self.second.identity, key))


def _logs(ratios: Sequence[float]) -> list[float]:
    return [math.log(ratio) for ratio in ratios]


def _cost(cause: Cause) -> DifferenceCost:
    return DifferenceCost(differences=list(cause.names), share=cause.cost.share, interval=cause.cost.interval)
