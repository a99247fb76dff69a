"""Whether two records were measured in one environment, and the names of what differs."""

from collections.abc import Iterator
from typing import Any

import msgspec

from benchd.daemon.machine.environment import comparable
from benchd.daemon.records import Environment

NAMED = 5


def difference(one: Environment, other: Environment) -> str | None:
    """Return how the environments differ in ways that prevent a comparison, else None.

    What an older record does not name is not a difference: `unnamed` tells it.
    """
    names = list(differences(one, other))
    more = f", and {len(names) - NAMED} more" if names[NAMED:] else ""
    return f"another environment ({', '.join(names[:NAMED])}{more})" if names else None


def differences(one: Environment, other: Environment) -> Iterator[str]:
    """Yield each difference as `name: value and value`."""
    return (f"{name}: {was} and {now}" for name, was, now in changes(one, other))


def changes(one: Environment, other: Environment) -> Iterator[tuple[str, str, str]]:
    """Yield the name of each difference and both values as words."""
    if one.comparable_part == other.comparable_part:
        return
    before, after = _compared(one), _compared(other)
    was, now = (_flat(msgspec.structs.asdict(environment)) for environment in (one, other))
    unknown = _unknown(one, other) | _unknown(other, one)
    for name in before | after:
        if before.get(name, "unset") != after.get(name, "unset") and name not in unknown:
            yield name, _word(was, name), _word(now, name)


def unnamed(one: Environment, other: Environment) -> str | None:
    """Return which of the two is an older record that does not tell its environment variables, else None."""
    older = [side for side, environment in zip("AB", (one, other), strict=True) if environment.variables is None]
    return f"{older[0]} is an older record and does not name its environment variables" if len(older) == 1 else None


def _unknown(one: Environment, other: Environment) -> set[str]:
    """Return the names that only `other` can name: those of a later version of benchd."""
    variables = (other.variables or {}).keys() if one.variables is None else set[str]()
    return {*variables} | (other.software.keys() - one.software.keys()) | (other.system.keys() - one.system.keys())


def _compared(environment: Environment) -> dict[str, Any]:
    facts = _flat(comparable(environment))
    return {name: fact for name, fact in facts.items() if name != "driver" or environment.l4t is None}  # it is the L4T


def _flat(facts: dict[str, Any]) -> dict[str, Any]:
    """Return the facts with those of each group, such as `versions`, beside the others."""
    facts = facts | {"variables": facts["variables"] or {}}
    groups = [value for value in facts.values() if isinstance(value, dict)]
    return {name: value for name, value in facts.items() if not isinstance(value, dict)} | {
        name: value for group in groups for name, value in group.items()
    }


def _word(facts: dict[str, Any], name: str) -> str:
    """Return a value as a person reads it; a variable or a package may be unset."""
    value = facts.get(name, "unset")
    return "unknown" if value is None else " ".join(value) if isinstance(value, list) else str(value)
