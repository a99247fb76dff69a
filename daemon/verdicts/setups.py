"""Two setups of one board: what changed between them, how a case differs across them, and what would tell why; pure."""

from benchd.daemon.machine.environment import SOURCES
from benchd.daemon.records import Record
from benchd.daemon.verdicts import one_environment
from benchd.daemon.verdicts.compare import ADVISED_PROCESSES, both_here, clocks, command


def changed(before: Record, now: Record) -> list[str]:
    """Return what changed between two setups, each as `name was → is`, benchd first."""
    is_updated = before.tool_version != now.tool_version
    changes = [_arrow("benchd", before.tool_version, now.tool_version)] if is_updated else []
    changes += [_arrow(*change) for change in one_environment.changes(before.environment, now.environment)]
    sources = {record.environment.software.get(SOURCES) for record in (before, now)} - {None}
    changes += ["the sources of benchd"] if len(sources) == 2 and not is_updated else []
    if one := clocks(before, now):
        changes.append(_arrow(one[0].removesuffix("_hz").replace("_", " "), *(f"{hz / 1e6:.0f} MHz" for hz in one[1:])))
    return changes


def _arrow(name: str, was: str, now: str) -> str:
    return f"{name} {was} → {now}"


def separating(before: Record, now: Record) -> str:
    """Return what would tell which difference between two setups changed the time."""
    if one_environment.difference(before.environment, now.environment) is None:
        return both_here(now)
    named = changed(before, now)
    undo = f"undo {named[0]}" if len(named) == 1 else f"undo one of the {len(named)} differences at a time"
    return f"{undo}, run {command(now, ADVISED_PROCESSES)}, and redo it: what changes with it is its effect"
