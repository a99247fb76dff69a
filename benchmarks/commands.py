"""Runs benchd's own commands with this interpreter, wherever their scripts are installed."""

import sys
from typing import Literal

_RUN = "import sys; from benchd.daemon.cli import {0}; sys.argv[0] = {1!r}; {0}()"


def command(name: Literal["benchd", "bench-once"], *arguments: str) -> list[str]:
    """Return the command line that runs benchd's command `name` with these arguments."""
    return [sys.executable, "-c", _RUN.format(name.replace("-", "_"), name), *arguments]
