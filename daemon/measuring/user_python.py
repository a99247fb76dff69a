"""Inspects a user's Python file without running it: what it defines and imports."""

import ast
from collections.abc import Iterator
from pathlib import Path

from benchd.daemon.errors import UsageError

# a file that uses any of these may define names that do not appear in it
_DYNAMIC = {"*", "__getattr__", "exec", "globals", "locals", "setattr", "vars"}


def refuse(path: Path, function: str, option: str = "--module") -> None:
    """Raise UsageError if an option's file is not Python or does not define `function`."""
    option = f"{option} {path}:{function}"
    try:
        tree = ast.parse(path.read_bytes())
    except (SyntaxError, ValueError) as error:  # ValueError if the file is not text
        line = f":{error.lineno}" if isinstance(error, SyntaxError) else ""
        raise UsageError(f"{option}: {path.name}{line}: {error}") from error
    if not {function, *_DYNAMIC} & set(_names(tree)):
        raise UsageError(f"{option}: {path.name} has no {function!r}")


def imports(path: Path) -> set[str]:
    """Return the top-level names that a Python file may import, except by relative imports."""
    nodes = list(ast.walk(ast.parse(path.read_bytes())))
    names = [alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names]
    names += [node.module for node in nodes if isinstance(node, ast.ImportFrom) and node.module and not node.level]
    return {name.partition(".")[0] for name in names}


def _names(tree: ast.Module) -> Iterator[str]:
    """Yield every name that the file may bind, and every name that it reads."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Name):
            yield node.id
        elif isinstance(node, ast.Attribute):
            yield node.attr
        elif isinstance(node, ast.alias):
            yield node.asname or node.name
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name
