"""A store of exported files, in folders keyed by everything a file was made from; contents are verified at each use.

    FOLDER/vim_tiny-fp16-onnx-3f2a91c04b7d5e60a1b2c3d4e5f60718/
        model.onnx       the content
        model.onnx.data  its weights, if they are too large for one file
        metadata.json    facts, size, SHA-256, and when and where it was made; touched at each use
    FOLDER/.making/      files being written, or left by a crash

An entry appears complete, by one rename, or not at all. If two processes make the same one, the later one stays.
"""

import errno
import hashlib
import os
import platform
import re
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, NoReturn

import msgspec

from benchd.daemon.machine.folders import sync
from benchd.exporters import code

SCHEMA = "benchd.artifact/1"
DATA = ".data"
"""Suffix of a separate weights file, after the name of the file that it belongs to."""
Writer = Callable[[Path], object]

_METADATA = "metadata.json"
_LABELS = ("model", "precision", "format")  # the facts at the start of a key, if given
_KEY = re.compile(r"[A-Za-z0-9_.]+(-[A-Za-z0-9_.]+)*-[0-9a-f]{32}")
_DISTRIBUTIONS = ("benchd", "torch", "onnx", "onnxscript", "onnxruntime", "tensorrt")
_FULL = (errno.ENOSPC, errno.EDQUOT)
_PIECE = 2**20
_RUN = "suite_id"  # the fact that restricts an artifact to a single run
_IN_USE_S = 3600  # a process opens an artifact within this time after it was returned
_LEFT_S = 86400  # no artifact takes this long to write


class ArtifactError(Exception):
    """The store is unusable, or an artifact cannot be made; the message names the folder and a remedy."""


class Metadata(msgspec.Struct, frozen=True, kw_only=True):
    """An artifact's metadata: `facts` determine its key, and `measured` was returned by its writer."""

    schema: str = SCHEMA
    bytes: int
    sha256: str
    made_at: str
    made_on: str
    versions: dict[str, str]
    facts: dict[str, Any]
    measured: dict[str, Any] = {}


class Artifact(msgspec.Struct, frozen=True, kw_only=True):
    """A file in the store. `reused` is set if it already existed; `note` says why an earlier one was discarded."""

    key: str
    path: Path
    metadata: Metadata
    used_ns: int  # Unix time of the last use
    reused: bool = True
    note: str = ""


class _DamagedEntry(Exception):
    """An entry exists but is damaged; the message says how."""


def key_of(facts: Mapping[str, Any]) -> str:
    """Return the name of the artifact with these facts: readable labels, then a hash of all facts.

    Facts are JSON values in any order. "model", "precision" and "format" are the labels.
    """
    labels = [re.sub(r"[^A-Za-z0-9_.]+", "_", str(facts[name]))[:40] for name in _LABELS if facts.get(name)]
    digest = hashlib.sha256(msgspec.json.encode(facts, order="deterministic")).hexdigest()[:32]
    return "-".join([*(labels or ["artifact"]), digest])


