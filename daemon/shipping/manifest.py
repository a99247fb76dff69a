"""The folder written by `benchd ship` and its manifest: what is deployed, from which bytes, and what was promised.

    DIR/manifest.json      the manifest: `benchd.shipped/1`, with its schema in docs/manifest.schema.json
    DIR/manifest.sha256    its SHA-256, in the format of `sha256sum -c`
    DIR/LOAD.md            instructions for loading and running the model
    DIR/golden.npz         a few inputs and their float64 answers
    DIR/inputs/            the measured inputs, unless they are drawn
    DIR/records.jsonl      the measurements; the last record contains the processes that made the promise
    DIR/...                the files that the runtime reads

Every other file is a resource with its size and SHA-256; files that are unlisted or not regular are rejected. Hashes
stored next to the files reveal damage, but prove no origin: a folder that runs code when loaded is loaded only if the
same user made it on this machine or explicitly trusts it.
"""

import hashlib
import re
import stat
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

import msgspec
from msgspec import Struct

from benchd.daemon.errors import UsageError
from benchd.daemon.machine import folders
from benchd.daemon.measuring.protocol import Golden, Tensor
from benchd.daemon.records import Case, Environment, InputSpec, OptionValue, Record
from benchd.daemon.verdicts import figures, recommend
from benchd.daemon.verdicts.results import process_medians_ms
from benchd.exporters import aoti
from benchd.exporters.artifacts import sha256_of

T = TypeVar("T")

SCHEMA = "benchd.shipped/1"
MANIFEST, DIGEST, GOLDEN, LOAD = "manifest.json", "manifest.sha256", "golden.npz", "LOAD.md"
INPUTS = "inputs"
WEIGHTS, ONNX, CODE = "weights.safetensors", "model.onnx", "code"
PLAN, TIMINGS, PACKAGE = "model.plan", "timing.cache", "model.pt2"
NOT_GOLDEN = "its answers differ from the golden ones"
"""The prefix of a process's reason if its golden answers differ."""

JUMPING_SHARE = 0.25
"""The share of images that may be off in a network with thresholds, where an early spike shifts thousands of others."""

REBUILT = "rebuilt, because "
"""The prefix of a runtime's note on why a plan or a package was rebuilt."""


class ShipLimits(Struct, frozen=True, kw_only=True):
    """The limits given to `benchd ship`; None means no limit. `min_effect` is the smallest difference that counts."""

    max_latency_ms: float | None = None
    max_energy_j: float | None = None
    max_memory_bytes: float | None = None
    max_power_w: float | None = None
    rate_hz: float | None = None
    min_agreement: float | None = None
    max_accuracy_drop: float | None = None
    min_effect: float = 0.01


class Resource(Struct, frozen=True):
    """A file in the folder: its path in the folder, its size and the SHA-256 of its contents."""

    name: str
    bytes: int
    sha256: str


class PromisedResults(Struct, frozen=True, kw_only=True):
    """The results of the winner's fresh processes; values that were not measured are null.

    `processes_ms` are the medians from which the interval of `latency_ms` was computed, each for one run of a whole
    batch.
    """

    processes_ms: list[float]
    latency_ms: float
    low_ms: float | None
    high_ms: float | None
    p99_ms: float | None = None
    energy_per_inference_j: float | None = None
    energy_error_share: float | None = None
    memory_bytes: int | None = None
    agreement: str = ""
    accuracy: float | None = None


class Manifest(Struct, frozen=True, kw_only=True):
    """The description of a deployed model. `asked` contains the limits that it met; it was measured in `environment`.

    `read` describes the inputs of one item, in the format of `--input`; `device` describes the machine.
    """

    schema: str = SCHEMA
    name: str
    created: str
    tool_version: str
    case: Case
    options: dict[str, OptionValue]
    read: list[InputSpec] = []
    inputs: list[Tensor]
    outputs: list[Tensor]
    preprocessing: str
    entry: str = ""
    provider: str = ""
    packages: dict[str, str]
    weights_sha256: str
    golden: Golden
    asked: dict[str, float | None]
    promised: PromisedResults
    against: str = ""
    device: str
    device_id: str
    environment: Environment
    resources: list[Resource]

    @property
    def runs_code(self) -> bool:
        """Return whether loading the folder runs Python code from it."""
        return any(resource.name.startswith(f"{CODE}/") for resource in self.resources)

    @property
    def program(self) -> str:
        """Return the name of the TensorRT plan or AOTInductor package, which also contains code; empty without one."""
        return next((resource.name for resource in self.resources if resource.name in {PLAN, PACKAGE}), "")


def encode(manifest: Manifest) -> bytes:
    """Return the manifest as the contents of its file."""
    return msgspec.json.format(msgspec.json.encode(manifest)) + b"\n"


