"""How this benchd was installed, and so the line that adds one of its extras."""

import json
import shlex
import sys
from importlib.metadata import distributions
from pathlib import Path
from urllib.parse import unquote, urlsplit


def adding(extra: str) -> str:
    """Return the command that adds this extra here: by pip, pipx or uv, from the checkout, the wheel or an index."""
    distribution = next(iter(distributions(name="benchd")), None)
    origin = json.loads((distribution and distribution.read_text("direct_url.json")) or "{}")
    url = urlsplit(origin.get("url", ""))
    where = unquote(url.path) if url.scheme == "file" else "benchd"
    what = ["-e"] * bool(origin.get("dir_info", {}).get("editable")) + [f"{where}[{extra}]"]
    if (Path(sys.prefix) / "pipx_metadata.json").exists():
        return shlex.join(["pipx", "install", "--force", *what])
    if (Path(sys.prefix) / "uv-receipt.toml").exists():
        return shlex.join(["uv", "tool", "install", "--force", *what])
    if not any(distributions(name="pip")):  # to find its spec would have setuptools put the old distutils in place
        return shlex.join(["uv", "pip", "install", "--python", sys.executable, *what])
    return shlex.join([sys.executable, "-m", "pip", "install", *what])
