"""Whether two records were measured in one environment, and the names of what differs."""

import msgspec

from benchd.daemon.machine.environment import comparable
from benchd.daemon.records import Environment


def difference(one: Environment, other: Environment) -> str | None:
    """Return how the environments differ in ways that prevent a comparison, else None."""
    if (one.fingerprint, one.threads) == (other.fingerprint, other.threads):  # the case determines the threads
        return None
    return f"another environment ({_changed(one, other)})"


def _changed(one: Environment, other: Environment) -> str:
    """Return the names and values that differ, of those in the fingerprint."""
    before, after = (_flat(comparable(environment)) for environment in (one, other))
    names = [name for name in before | after if before.get(name) != after.get(name)]
    was, now = (_flat(msgspec.structs.asdict(environment)) for environment in (one, other))
    return ", ".join(f"{name} {was.get(name)} and {now.get(name)}" for name in names) or "fingerprint"


def _flat(facts: dict[str, object]) -> dict[str, object]:
    versions = facts.pop("versions")
    return facts | (versions if isinstance(versions, dict) else {})
