"""Completions for the word being typed; `benchd` prints the shell script that requests them."""

from collections.abc import Callable, Iterable
from pathlib import Path

from benchd.daemon.errors import BenchdError
from benchd.daemon.records import usable_variants
from benchd.daemon.verdicts import results
from benchd.models.catalog import MODELS


def _listed(names: Callable[[], Iterable[str]]) -> Callable[[str], list[str]]:
    """Return a function that completes the last name in a comma-separated list."""

    def complete(incomplete: str) -> list[str]:
        before, comma, last = incomplete.rpartition(",")
        return [f"{before}{comma}{name}" for name in names() if name.startswith(last)]

    return complete


def cases(incomplete: str) -> list[str]:
    """Return the case ids in bench-out that start with this text."""
    try:
        records = results.read(Path("bench-out"))
    except (BenchdError, OSError):
        return []
    return sorted({record.case_id for record in records if record.case_id.startswith(incomplete)})


models = _listed(lambda: MODELS)
OF_FIELDS = {"models": models, "variants": _listed(usable_variants)}
"""The functions that complete the values of a suite's fields."""
