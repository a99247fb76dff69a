"""Rows as lines of JSON that a kill leaves whole, with when and of what code each was measured; free of torch."""

from __future__ import annotations

import functools
import json
import os
import subprocess
import time
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
# what a row is of; the rest of its columns are what was found
_SUBJECT = (
    "device", "op", "host", "model", "options", "shape", "dtype", "batch_size", "direction", "captured", "contender",
)  # fmt: skip


def append(path: Path, lines: Iterable[bytes]) -> None:
    """Append the lines, each in one write of its own."""
    path.parent.mkdir(parents=True, exist_ok=True)
    file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    try:
        for line in lines:
            os.write(file, line + b"\n")
    finally:
        os.close(file)


def stamp() -> dict[str, Any]:
    """Return the columns that say when a row was measured (seconds since 1970) and of which commit."""
    return {"t_wall": round(time.time(), 3), "commit": commit()}


@functools.cache
def commit() -> str | None:
    """Return the commit of this code, "-dirty" with changes behind it; None outside a checkout."""
    command = ["git", "-C", str(HERE), "describe", "--always", "--dirty", "--exclude=*"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None


def whole(path: Path) -> Iterator[tuple[dict[str, Any], bytes]]:
    """Yield the rows of a file with their lines; one that a kill has cut is left out."""
    for line in path.read_bytes().splitlines() if path.exists() else ():
        with suppress(ValueError):
            yield json.loads(line), line


def subject(row: dict[str, Any]) -> str:
    """Return what a row is of: of repeated ones the last stands."""
    return json.dumps([row.get(name) for name in _SUBJECT])