class ArtifactStore:
    """The artifacts in `folder`, created at the first write.

    Those that were not used in the last hour take at most `limit_bytes`, if given, less the size of the others. `notes`
    lists what was discarded as damaged, and why. `read_only` is for a folder with a different owner, which is then left
    untouched.
    """

    def __init__(self, folder: Path, limit_bytes: int | None = None, *, read_only: bool = False) -> None:
        self._folder = folder
        self._limit_bytes = limit_bytes
        self._read_only = read_only
        self.notes: list[str] = []

    def get(self, key: str) -> Artifact | None:
        """Return the artifact if it exists and its contents are intact, else None.

        A damaged artifact is removed, with a line in `notes`. Read access to the folder is enough.
        """
        entry = self._entry(key)
        if not entry.is_dir():
            return None
        try:
            artifact = _verified(entry)
        except _DamagedEntry as damage:
            is_kept = self._read_only or not os.access(self._folder, os.W_OK)
            self.notes.append(f"{key}: {damage}{'' if is_kept else '; removed'}")
            if not is_kept:
                with self._explaining():
                    shutil.rmtree(entry)
            return None
        if not self._read_only:
            with suppress(OSError):  # a read-only folder does not record the last use
                os.utime(entry / _METADATA)
        return artifact

    def put(self, facts: Mapping[str, Any], writer: Writer) -> Artifact:
        """Return the artifact that `writer(path)` writes, replacing any earlier one.

        `path` does not exist yet; its name ends in the fact "format". If the writer returns a mapping of JSON values,
        it is stored as `measured`. Raises ArtifactError, leaving nothing behind, if the disk is full or not writable,
        and the writer's errors.
        """
        entry = self._entry(key_of(facts))
        with self._scratch(entry.name) as scratch:
            new = scratch / "new"
            new.mkdir()
            path = new / _file_name(facts)
            written = writer(path)
            _require_one_file(path)
            metadata = _describe(path, facts, written if isinstance(written, Mapping) else {})
            (new / _METADATA).write_bytes(msgspec.json.format(msgspec.json.encode(metadata)))
            for part in (new / _METADATA, *parts(path), new):
                sync(part)
            with suppress(FileNotFoundError):
                entry.rename(scratch / "old")
            new.rename(entry)
            sync(self._folder)
        if self._limit_bytes is not None:
            self.prune(self._limit_bytes, facts.get(_RUN), unused_s=_IN_USE_S)
        return msgspec.structs.replace(_artifact(entry, metadata), reused=False)

    def produce(self, facts: Mapping[str, Any], writer: Writer) -> Artifact:
        """Return the artifact, made by `writer` if it does not exist; raises the errors of `put`."""
        known = len(self.notes)
        artifact = self.get(key_of(facts))
        if artifact is not None:
            return artifact
        return msgspec.structs.replace(self.put(facts, writer), note="; ".join(self.notes[known:]))

    def list(self) -> tuple[Artifact, ...]:
        """Return the artifacts with readable metadata, sorted by name, without verifying their contents."""
        entries = ((entry, _metadata(entry)) for entry in self._entries())
        return tuple(_artifact(entry, metadata) for entry, metadata in entries if metadata is not None)

    def prune(self, limit_bytes: int, run: str | None = None, unused_s: float = 0) -> tuple[str, ...]:
        """Remove the least recently used artifacts until the rest take at most `limit_bytes`; return their keys.

        Artifacts used in the last `unused_s` seconds stay, as do those that belong to other users and cannot be
        removed. Leftovers of killed processes and entries without metadata go first, and so do, with `run`, artifacts
        restricted to a different run.
        """
        with self._explaining():
            for leftover in self._leftovers():
                _removed(leftover)
            artifacts = sorted(self.list(), key=lambda artifact: artifact.used_ns)
            total = sum(artifact.metadata.bytes for artifact in artifacts)
            removed = []
            for artifact in artifacts:
                is_left = run is not None and artifact.metadata.facts.get(_RUN, run) != run
                is_over = total > limit_bytes and time.time() - artifact.used_ns / 1e9 >= unused_s
                if (is_left or is_over) and _removed(artifact.path.parent):
                    removed.append(artifact.key)
                    total -= artifact.metadata.bytes
            return tuple(removed)

    @contextmanager
    def _scratch(self, key: str) -> Iterator[Path]:
        """Yield a folder that exists during the block; report a full disk with the size needed."""
        making = self._folder / ".making"
        with self._explaining():
            making.mkdir(parents=True, exist_ok=True)
            scratch = Path(tempfile.mkdtemp(prefix=key, dir=making))
        try:
            yield scratch
        except BaseException as error:
            written = sum(file.stat().st_size for file in scratch.rglob("*"))
            shutil.rmtree(scratch, ignore_errors=True)  # so that the disk's free space is known
            if _disk_full(error):
                self._refuse_full(written, error)
            if isinstance(error, OSError) and str(error.filename or "").startswith(str(self._folder)):
                self._refuse(error)
            raise
        finally:
            shutil.rmtree(scratch, ignore_errors=True)

    def _refuse_full(self, written: int, error: BaseException) -> NoReturn:
        needed = max(written, shutil.disk_usage(self._folder).free) / 1e6
        raise ArtifactError(
            f"artifact store {self._folder}: disk full, and this artifact needs more than {needed:.1f} MB; free some "
            "space, delete old ones with `benchd export --prune`, or choose a different folder"
        ) from error

    def _refuse(self, error: OSError) -> NoReturn:
        remedy = "free some space" if error.errno in _FULL else "check that it can be written"
        raise ArtifactError(f"artifact store {self._folder}: {error.strerror or error}; {remedy}") from error

    @contextmanager
    def _explaining(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            self._refuse(error)

    def _leftovers(self) -> Iterator[Path]:
        for path in (self._folder / ".making").glob("*"):
            with suppress(FileNotFoundError):  # it has just been finished
                if time.time() - path.stat().st_mtime > _LEFT_S:
                    yield path
        yield from (entry for entry in self._entries() if _metadata(entry) is None)

    def _entries(self) -> Iterator[Path]:
        """Yield the folders of entries, complete or not, and ignore everything else."""
        if self._folder.is_dir():
            yield from (path for path in sorted(self._folder.iterdir()) if _KEY.fullmatch(path.name))

    def _entry(self, key: str) -> Path:
        if not _KEY.fullmatch(key):
            raise ValueError(f"{key!r} is not a key of the artifact store")
        return self._folder / key


def _file_name(facts: Mapping[str, Any]) -> str:
    return "model." + re.sub(r"[^a-z0-9]+", "", str(facts.get("format", "bin")).lower())


def _metadata(entry: Path) -> Metadata | None:
    """Return an entry's metadata if it is readable and belongs to this entry."""
    try:
        metadata = msgspec.json.decode((entry / _METADATA).read_bytes(), type=Metadata)
    except (OSError, msgspec.MsgspecError):
        return None
    ours = metadata.schema == SCHEMA and key_of(metadata.facts) == entry.name
    return metadata if ours else None


def _artifact(entry: Path, metadata: Metadata) -> Artifact:
    try:
        used_ns = (entry / _METADATA).stat().st_mtime_ns
    except FileNotFoundError:  # another process has just removed it
        used_ns = 0
    return Artifact(key=entry.name, path=entry / _file_name(metadata.facts), metadata=metadata, used_ns=used_ns)


def _verified(entry: Path) -> Artifact:
    """Return the artifact in this folder; raise _DamagedEntry unless its contents are intact."""
    metadata = _metadata(entry)
    if metadata is None:
        raise _DamagedEntry("its metadata cannot be read")
    artifact = _artifact(entry, metadata)
    try:
        _require_content(artifact.path, metadata)
    except OSError as error:
        raise _DamagedEntry(f"its content cannot be read: {error.strerror}") from error
    return artifact


def _require_content(path: Path, metadata: Metadata) -> None:
    files = parts(path)
    size = sum(part.stat().st_size for part in files)
    if size != metadata.bytes:
        raise _DamagedEntry(f"it has {size} bytes, not {metadata.bytes}")
    if sha256_of(*files) != metadata.sha256:
        raise _DamagedEntry("its bytes have changed since it was written (SHA-256)")


def _require_one_file(path: Path) -> None:
    names = sorted(file.name for file in path.parent.iterdir())
    is_known = names in ([path.name], [path.name, f"{path.name}{DATA}"])
    if not is_known or path.is_symlink() or not path.is_file() or not path.stat().st_size:
        raise ArtifactError(f"the exporter wrote {', '.join(names) or 'nothing'}, instead of one file {path.name}")


def _removed(folder: Path) -> bool:
    """Remove the folder; return whether it is gone, which another user's may not be."""
    with suppress(FileNotFoundError, PermissionError):
        shutil.rmtree(folder)
    return not folder.exists()


def parts(path: Path) -> list[Path]:
    """Return the files of an artifact: its own and, if present, its separate weights file."""
    data = path.with_name(path.name + DATA)
    return [path, data] if data.exists() else [path]


def given(path: Path, beside: Sequence[Path] = (), **facts: str) -> Artifact:
    """Return a file outside any store, with the files `beside` it, as an artifact made when it was written."""
    made_at = datetime.fromtimestamp(path.stat().st_mtime, timezone.utc).isoformat(timespec="seconds")
    files = [path, *beside]
    size, sha256 = sum(part.stat().st_size for part in files), sha256_of(*files)
    metadata = Metadata(bytes=size, sha256=sha256, made_at=made_at, made_on="", versions={}, facts=facts)
    return Artifact(key=path.name, path=path, metadata=metadata, used_ns=0)


def sha256_of(*paths: Path, beat: Callable[[], None] = lambda: None) -> str:
    """Return the hex SHA-256 of the concatenated files; `beat` is called for each piece read."""
    digest = hashlib.sha256()
    for path in paths:
        with path.open("rb", buffering=0) as file:
            while piece := file.read(_PIECE):
                digest.update(piece)
                beat()
    return digest.hexdigest()


def _describe(path: Path, facts: Mapping[str, Any], measured: Mapping[str, Any]) -> Metadata:
    files = parts(path)
    return Metadata(
        bytes=sum(part.stat().st_size for part in files),
        sha256=sha256_of(*files),
        made_at=datetime.now(timezone.utc).isoformat(timespec="seconds"),
        made_on=_machine(),
        versions={"python": platform.python_version()} | code.versions(*_DISTRIBUTIONS),
        facts=dict(facts),
        measured=dict(measured),
    )


def _machine() -> str:
    """Return the board's name if known, else the machine's architecture."""
    try:
        return Path("/proc/device-tree/model").read_bytes().decode(errors="replace").strip("\0\n ")
    except OSError:
        return f"{platform.system()} {platform.machine()}"


def _disk_full(error: BaseException | None) -> bool:
    """Return whether a full disk caused the error, possibly wrapped in others."""
    while error is not None:
        if isinstance(error, OSError) and error.errno in _FULL:
            return True
        error = error.__cause__ or error.__context__
    return False
