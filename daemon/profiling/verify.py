"""Findings against measurements: the case that tests a finding, and what its times make of the prediction; pure."""

from collections.abc import Sequence
from typing import Literal

import msgspec

from benchd.daemon.profiling.profile import Finding, Profile
from benchd.daemon.records import Case, Variant
from benchd.daemon.verdicts import statistics
from benchd.daemon.verdicts.statistics import Answer, median
from benchd.models import catalog

_VERDICTS: dict[Answer, Literal["confirmed", "refuted", "inconclusive"]] = {
    "faster": "confirmed",
    "slower": "refuted",
    "same": "refuted",
    "inconclusive": "inconclusive",
}


def case_for(profile: Profile, finding: Finding) -> Case | None:
    """Return the profiled case with what the finding changes; None where no variant tests it."""
    if finding.variant is None:
        return None
    options = profile.case.options | finding.options
    if catalog.find(profile.case.model):
        options = catalog.entry(profile.case.model).without_defaults(options)
    return msgspec.structs.replace(
        profile.case,
        variant=Variant.parse(finding.variant),
        options=dict(sorted(options.items())),
        batch_size=finding.batch_size or profile.case.batch_size,
    )


def verified(
    profile: Profile, finding: Finding, base_ms: Sequence[float], variant_ms: Sequence[float], check_failed: bool
) -> Finding:
    """Return the finding with its verdict, from the process medians of both cases measured in pairs, at least two.

    Refuted is what is slower or the same. What is faster and fails its numerical check is inconclusive, as in a
    comparison. Both figures join the evidence; where the batch is another one they are of an image.
    """
    images = (finding.batch_size or profile.case.batch_size) / profile.case.batch_size
    verdict = statistics.judge(statistics.paired_effect(base_ms, [ms / images for ms in variant_ms]))
    measured = 1 + (verdict.effect or 0.0)
    base, variant = median(base_ms), median(variant_ms)
    predicted = "no prediction" if finding.expected is None else f"predicted {finding.expected:.3g} of the time"
    reason = f"; {verdict.reason}" if verdict.reason else ""
    line = f"{predicted}, measured {measured:.3g}: {base:.4g} ms and {variant:.4g} ms{reason}"
    if check_failed:
        line += "; the variant does not pass its numerical check"
    answer = "inconclusive" if check_failed and verdict.answer == "faster" else verdict.answer
    return msgspec.structs.replace(
        finding, measured=measured, verdict=_VERDICTS[answer], evidence=[*finding.evidence, line]
    )
