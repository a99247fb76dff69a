"""Where everything that is compiled or computed once is kept."""

import os
from pathlib import Path


def folder() -> Path:
    """Return the service's cache folder, else the XDG one."""
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(os.environ.get("CACHE_DIRECTORY") or Path(home) / "benchd")
