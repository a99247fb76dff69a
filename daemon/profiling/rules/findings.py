"""Problems that a profile shows, the largest gain of a remedy, and the variant that tests it: rules over its tables.

A rule is a function of the profile that returns one Finding or None; without its method's result it finds nothing.
`expected` assumes this remedy alone, fully effective. If several findings propose one variant, it should have the
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
    """Return the findings, the largest expected gain first and those without one last."""
    findings = [finding for rule in RULES if (finding := rule(profile))]
    return sorted(findings, key=lambda finding: 1.0 if finding.expected is None else finding.expected)
