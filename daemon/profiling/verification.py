"""`--verify`: compares the variants that findings propose with the profiled case, in alternating fresh processes."""

from statistics import median
from typing import Literal, TextIO

import msgspec

from benchd.daemon.errors import BenchdError
from benchd.daemon.measuring import paired
from benchd.daemon.measuring.session import Session
from benchd.daemon.profiling.profile import Finding, Profile
from benchd.daemon.records import Case, Variant
from benchd.daemon.verdicts import effects
from benchd.daemon.verdicts.compare import Comparison
from benchd.daemon.verdicts.effects import MIN_EFFECT, Answer
from benchd.models import catalog

MOST_CASES = 3  # maximum number of proposed cases to measure

_VERDICTS: dict[Answer, Literal["confirmed", "refuted", "inconclusive"]] = {
    "faster": "confirmed",
    "slower": "refuted",
    "same": "refuted",
    "inconclusive": "inconclusive",
}


def tried(profile: Profile, pairs: int, session: Session, err: TextIO) -> Profile:
    """Return the profile with verdicts on the measured cases; `missing` says why a proposed case has none.

    The session's sinks get the records of both sides. Raises KeyboardInterrupt after an interrupt.
    """
    tests = [case_for(profile, finding) for finding in profile.findings]
    chosen = list(dict.fromkeys(case.case_id for case in tests if case))[:MOST_CASES]
    outcomes: dict[str, Comparison | str] = {}
    for number, case_id in enumerate(chosen, 1):
        err.write(f"verify {number} of {len(chosen)}: {case_id} against {profile.case_id}\n")
        outcomes[case_id] = _compared([profile.case_id, case_id], pairs, session, err)
    reasons = {f"verify {case_id}": outcome for case_id, outcome in outcomes.items() if isinstance(outcome, str)}
    compared = {case_id: outcome for case_id, outcome in outcomes.items() if isinstance(outcome, Comparison)}
    findings = [
        verified(profile, finding, compared[case.case_id]) if case and case.case_id in compared else finding
        for finding, case in zip(profile.findings, tests, strict=True)
    ]
    return msgspec.structs.replace(profile, findings=findings, missing=profile.missing | reasons)


def _compared(cases: list[str], pairs: int, session: Session, err: TextIO) -> Comparison | str:
    """Return the comparison, or the reason why there is none."""
    request = paired.Request(cases=cases, preset="quick", min_effect=MIN_EFFECT, pairs=pairs)
    try:
        planned = paired.planned_sides(request, session.config.limits, session.machine)
        comparison, code = paired.compare(request, planned, session, err)
    except BenchdError as error:  # this case cannot run here, but others may
        return str(error)
    if code == 130:
        raise KeyboardInterrupt
    return comparison if code == 0 else comparison.verdict.reason


def case_for(profile: Profile, finding: Finding) -> Case | None:
    """Return the profiled case with the finding's changes; None if no variant can test the finding."""
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


def verified(profile: Profile, finding: Finding, made: Comparison) -> Finding:
    """Return the finding with its verdict, from a live comparison of at least two pairs of both cases.

    The finding is refuted if the variant is not faster, and inconclusive if it is faster but fails the numerical check,
    as in a comparison. Both times are added to the evidence, per image if the batch sizes differ.
    """
    images = (finding.batch_size or profile.case.batch_size) / profile.case.batch_size
    verdict = made.verdict
    if images != 1:
        by_image = effects.judge(effects.paired_effect([ratio / images for ratio in made.ratios]))
        doubtful = msgspec.structs.replace(by_image, answer="inconclusive", reason=made.doubt)
        verdict = doubtful if made.doubt else by_image
    measured = 1 + (verdict.effect or 0.0)
    base, variant = median(made.first_ms), median(made.second_ms) / images
    predicted = "no prediction" if finding.expected is None else f"predicted {finding.expected:.3g} of the time"
    reason = f"; {verdict.reason}" if verdict.reason else ""
    line = f"{predicted}, measured {measured:.3g}: {base:.4g} ms and {variant:.4g} ms{reason}"
    check_failed = made.check_failed or made.check_void
    if check_failed:
        line += "; the variant failed its numerical check"
    answer = "inconclusive" if check_failed and verdict.answer == "faster" else verdict.answer
    return msgspec.structs.replace(
        finding, measured=measured, verdict=_VERDICTS[answer], mark=made.mark, evidence=[*finding.evidence, line]
    )
