"""Rules that find problems in a profile's tables, the maximum gain from each remedy, and the variant that tests it.

A rule is a function of the profile that returns one Finding or None; without its method's result, it returns None.
`expected` assumes that only this remedy is applied, with full effect. A variant proposed by several findings should
combine all their gains.
"""

from collections.abc import Callable

import msgspec

from benchd.daemon.profiling.profile import Finding, Profile
from benchd.daemon.profiling.rules import kernel_rules, layer_rules, step_rules

RULES: tuple[Callable[[Profile], Finding | None], ...] = (
    *step_rules.RULES,
    *kernel_rules.RULES,
    *layer_rules.RULES,
)


def find(profile: Profile) -> list[Finding]:
    """Return the findings, sorted by expected gain, largest first; those without one come last."""
    findings = [msgspec.structs.replace(made, rule=rule.__name__) for rule in RULES if (made := rule(profile))]
    return sorted(findings, key=lambda finding: 1.0 if finding.expected is None else finding.expected)
