"""Rows as lines of JSON that survive a kill, each with the time and the commit of its measurement; torch-free."""

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
# columns that identify what was measured; the others contain the results
_SUBJECT = (
    "device", "op", "host", "model", "options", "shape", "dtype", "batch_size", "direction", "captured", "contender",
)  # fmt: skip


def append(path: Path, lines: Iterable[bytes]) -> None:
    """Append the lines, each in a single write."""
    path.parent.mkdir(parents=True, exist_ok=True)
    file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    try:
        for line in lines:
            os.write(file, line + b"\n")
    finally:
        os.close(file)


def stamp() -> dict[str, Any]:
    """Return the columns for the time of the measurement (seconds since 1970) and the commit of the code."""
    return {"t_wall": round(time.time(), 3), "commit": commit()}


@functools.cache
def commit() -> str | None:
    """Return the commit of this code, with "-dirty" if there are uncommitted changes; None outside a checkout."""
    command = ["git", "-C", str(HERE), "describe", "--always", "--dirty", "--exclude=*"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None


def whole(path: Path) -> Iterator[tuple[dict[str, Any], bytes]]:
    """Yield the rows of a file with their lines, skipping a line that a kill has truncated."""
    for line in path.read_bytes().splitlines() if path.exists() else ():
        with suppress(ValueError):
            yield json.loads(line), line


def subject(row: dict[str, Any]) -> str:
    """Return what a row measures: among rows with the same subject, the last one counts."""
    return json.dumps([row.get(name) for name in _SUBJECT])
