"""Children that lack packages which are installed here, as on a board."""

import sys


def environment(folder, *packages):
    """Return the variables by which a child finds what this process does, but for `packages`; `folder` is its own."""
    lines = [f"sys.modules[{name!r}] = None" for name in packages]
    (folder / "sitecustomize.py").write_text("\n".join(["import sys", *lines]))
    return {"PYTHONPATH": ":".join([str(folder), *sys.path])}
