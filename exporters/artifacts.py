"""A store of exported files, in folders keyed by everything a file was made from; contents are verified at each use.

    FOLDER/vim_tiny-fp16-onnx-3f2a91c04b7d5e60a1b2c3d4e5f60718/
        model.onnx       the content
        model.onnx.data  its weights, if they are too large for one file
        metadata.json    facts, size, SHA-256, and when and where it was made; touched at each use
    FOLDER/.making/      files being written, or left by a crash
    FOLDER/.locks/       one empty file per key, for flock; removed with its entry

An entry appears complete, by one rename, or not at all. A lock is released when its process ends, for any reason.
"""

import errno
import fcntl
import hashlib
import os
import platform
import re
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
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
    """The artifacts in `folder`, created at the first write; together they take at most `limit_bytes`, if given.

    An artifact returned by a store is in use until the store is closed or its process ends: no store removes it
    meanwhile. A store is for a single thread, and is a context manager that closes it. `notes` lists what was discarded
    as damaged, and why. `read_only` is for a folder with a different owner, which is then left untouched.
    """

    def __init__(self, folder: Path, limit_bytes: int | None = None, *, read_only: bool = False) -> None:
        self._folder = folder
        self._limit_bytes = limit_bytes
        self._read_only = read_only
        self._in_use: list[int] = []
        self.notes: list[str] = []

    def get(self, key: str) -> Artifact | None:
        """Return the artifact if it exists and its contents are intact, else None.

        A damaged artifact is removed, with a line in `notes`. Read access to the folder is enough.
        """
        try:
            return self._verified(key)
        except _DamagedEntry as damage:
            if self._read_only or not os.access(self._folder, os.W_OK):
                self.notes.append(f"{key}: {damage}")
                return None
        # either damaged or being replaced: once the lock is held, it is clear which
        with self._locked(key):
            return self._verified_or_removed(key)

    def put(self, key: str, facts: Mapping[str, Any], writer: Writer) -> Artifact:
        """Return the artifact that `writer(path)` writes, replacing any earlier one.

        `path` does not exist yet; its name ends in the fact "format". If the writer returns a mapping of JSON values,
        it is stored as `measured`. Raises ArtifactError, leaving nothing behind, if the disk is full or not writable,
        and the writer's errors.
        """
        with self._locked(key):
            artifact = self._make(key, facts, writer)
        self._keep_to_limit(facts)
        return artifact

    def produce(self, key: str, facts: Mapping[str, Any], writer: Writer) -> Artifact:
        """Return the artifact, made by `writer` if it does not exist; raises the errors of `put`.

        If another process is making it, this waits for that process and returns its artifact.
        """
        known = len(self.notes)
        artifact = self.get(key)
        if artifact is not None:
            return artifact
        with self._locked(key):
            artifact = self._verified_or_removed(key)
            if artifact is not None:
                return artifact
            produced = self._make(key, facts, writer)
        self._keep_to_limit(facts)
        return msgspec.structs.replace(produced, note="; ".join(self.notes[known:]))

    def list(self) -> tuple[Artifact, ...]:
        """Return the artifacts with readable metadata, sorted by name, without verifying their contents."""
        entries = ((entry, _metadata(entry)) for entry in self._entries())
        return tuple(_artifact(entry, metadata) for entry, metadata in entries if metadata is not None)

    def prune(self, limit_bytes: int, run: str | None = None) -> tuple[str, ...]:
        """Remove the least recently used artifacts until the rest take at most `limit_bytes`; return their keys.

        Artifacts in use stay, as do those that belong to other users and cannot be removed. Leftovers of killed
        processes and entries without metadata or content go first, and so do, with `run`, artifacts restricted to a
        different run.
        """
        with self._explaining():
            self._sweep()
            artifacts = sorted(self.list(), key=lambda artifact: artifact.used_ns)
            total = sum(artifact.metadata.bytes for artifact in artifacts)
            removed = []
            for artifact in artifacts:
                is_left = run is not None and artifact.metadata.facts.get(_RUN, run) != run
                if (is_left or total > limit_bytes) and self._remove_unused(artifact):
                    removed.append(artifact.key)
                    total -= artifact.metadata.bytes
            return tuple(removed)

    def close(self) -> None:
        """Release the artifacts in use; their files stay until the space is needed."""
        while self._in_use:
            os.close(self._in_use.pop())

    def __enter__(self) -> "ArtifactStore":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _verified(self, key: str) -> Artifact | None:
        """Return the artifact, marked as in use, or None if there is none; raise _DamagedEntry."""
        entry = self._entry(key)
        if not entry.is_dir():
            return None
        metadata = _metadata(entry)
        if metadata is None:
            raise _DamagedEntry("its metadata cannot be read")
        artifact = _artifact(entry, metadata)
        fd = _opened(artifact.path)
        try:
            fcntl.flock(fd, fcntl.LOCK_SH)
            _require_content(artifact.path, metadata)
            if not _is_at(fd, artifact.path):
                raise _DamagedEntry("it was removed during reading")
        except BaseException:
            os.close(fd)
            raise
        self._in_use.append(fd)
        if not self._read_only:
            with suppress(OSError):  # a read-only folder does not record the last use
                os.utime(entry / _METADATA)
        return artifact

    def _verified_or_removed(self, key: str) -> Artifact | None:
        """Call `_verified` while holding the lock, and remove a damaged entry."""
        try:
            return self._verified(key)
        except _DamagedEntry as damage:
            self.notes.append(f"{key}: {damage}; removed")
            with self._explaining():
                shutil.rmtree(self._entry(key))
            return None

    def _make(self, key: str, facts: Mapping[str, Any], writer: Writer) -> Artifact:
        if key != key_of(facts):
            raise ValueError(f"{key} is not the key of these facts, which is {key_of(facts)}")
        scratch = self._folder / ".making" / key
        path = scratch / _file_name(facts)
        with self._removing(scratch):
            scratch.mkdir(parents=True)
            written = writer(path)
            self._require_one_file(path)
            fd = _opened(path)
            self._in_use.append(fd)
            # the lock moves with the renamed file, so that no process removes the new entry
            fcntl.flock(fd, fcntl.LOCK_SH)
            metadata = _describe(path, facts, written if isinstance(written, Mapping) else {})
            (scratch / _METADATA).write_bytes(msgspec.json.format(msgspec.json.encode(metadata)))
            for part in (scratch / _METADATA, *parts(path)):
                sync(part)
            sync(scratch)
            entry = self._entry(key)
            if entry.exists():
                shutil.rmtree(entry)
            scratch.rename(entry)
            sync(self._folder)
        return msgspec.structs.replace(_artifact(entry, metadata), reused=False)

    def _require_one_file(self, path: Path) -> None:
        names = sorted(file.name for file in path.parent.iterdir())
        is_known = names in ([path.name], [path.name, f"{path.name}{DATA}"])
        if not is_known or path.is_symlink() or not path.is_file() or not path.stat().st_size:
            raise ArtifactError(f"the exporter wrote {', '.join(names) or 'nothing'}, instead of one file {path.name}")

    @contextmanager
    def _removing(self, scratch: Path) -> Iterator[None]:
        """Remove `scratch` before the block and after an error; report a full disk with the size needed."""
        shutil.rmtree(scratch, ignore_errors=True)  # left by a killed process, because we hold the lock
        try:
            yield
        except BaseException as error:
            written = sum(file.stat().st_size for file in scratch.glob("*"))
            shutil.rmtree(scratch, ignore_errors=True)
            if _disk_full(error):
                self._refuse_full(written, error)
            if isinstance(error, OSError) and str(error.filename or "").startswith(str(self._folder)):
                self._refuse(error)
            raise

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

    @contextmanager
    def _locked(self, key: str, *, wait: bool = True) -> Iterator[bool]:
        """Hold the key's lock during a block; yield whether it was acquired: without `wait`, that may fail."""
        path = self._entry(key).parent / ".locks" / key
        with self._explaining() if wait else nullcontext():
            path.parent.mkdir(parents=True, exist_ok=True)
            fd, free = _lock(path, wait=wait)
        try:
            yield free
        finally:
            os.close(fd)

    def _keep_to_limit(self, facts: Mapping[str, Any]) -> None:
        if self._limit_bytes is not None:
            self.prune(self._limit_bytes, facts.get(_RUN))

    def _sweep(self) -> None:
        for path in [*(self._folder / ".making").glob("*"), *self._entries()]:
            with suppress(PermissionError), self._locked(path.name, wait=False) as free:
                # unless locked, the entry may be being replaced by another process
                if free and not (path.parent == self._folder and _is_whole(path)):
                    shutil.rmtree(path, ignore_errors=True)

    def _remove_unused(self, artifact: Artifact) -> bool:
        with suppress(PermissionError), self._locked(artifact.key, wait=False) as free:
            if not free:
                return False
            try:
                fd = os.open(artifact.path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
            except FileNotFoundError:  # removed by another process since it was listed
                return True
            try:
                unused = _flocked(fd, fcntl.LOCK_EX, wait=False)
                if unused:
                    shutil.rmtree(artifact.path.parent)
                    (self._folder / ".locks" / artifact.key).unlink(missing_ok=True)
                return unused
            finally:
                os.close(fd)
        return False

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


def _is_whole(entry: Path) -> bool:
    """Return whether an entry has its metadata and its content, without verifying the content."""
    metadata = _metadata(entry)
    content = entry / _file_name(metadata.facts) if metadata else entry
    return content.is_file() and not content.is_symlink()


def _artifact(entry: Path, metadata: Metadata) -> Artifact:
    try:
        used_ns = (entry / _METADATA).stat().st_mtime_ns
    except FileNotFoundError:
        used_ns = 0
    return Artifact(key=entry.name, path=entry / _file_name(metadata.facts), metadata=metadata, used_ns=used_ns)


def _opened(path: Path) -> int:
    try:
        # non-blocking, in case it is a named pipe
        return os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError as error:
        raise _DamagedEntry(f"its content cannot be opened: {error.strerror}") from error


def _require_content(path: Path, metadata: Metadata) -> None:
    files = parts(path)
    size = sum(part.stat().st_size for part in files)
    if size != metadata.bytes:
        raise _DamagedEntry(f"it has {size} bytes, not {metadata.bytes}")
    if sha256_of(*files) != metadata.sha256:
        raise _DamagedEntry("its bytes have changed since it was written (SHA-256)")


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


def _is_at(fd: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(fd), path.stat())
    except FileNotFoundError:
        return False


def _lock(path: Path, *, wait: bool) -> tuple[int, bool]:
    """Return the open lock file, and whether the lock was acquired."""
    while True:
        # opened read-only, which suffices for flock: the lock file of another group member may be read-only
        fd = os.open(path, os.O_RDONLY | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o666)
        free = _flocked(fd, fcntl.LOCK_EX, wait=wait)
        if not free or _is_at(fd, path):
            return fd, free
        os.close(fd)  # removed by the process that held it: open a new file


def _flocked(fd: int, operation: int, *, wait: bool) -> bool:
    try:
        fcntl.flock(fd, operation if wait else operation | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


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
