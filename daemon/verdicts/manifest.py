"""The folder that `benchd ship` writes, and its manifest: what is deployed, from which bytes, and what was promised.

    DIR/manifest.json      this: `benchd.shipped/1`, its schema in docs/manifest.schema.json
    DIR/LOAD.md            how to load and run exactly this
    DIR/golden.npz         a few inputs and their float64 answers
    DIR/records.jsonl      what was measured
    DIR/...                the files that the runtime reads

Every file is a resource with its size and SHA-256, and a file that is not listed, or that is no plain file, is refused.
Hashes beside their files show damage, not origin: what runs code when it is loaded is loaded only if the same user made
it on this machine, or says so.
"""

import hashlib
import re
import stat
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar
from zipfile import BadZipFile, ZipFile

import msgspec
from msgspec import Struct

from benchd.daemon.errors import UsageError
from benchd.daemon.machine import folders
from benchd.daemon.records import Case, Environment, InputSpec, OptionValue
from benchd.exporters.artifacts import sha256_of

T = TypeVar("T")

SCHEMA = "benchd.shipped/1"
MANIFEST, GOLDEN, LOAD = "manifest.json", "golden.npz", "LOAD.md"
WEIGHTS, ONNX, CODE = "weights.safetensors", "model.onnx", "code"
PLAN, TIMINGS = "model.plan", "timing.cache"
NOT_GOLDEN = "its answers are not the golden ones"
"""The beginning of the reason of a process whose golden answers differ."""

JUMPING_SHARE = 0.25
"""Of a network with thresholds so many golden inputs may be off: one early spike moves thousands after it."""

REBUILT = "rebuilt, because "
"""The beginning of a runtime's note that says why a plan was built again."""

MOST_BYTES = 2**22
"""A manifest is a few kilobytes: more is not read."""

MOST, MOST_MS, LONGEST_NAME = 2**20, 1e9, 1000
"""What is believed at most: of a batch size, a number of threads or a seed; of a time; of characters."""


class Asked(Struct, frozen=True, kw_only=True):
    """The limits of `benchd ship`; None is no limit. `min_effect` is the smallest difference that counts."""

    max_latency_ms: float | None = None
    max_energy_j: float | None = None
    max_memory_bytes: float | None = None
    max_power_w: float | None = None
    rate_hz: float | None = None
    min_agreement: float | None = None
    max_accuracy_drop: float | None = None
    min_effect: float = 0.01


class Resource(Struct, frozen=True):
    """A file of the folder by its path in it, its size and the SHA-256 of its bytes."""

    name: str
    bytes: int
    sha256: str


class Tensor(Struct, frozen=True):
    """An input or an output: its name, its type and its shape with the batch."""

    name: str
    dtype: str
    shape: list[int]


class Golden(Struct, frozen=True):
    """How the golden answers are compared: of all `rows`, at most `rows_off` may be beyond an output's limit.

    `tolerances` are shares of the largest float64 answer, by output; rows may be off only for networks with thresholds,
    in which one spike changes everything after it.
    """

    batches: int
    rows: int
    tolerances: dict[str, float]
    rows_off: int = 0


class Packed(Struct, frozen=True, kw_only=True):
    """What the worker that wrote the files says of them: how they are called, and the answers to expect.

    `entry` is what a module is built by: `package.module:function` of `code/`, or the catalog's name of the model.
    """

    inputs: list[Tensor]
    outputs: list[Tensor]
    golden: Golden
    preprocessing: str
    entry: str = ""
    provider: str = ""
    packages: dict[str, str] = {}


class Promised(Struct, frozen=True, kw_only=True):
    """What was measured in fresh processes of the winner; a value that was not measured is null.

    `processes_ms` are the medians that the interval of `latency_ms` is from: of one run of a whole batch.
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
    """What is deployed. `asked` are the limits that it met, `environment` is where it was measured.

    `read` are the inputs of one item, as `--input` gives them; `device` names the machine's class for people.
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
    promised: Promised
    against: str = ""
    device: str
    device_id: str
    environment: Environment
    resources: list[Resource]

    @property
    def runs_code(self) -> bool:
        """Return whether loading the folder runs Python code of it."""
        return any(one.name.startswith(f"{CODE}/") for one in self.resources)

    @property
    def has_plan(self) -> bool:
        """Return whether the folder holds a TensorRT plan, which is a program too."""
        return any(one.name == PLAN for one in self.resources)


def encode(manifest: Manifest) -> bytes:
    """Return the manifest as the bytes of its file."""
    return msgspec.json.format(msgspec.json.encode(manifest)) + b"\n"


def resources(folder: Path) -> list[Resource]:
    """Return every file below the folder but the manifest."""
    found = sorted(path for path in folder.rglob("*") if path.is_file() and path != folder / MANIFEST)
    return [Resource(str(path.relative_to(folder)), path.stat().st_size, sha256_of(path)) for path in found]


def read(folder: Path, beat: Callable[[], None] = lambda: None) -> Manifest:
    """Return the manifest of a folder whose files are all whole; nothing of them has been loaded or run.

    `beat` is called again and again meanwhile: large files take minutes.

    Raises UsageError, in one sentence, for a newer schema and for everything that is missing, changed or not listed.
    """
    path = folder / MANIFEST
    if not path.is_file() or path.is_symlink():
        raise UsageError(f"{folder}: no {MANIFEST}; give a folder that benchd ship wrote")
    if path.stat().st_size > MOST_BYTES:
        raise UsageError(
            f"{folder}: its {MANIFEST} is damaged: {path.stat().st_size} bytes are too many; ship it again"
        )
    content = path.read_bytes()
    schema = _decoded(folder, content, _Schema).schema
    if schema != SCHEMA:
        raise UsageError(f"{folder}: its schema is {schema[:40]!r}, and this benchd reads {SCHEMA}: use a newer benchd")
    manifest = _decoded(folder, content, Manifest)
    if wrong := _impossible(manifest):
        raise UsageError(f"{folder}: its {MANIFEST} is damaged ({wrong}); ship it again")
    _refuse_damage(folder, manifest.resources, beat)
    _refuse_incomplete(folder, manifest)
    return manifest


