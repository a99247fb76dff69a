"""`--verify`: the variants that findings propose, measured against the profiled case in fresh processes by turns."""

from pathlib import Path
from typing import TextIO

import msgspec

from benchd.daemon.errors import BenchdError
from benchd.daemon.measuring import paired
from benchd.daemon.profiling.profile import Finding, Profile
from benchd.daemon.profiling.verify import case_for, verified
from benchd.daemon.verdicts.compare import Comparison
from benchd.daemon.verdicts.statistics import MIN_EFFECT

MOST = 3
"""So many cases are measured at the most, those of the first findings."""


def tried(profile: Profile, pairs: int, device: str, output: Path, err: TextIO) -> Profile:
    """Return the profile with the verdicts of what was measured; `missing` says why a proposed case was not.

    The records of both sides go to the output's records.jsonl. Raises KeyboardInterrupt after an interrupt.
    """
    tests = [case_for(profile, finding) for finding in profile.findings]
    chosen = list(dict.fromkeys(case.case_id for case in tests if case))[:MOST]
    made: dict[str, Comparison | str] = {}
    for number, case_id in enumerate(chosen, 1):
        err.write(f"verify {number} of {len(chosen)}: {case_id} against {profile.case_id}\n")
        made[case_id] = _compared([profile.case_id, case_id], pairs, device, output, err)
    reasons = {f"verify {case_id}": found for case_id, found in made.items() if isinstance(found, str)}
    findings = [
        _judged(profile, finding, made.get(case.case_id) if case else None)
        for finding, case in zip(profile.findings, tests, strict=True)
    ]
    return msgspec.structs.replace(profile, findings=findings, missing=profile.missing | reasons)


def _compared(cases: list[str], pairs: int, device: str, output: Path, err: TextIO) -> Comparison | str:
    """Return what the measurement says, or why there is none."""
    request = paired.Request(
        cases=cases,
        pythons=[],
        pairs=pairs,
        min_effect=MIN_EFFECT,
        preset="quick",
        config=None,
        device=device,
        threads=None,
        output=output,
        is_aa=False,
    )
    try:
        made, code = paired.compare(request, err)
    except BenchdError as error:  # it cannot run here, and the others may
        return str(error)
    if code == 130:
        raise KeyboardInterrupt
    return made if code == 0 else made.verdict.reason


def _judged(profile: Profile, finding: Finding, made: Comparison | str | None) -> Finding:
    if not isinstance(made, Comparison):
        return finding
    return verified(profile, finding, made.first_ms, made.second_ms, made.check_failed or made.check_void)
