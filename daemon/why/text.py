"""Describes the result of a search in sentences."""

from collections.abc import Iterator

from benchd.daemon.verdicts.effects import Verdict
from benchd.daemon.verdicts.statistics import Interval
from benchd.daemon.why.comparing import CHANGES, DifferenceCost, Explanation


def lines(explanation: Explanation) -> Iterator[str]:
    """Yield lines that explain why B is slower or faster than A, each with any disturbances of the comparisons."""
    return (f"{line}{explanation.mark}" for line in _lines(explanation))


def _lines(explanation: Explanation) -> Iterator[str]:
    verdict = explanation.verdict
    if verdict.answer not in CHANGES:
        same = verdict.answer == "same"
        yield "B is as fast as A" if same else f"inconclusive: {verdict.reason}"
        if explanation.outside:
            yield (
                f"but in the unmodified environments B is {_changed(explanation.outside)}, because of something "
                "outside their packages, such as the interpreter or a file that no package contains"
            )
        return
    yield f"{explanation.case_id}: B is {_changed(verdict)}"
    if explanation.layers:
        yield f"  {explanation.layers.sentence}"
    for cause in explanation.causes:
        together = "together" if len(cause.differences) > 1 else "alone"
        yield f"  {' and '.join(cause.differences)}, {together}: {_share(cause.share, cause.interval)}"
    for cause in explanation.alternatives:
        yield f"  without that, it would be {_named(cause)}: {_share(cause.share, cause.interval)}"
    if explanation.unresolved:
        yield f"  the cause is among: {'; '.join(explanation.unresolved)}"
        yield "  noise, or combinations of these that cannot run, hide which one: repeat on a quiet machine"
    elif not explanation.causes:
        yield "  no single difference explains it: the change did not last through the search"
    yield f"{explanation.comparisons} comparisons; at most 2 % of searches contain a wrong one"


def _changed(verdict: Verdict) -> str:
    if verdict.effect is None or verdict.interval is None:
        raise ValueError("a change has an effect")
    return f"{verdict.answer}: {_share(verdict.effect, verdict.interval)}"


def _named(cause: DifferenceCost) -> str:
    return " and ".join(cause.differences)


def _share(share: float, interval: Interval) -> str:
    return f"{100 * share:+.1f} % [{100 * interval.low:+.1f}, {100 * interval.high:+.1f}]"