def _impossible(manifest: Manifest) -> str:
    """Return what the manifest says that `benchd ship` never writes and that would be measured, else nothing."""
    case, golden, times_ms = manifest.case, manifest.golden, manifest.promised.processes_ms
    of_case = case.direction, case.scenario, case.streams, case.load, case.beside
    threads = 1 if case.threads is None else case.threads
    low_ms, high_ms = 0.999 * min(times_ms, default=0.0), 1.001 * max(times_ms, default=0.0)
    answered = {one.name for one in manifest.outputs}
    shapes = [one.shape for one in manifest.read] + [one.shape for one in (*manifest.inputs, *manifest.outputs)]
    wrong = {
        "its case is not one stream of inferences": of_case != ("inference", "single_stream", 1, None, None),
        f"the batch_size of its case is not within 1 to {MOST}": not 1 <= case.batch_size <= MOST,
        f"the threads of its case are not within 1 to {MOST}": not 1 <= threads <= MOST,
        f"the seed of its case is not within 0 to {MOST}": not 0 <= case.seed <= MOST,
        "its name has no end": len(manifest.name) > LONGEST_NAME,
        "it asks for what is no limit of benchd ship": not manifest.asked.keys() <= set(Asked.__struct_fields__),
        "it has no inputs or no outputs": not (manifest.inputs and manifest.outputs),
        "a shape has a negative size": any(size < 0 for shape in shapes for size in shape),
        "its golden answers are of no batches": golden.batches < 1 or golden.rows != golden.batches * case.batch_size,
        "too many of its golden answers may be off": not 0 <= golden.rows_off <= JUMPING_SHARE * golden.rows,
        "its golden answers are not those of its outputs": answered != golden.tolerances.keys(),
        "a tolerance is not a share": not all(0.0 <= share <= 1.0 for share in golden.tolerances.values()),
        "the time that it promises is not that of its processes": (
            not 0.0 < low_ms <= manifest.promised.latency_ms <= high_ms < MOST_MS
        ),
    }
    return next((reason for reason, is_so in wrong.items() if is_so), "")


class _Schema(Struct):
    schema: str


def _decoded(folder: Path, content: bytes, kind: type[T]) -> T:
    try:
        return msgspec.json.decode(content, type=kind)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise UsageError(f"{folder}: its {MANIFEST} is damaged ({error}); ship it again") from error


def _refuse_damage(folder: Path, listed: Sequence[Resource], beat: Callable[[], None]) -> None:
    """Raise UsageError for the first file that is missing, unlisted, no plain file or of other bytes."""
    for one in listed:
        path = folder / one.name
        if not re.fullmatch(r"[\w.-]+(/[\w.-]+)*", one.name) or {"..", "."} & set(one.name.split("/")):
            raise UsageError(f"{folder}: its {MANIFEST} lists {one.name[:80]!r}, which is no path within it")
        if not path.exists():
            raise UsageError(f"{folder}: {one.name} is missing; ship it again or copy the whole folder")
    known = {folder / one.name for one in listed} | {folder / MANIFEST}
    for path in sorted(folder.rglob("*")):
        mode = path.lstat().st_mode
        name, is_file = path.relative_to(folder), stat.S_ISREG(mode)
        if path not in known and not stat.S_ISDIR(mode):
            raise UsageError(f"{folder}: {name} is not a file of its {MANIFEST}; remove it")
        if path in known and not is_file:
            raise UsageError(f"{folder}: {name} is no plain file; ship it again or copy the whole folder")
    for one in listed:
        size = (folder / one.name).stat().st_size
        if size != one.bytes or sha256_of(folder / one.name, beat) != one.sha256:
            raise UsageError(f"{folder}: {one.name} has changed since it was shipped (SHA-256); ship or copy it again")


def _refuse_incomplete(folder: Path, manifest: Manifest) -> None:
    """Raise UsageError if the golden file lacks an array that is read from it."""
    try:
        with ZipFile(folder / GOLDEN) as file:
            held = set(file.namelist())
    except (OSError, ValueError, BadZipFile) as error:
        raise UsageError(f"{folder}: its {GOLDEN} is damaged ({error}); ship it again") from error
    read = [("input", one.name) for one in manifest.inputs] + [("exact", name) for name in manifest.golden.tolerances]
    arrays = (f"{kind}{place}:{name}" for place in range(manifest.golden.batches) for kind, name in read)
    if lacking := next((name for name in arrays if f"{name}.npy" not in held), None):
        raise UsageError(f"{folder}: its {GOLDEN} is damaged (no {lacking[:80]}); ship it again")


def remember(folder: Path) -> None:
    """Note that this user made the folder, by the hash of its manifest, so that what runs code may be loaded."""
    path = _memory(folder)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.touch()


def is_ours(folder: Path) -> bool:
    """Return whether this user made the folder on this machine."""
    return _memory(folder).is_file()


def _memory(folder: Path) -> Path:
    return folders.state() / "shipped" / hashlib.sha256((folder / MANIFEST).read_bytes()).hexdigest()
