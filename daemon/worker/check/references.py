"""The reference answers of a check, stored between processes by everything that they were computed from."""

import hashlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchd.daemon.measuring.protocol import Job
from benchd.daemon.worker.structures import Batch, content, values
from benchd.daemon.worker.workload import Workload
from benchd.exporters import code
from benchd.exporters.artifacts import ArtifactStore

LIMIT_BYTES = 2 * 2**30
_RUNTIMES = ("torch", "torchvision", "timm", "onnxruntime")

Arrays = Mapping[str, np.ndarray]
Compute = Callable[[], Arrays]


def kept(folder: Path, facts: Mapping[str, Any], compute: Compute) -> Arrays:
    """Return the arrays for these facts in `folder`, computing absent ones; above a limit, the oldest are deleted."""
    store = ArtifactStore(folder, LIMIT_BYTES)
    # uncompressed, because the numbers look random; without options, which NumPy 1 would store as arrays
    artifact = store.produce(facts, lambda path: np.savez(path, **compute()))  # type: ignore[arg-type]
    with np.load(artifact.path, allow_pickle=False) as arrays:
        return dict(arrays)


def facts(
    name: str, workload: Workload, job: Job, images: Batch, batch_size: int, device: torch.device
) -> dict[str, Any]:
    """Return the facts that determine the model's answer to these images; `name` says which answer that is."""
    return {
        "model": job.case.model,
        "precision": name,
        "format": "npz",
        "options": workload.facts.options,
        "weights_sha256": workload.facts.weights_sha256,
        "inputs_sha256": digest(values(images)),
        "batch": batch_size,
        "seed": job.case.seed,
        "device": device.type,
        "reference": getattr(workload.plain, "sha256", None),
        "code_sha256": code.sha256(*code.SHIPPED, "daemon/worker"),
        "versions": code.versions(*_RUNTIMES),
        **workload.source.scope,
    }


def digest(tensors: Sequence[Tensor], *more: object) -> str:
    """Return a hash of types, shapes and values, and of the other arguments."""
    hashed = hashlib.sha256(repr(more).encode())
    for tensor in tensors:
        hashed.update(f"{tensor.dtype} {tuple(tensor.shape)}\n".encode())
        hashed.update(content(tensor).data)
    return hashed.hexdigest()
