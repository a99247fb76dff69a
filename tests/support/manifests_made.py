"""Manifests of shipped folders as tests need them."""

import hashlib
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
from records_made import ENVIRONMENT

from benchd.daemon.measuring.protocol import Golden, PackedFiles, Tensor
from benchd.daemon.records import Case
from benchd.daemon.shipping import load_text
from benchd.daemon.shipping.manifest import DIGEST, MANIFEST, Manifest, PromisedResults


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
        "promised": PromisedResults(processes_ms=[10.0] * 5, latency_ms=10.0, low_ms=9.9, high_ms=10.1),
        "device": "",
        "device_id": "",
        "environment": ENVIRONMENT,
        "resources": [],
    }
    return Manifest(**given | fields)


def load_text_of(case: Case, packed: PackedFiles) -> str:
    """Return the lines of LOAD.md for what was packed on a CPU."""
    environment = msgspec.structs.replace(ENVIRONMENT, device="cpu")
    fields = {name: getattr(packed, name) for name in ("inputs", "outputs", "golden", "entry")}
    return load_text.code(manifest(case=case, environment=environment, **fields))


def run_alone(text: str, folder: Path) -> "subprocess.CompletedProcess[str]":
    """Run these lines in the folder by an interpreter that imports nothing from there by itself."""
    command = [sys.executable, "-I", "-B", "-c", text]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)


def seal(folder: Path) -> None:
    """Write the digest of the manifest as it is now, as one who changes it on purpose would."""
    (folder / DIGEST).write_text(f"{hashlib.sha256((folder / MANIFEST).read_bytes()).hexdigest()}  {MANIFEST}\n")
