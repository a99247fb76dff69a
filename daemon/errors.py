"""The exceptions of benchd; each message says what is wrong and what to do next.

BenchdError ├── UsageError an invalid command line or configuration (exit code 2) │ └── Full the disk is full or failing
├── NotAvailable something requested by name is not available (exit code 7) ├── Unsupported a case cannot run on this
machine; becomes a Record with this reason ├── UnfitModel a user's model cannot be measured as is; becomes a Record with
this reason └── SchemaError a record with a different schema, or data that is not a record
"""

import difflib
import importlib.util
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from benchd.daemon.machine.installed import adding

EXIT_CODES = (130, 2, 7, 6, 1, 5, 3, 4)
"""The exit codes of measurements; if several apply, the first counts."""


class BenchdError(Exception):
    """The base of all errors shown to a user as one line, without a traceback."""


class UsageError(BenchdError):
    """An invalid command line or configuration."""


class Full(UsageError):
    """The disk is full or failing."""


class NotAvailable(BenchdError):
    """Something requested by name is not available."""


class Unsupported(BenchdError):
    """A case cannot run on this machine or in this version; the message is the reason in its Record."""


class UnfitModel(BenchdError):
    """A user's model cannot be measured unchanged; the message says what to change."""


class SchemaError(BenchdError):
    """A record with a different major version of the schema, or bytes that are not a record."""


def unknown(kind: str, value: str, known: Iterable[str]) -> UsageError:
    """Return the error for an unknown name, with the valid names and the closest one."""
    names = list(known)
    close = difflib.get_close_matches(value, names, n=1)
    hint = f"; did you mean {close[0]!r}?" if close else "."
    return UsageError(f"unknown {kind} {value!r}{hint} Valid: {', '.join(names)}")


def require_measure() -> None:
    """Raise NotAvailable if a package of the extra `measure`, which measuring requires, is missing."""
    for package in ("torch", "torchvision", "numpy", "safetensors"):
        if importlib.util.find_spec(package) is None:
            raise NotAvailable(
                f"measuring needs {package}, which is not installed: {adding('cpu')}; use [gpu] instead for an "
                "NVIDIA GPU, or [jetson] on a Jetson"
            )


@contextmanager
def needing(extra: str) -> Iterator[None]:
    """Convert a package that the block lacks to NotAvailable, with the command that installs its extra."""
    try:
        yield
    except ModuleNotFoundError as error:
        raise NotAvailable(f"{error.name} is not installed: {adding(extra)}") from None
