"""Finds out how this benchd was installed, and the command that adds an extra to it."""

import json
import shlex
import sys
from importlib.metadata import distributions
from pathlib import Path
from urllib.parse import unquote, urlsplit


def adding(extra: str) -> str:
    """Return the command that adds this extra here: with pip, pipx or uv, from the checkout, the wheel or an index."""
    distribution = next(iter(distributions(name="benchd")), None)
    origin = json.loads((distribution and distribution.read_text("direct_url.json")) or "{}")
    url = urlsplit(origin.get("url", ""))
    where = unquote(url.path) if url.scheme == "file" else "benchd"
    arguments = ["-e"] * bool(origin.get("dir_info", {}).get("editable")) + [f"{where}[{extra}]"]
    if (Path(sys.prefix) / "pipx_metadata.json").exists():
        return shlex.join(["pipx", "install", "--force", *arguments])
    if (Path(sys.prefix) / "uv-receipt.toml").exists():
        return shlex.join(["uv", "tool", "install", "--force", *arguments])
    if not has_pip():
        return shlex.join(["uv", "pip", "install", "--python", sys.executable, *arguments])
    return shlex.join([sys.executable, "-m", "pip", "install", *arguments])


def has_pip() -> bool:
    """Return whether pip is installed; find_spec("pip") would make setuptools restore the old distutils."""
    return any(distributions(name="pip"))
