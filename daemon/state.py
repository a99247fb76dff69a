"""Where this machine keeps what outlives a run."""

import os
from pathlib import Path


def folder() -> Path:
    """Return the service's state folder, else the XDG one."""
    home = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    return Path(os.environ.get("STATE_DIRECTORY") or Path(home) / "benchd")
