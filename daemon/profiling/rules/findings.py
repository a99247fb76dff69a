"""Rules over a profile's tables: problems, the largest gain of each remedy, and the variant that tests it.

A rule is a function of the profile that returns one Finding or None; without its method's result it returns None.
`expected` assumes this remedy alone, fully effective. If several findings propose the same variant, it should have the
gains of all of them.
"""

from collections.abc import Callable

from benchd.daemon.profiling.profile import Finding, Profile
from benchd.daemon.profiling.rules import kernel_rules, layer_rules, step_rules

RULES: tuple[Callable[[Profile], Finding | None], ...] = (
    *step_rules.RULES,
    *kernel_rules.RULES,
    *layer_rules.RULES,
)


def find(profile: Profile) -> list[Finding]:
    """Return the findings, those with the largest expected gain first and those without one last."""
    findings = [finding for rule in RULES if (finding := rule(profile))]
    return sorted(findings, key=lambda finding: 1.0 if finding.expected is None else finding.expected)
