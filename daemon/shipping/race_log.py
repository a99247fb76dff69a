"""The processes that a race has measured, kept between starts of the command: one synced line each."""

import hashlib
import os
from collections.abc import Sequence
from contextlib import closing, suppress
from pathlib import Path
from typing import Literal

import msgspec

from benchd.daemon.errors import UsageError
from benchd.daemon.journal import Journal
from benchd.daemon.machine import folders
from benchd.daemon.machine.environment import variables
from benchd.daemon.measuring.plan import PlannedCase
from benchd.daemon.measuring.protocol import Outcome
from benchd.daemon.records import Environment, UserFile, UserModule, file_of
from benchd.exporters import code
from benchd.exporters.artifacts import sha256_of

Phase = Literal["race", "confirm"]


class LoggedProcess(msgspec.Struct, frozen=True):
    """One process: its case, phase, total duration in seconds and outcome."""

    case_id: str
    phase: Phase
    seconds: float
    outcome: Outcome


class _Header(msgspec.Struct, frozen=True):
    digest: str


class RaceLog:
    """The log of one race in `path`; a log with a different `digest` is replaced, which sets `is_other`."""

    def __init__(self, path: Path, digest: str) -> None:
        lines = _read(path)
        self.is_other = lines is not None and lines[0] != digest
        self.entries: list[LoggedProcess] = lines[1] if lines and not self.is_other else []
        self._path, self._digest = path, digest
        if lines is None or self.is_other:
            self._begin()

    def clear(self) -> None:
        """Start over with an empty log."""
        self.is_other, self.entries = True, []
        self._begin()

    def add(self, entry: LoggedProcess) -> None:
        """Append an entry; it is on disk once this returns."""
        self._append(entry)
        self.entries.append(entry)

    def _begin(self) -> None:
        self._path.unlink(missing_ok=True)
        self._append(_Header(self._digest))

    def _append(self, line: _Header | LoggedProcess) -> None:
        with closing(Journal(self._path)) as written:
            written.append(msgspec.json.encode(line))


def _read(path: Path) -> tuple[str, list[LoggedProcess]] | None:
    """Return a log's digest and entries, without a line that a crash truncated; None if there is no log."""
    if not path.exists():
        return None
    if not path.is_file():
        raise UsageError(f"{path}: not a regular file; move it away")
    first, *rest = path.read_bytes().split(b"\n")
    try:
        header = msgspec.json.decode(first, type=_Header)
    except msgspec.MsgspecError:
        return None
    decoder, entries = msgspec.json.Decoder(LoggedProcess), list[LoggedProcess]()
    for line in rest:
        with suppress(msgspec.MsgspecError):  # truncated by a crash: that process is measured again
            entries.append(decoder.decode(line))
    return header.digest, entries


def digest(planned: Sequence[PlannedCase], environment: Environment, device_id: str) -> str:
    """Return a digest that must be equal in two races for one to continue with the other's processes.

    It includes the cases with their limits, the contents of every file on the command line, the list of images, the
    machine with its versions, and the environment variables, which the fingerprint includes only after a worker has
    run.
    """
    cases = [
        (entry.case, entry.limits, entry.inputs, _files(entry), _images(entry), entry.own and entry.own.inputs)
        for entry in planned
    ]
    facts = (cases, environment.fingerprint, device_id, code.sha256(), variables(os.environ, {}))
    return hashlib.sha256(msgspec.json.encode(facts, order="deterministic")).hexdigest()


def _files(planned: PlannedCase) -> dict[str, str]:
    """Return the hash of each file that the case reads, by path."""
    own, inputs = planned.own, planned.inputs
    named = [
        inputs.weights or "",
        inputs.labels or "",
        file_of(inputs.samples or ""),
        file_of(inputs.metric or ""),
        own.path if isinstance(own, UserFile) else "",
    ]
    named += [own.where] if isinstance(own, UserModule) and not own.folder else []
    return {name: sha256_of(Path(name)) for name in named if Path(name).is_file()}


def _images(planned: PlannedCase) -> list[tuple[str, int, int]]:
    """Return name, size and modification time of each of the case's images, because reading them would take minutes."""
    folder = (planned.inputs.data or "").partition(":")[2]
    return folders.listed(Path(folder)) if folder else []