def write(folder: Path, manifest: Manifest) -> Manifest:
    """Write the manifest, with every other file as a resource, and its digest into the folder; return the manifest."""
    manifest = msgspec.structs.replace(manifest, resources=resources(folder))
    content = encode(manifest)
    (folder / MANIFEST).write_bytes(content)
    (folder / DIGEST).write_bytes(_digest(content))
    return manifest


def _digest(content: bytes) -> bytes:
    return f"{hashlib.sha256(content).hexdigest()}  {MANIFEST}\n".encode()


def resources(folder: Path) -> list[Resource]:
    """Return every file below the folder except the manifest and its digest."""
    own = folder / MANIFEST, folder / DIGEST
    files = sorted(path for path in folder.rglob("*") if path.is_file() and path not in own)
    return [Resource(str(path.relative_to(folder)), path.stat().st_size, sha256_of(path)) for path in files]


def read(folder: Path, beat: Callable[[], None] = lambda: None) -> Manifest:
    """Return a folder's manifest after checking that all files are intact, without loading or running any of them.

    `beat` is called repeatedly in the meantime, because large files take minutes.

    Raises UsageError, in one sentence, for a newer schema or a missing, changed or unlisted file.
    """
    path, digest = folder / MANIFEST, folder / DIGEST
    if not path.is_file() or path.is_symlink():
        raise UsageError(f"{folder}: no {MANIFEST}; give a folder written by benchd ship")
    content = path.read_bytes()
    if not digest.is_file() or digest.read_bytes() != _digest(content):
        raise UsageError(f"{folder}: {MANIFEST} does not match {DIGEST}; ship it again or copy the whole folder")
    schema = _decoded(folder, content, _Schema).schema
    if schema != SCHEMA:
        raise UsageError(f"{folder}: its schema is {schema[:40]!r}, and this benchd reads {SCHEMA}: use a newer benchd")
    manifest = _decoded(folder, content, Manifest)
    _refuse_damage(folder, manifest.resources, beat)
    if manifest.program == PACKAGE:
        aoti.read(folder / PACKAGE)
    return manifest


def promised(record: Record) -> PromisedResults:
    """Return the promise in the record of the winner's fresh processes; the record must contain a time."""
    timing, energy = record.timing, record.energy
    if timing is None:
        raise UsageError(f"{record.case_id} was not timed, so there is no time to promise")
    return PromisedResults(
        processes_ms=process_medians_ms([record]),
        latency_ms=timing.median_ms,
        low_ms=timing.low_ms,
        high_ms=timing.high_ms,
        p99_ms=timing.p99_ms,
        energy_per_inference_j=energy.gross_per_inference_j if energy else None,
        energy_error_share=figures.energy_error_share(energy),
        memory_bytes=figures.memory_bytes(record),
        agreement=f"check ok{recommend.agreement(record.check)}",
        accuracy=record.accuracy.value if record.accuracy else None,
    )


class _Schema(Struct):
    schema: str


def _decoded(folder: Path, content: bytes, kind: type[T]) -> T:
    try:
        return msgspec.json.decode(content, type=kind)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise UsageError(f"{folder}: its {MANIFEST} is damaged ({error}); ship it again") from error


def _refuse_damage(folder: Path, listed: Sequence[Resource], beat: Callable[[], None]) -> None:
    """Raise UsageError for the first file that is missing, unlisted, not regular or changed."""
    for resource in listed:
        path = folder / resource.name
        if not re.fullmatch(r"[\w.-]+(/[\w.-]+)*", resource.name) or {"..", "."} & set(resource.name.split("/")):
            raise UsageError(
                f"{folder}: its {MANIFEST} lists {resource.name[:80]!r}, which is not a path within the folder"
            )
        if not path.exists():
            raise UsageError(f"{folder}: {resource.name} is missing; ship it again or copy the whole folder")
    known = {folder / resource.name for resource in listed} | {folder / MANIFEST, folder / DIGEST}
    for path in sorted(folder.rglob("*")):
        mode = path.lstat().st_mode
        name, is_file = path.relative_to(folder), stat.S_ISREG(mode)
        if path not in known and not stat.S_ISDIR(mode):
            raise UsageError(f"{folder}: {name} is not listed in its {MANIFEST}; remove it")
        if path in known and not is_file:
            raise UsageError(f"{folder}: {name} is not a regular file; ship it again or copy the whole folder")
    for resource in listed:
        size = (folder / resource.name).stat().st_size
        if size != resource.bytes or sha256_of(folder / resource.name, beat=beat) != resource.sha256:
            raise UsageError(
                f"{folder}: {resource.name} has changed since it was shipped (SHA-256); ship or copy it again"
            )


def remember(folder: Path) -> None:
    """Remember, by the manifest's hash, that this user made the folder, so that its code may be loaded."""
    path = _memory(folder)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.touch()


def is_ours(folder: Path) -> bool:
    """Return whether this user made the folder on this machine."""
    return _memory(folder).is_file()


def _memory(folder: Path) -> Path:
    return folders.state() / "shipped" / hashlib.sha256((folder / MANIFEST).read_bytes()).hexdigest()
