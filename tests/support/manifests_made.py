"""Manifests of shipped folders as tests need them."""

import hashlib
from pathlib import Path
from typing import Any
from zipfile import ZipFile

import msgspec
from records_made import ENVIRONMENT, PASSED, QANN, made, timing

from benchd.daemon.measuring.protocol import Golden, Tensor
from benchd.daemon.records import Case, ProcessResult, Record, encode
from benchd.daemon.shipping.manifest import DIGEST, GOLDEN, MANIFEST, Manifest, Promised, write
from benchd.daemon.verdicts.results import JOURNAL


def manifest(**fields: Any) -> Manifest:
    """Return a manifest of the model `net` that promises 10 ms, `fields` replaced."""
    given: dict[str, Any] = {
        "name": "net",
        "created": "",
        "tool_version": "",
        "case": Case(model="net"),
        "options": {},
        "inputs": [Tensor("x", "float32", [1, 4])],
        "outputs": [Tensor("y", "float32", [1, 4])],
        "preprocessing": "",
        "packages": {},
        "weights_sha256": "",
        "golden": Golden(1, 1, {"y": 1e-5}),
        "asked": {},
        "promised": Promised(processes_ms=[10.0] * 5, latency_ms=10.0, low_ms=9.9, high_ms=10.1),
        "device": "",
        "device_id": "",
        "environment": ENVIRONMENT,
        "resources": [],
    }
    return Manifest(**given | fields)


def record_of(shipped: Manifest) -> Record:
    """Return a record that makes the promise of `manifest`, of the case and the machine of this one."""
    return made(
        case=shipped.case,
        check=PASSED,
        timing=timing(10.0, low_ms=9.9, high_ms=10.1),
        processes=[ProcessResult(status="ok", timing=timing(10.0))] * 5,
        model=msgspec.structs.replace(QANN, weights_sha256=shipped.weights_sha256),
        environment=shipped.environment,
        device_id=shipped.device_id,
    )


def write_golden(folder: Path, *names: str) -> None:
    """Write a golden file with arrays of these names, of which nothing is read."""
    with ZipFile(folder / GOLDEN, "w") as file:
        for name in names:
            file.writestr(f"{name}.npy", b"")


def write_whole(folder: Path, shipped: Manifest, *promising: Record) -> None:
    """Write a folder's golden file, these records (by default the manifest's own), and the manifest with its hashes."""
    write_golden(folder, "input0:x", "exact0:y")
    measured = promising or [record_of(shipped)]
    (folder / JOURNAL).write_bytes(b"".join(encode(record) + b"\n" for record in measured))
    write(folder, shipped)


def seal(folder: Path) -> None:
    """Write the digest of the manifest as it is now, as one who changes it on purpose would."""
    (folder / DIGEST).write_text(f"{hashlib.sha256((folder / MANIFEST).read_bytes()).hexdigest()}  {MANIFEST}\n")
