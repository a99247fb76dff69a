"""What a profile says is wrong, what curing it gains at the most, and which variant tests that: rules over its tables.

A rule is a function of the profile that returns one Finding or None; where its method did not run it finds nothing.
`expected` is of its own cure alone, one that does all it can. Where several findings propose one variant, that has the
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
    """Return what the rules find, the largest expected gain first and those without one last."""
    found = [finding for rule in RULES if (finding := rule(profile))]
    return sorted(found, key=lambda finding: 1.0 if finding.expected is None else finding.expected)
