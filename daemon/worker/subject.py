"""What is measured: the built module, its inputs and the facts about both."""

import copy
import hashlib
import importlib.util
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor, nn

from benchd.daemon.errors import Unsupported, UsageError
from benchd.daemon.protocol import Job
from benchd.daemon.records import ModelFacts
from benchd.daemon.worker.source import Source
from benchd.kernels.dispatch import Unavailable
from benchd.models import catalog, data, weights

POOL_BYTES = 64 * 2**20
POOL_IMAGES = 256
REFERENCE_BATCH = 8


@dataclass(frozen=True)
class Subject:
    """What backends load, a pool of inputs (N, *shape) in float32 and labels (N,) where there are any.

    `plain` is the same model with the same weights on plain PyTorch kernels: what a check compares with, in batches of
    `reference_batch`.
    """

    source: Source
    plain: nn.Module
    facts: ModelFacts
    judged_by: Literal["outputs", "codes"]
    reference_batch: int
    images: Tensor
    labels: Tensor | None

    def reference(self) -> nn.Module:
        """Return the plain model in float64."""
        return copy.deepcopy(self.plain).double()


def build(job: Job) -> Subject:
    """Build the job's model and its inputs; raise Unsupported or UsageError with the reason."""
    torch.manual_seed(job.case.seed)
    try:
        plain = _plain(job)
        module = plain if job.case.variant.kernels == "torch" else _custom(job, plain)
    except Unavailable as error:
        raise Unsupported(str(error)) from error
    shape: tuple[int, ...] = tuple(job.input_shape or getattr(module, "input_shape", ()) or ())
    if not shape:
        raise UsageError("the module has no attribute input_shape; give the shape of one input with --input 3x32x32")
    images, labels, data_source = _inputs(job, module, shape)
    facts, judged_by = _facts(job, module, shape, data_source), _judged_by(job, plain)
    source = _source(job, module, images, facts, judged_by)
    batch = job.case.batch_size if job.onnx else REFERENCE_BATCH
    return Subject(source, plain, facts, judged_by, batch, images, labels)


def _plain(job: Job) -> nn.Module:
    if job.onnx:
        return _own_file(job)
    return _own_module(job) if job.module else _catalogued(job)


def _source(
    job: Job, module: nn.Module, images: Tensor, facts: ModelFacts, judged_by: Literal["outputs", "codes"]
) -> Source:
    return Source(
        module=module,
        images=images[: job.limits.check_images],
        model=job.case.model,
        options=facts.options,
        weights_sha256=facts.weights_sha256,
        judged_by=judged_by,
        folder=Path(job.artifacts),
        given=Path(job.given_artifacts) if job.given_artifacts else None,
        own=Path(job.onnx) if job.onnx else None,
        extras=getattr(module, "extras", ()),
        provider=job.case.provider,
        workspace_bytes=job.workspace_bytes,
    )


def _custom(job: Job, plain: nn.Module) -> nn.Module:
    """Return the job's model on kernels of our own with the weights of `plain`: random ones are drawn once."""
    try:
        with torch.device(job.device):  # a builder tries its kernels on the default device
            module = weights.build(job.case.model, plain.state_dict(), job.options, kernels="custom")
    except subprocess.CalledProcessError as error:
        needed = "custom kernels need a C compiler and, for Triton, Python's headers: sudo apt install gcc python3-dev"
        raise Unsupported(f"{needed} ({error})") from error
    return module.cpu()


def _catalogued(job: Job) -> nn.Module:
    if job.weights:
        return weights.load(job.case.model, Path(job.weights), **job.options)
    return catalog.build(job.case.model, kernels="torch", **job.options)


def _own_file(job: Job) -> nn.Module:
    """Return the user's ONNX file as a module; the path comes from the command line alone."""
    try:
        from benchd.daemon.worker import own_onnx  # noqa: PLC0415 - the rest goes on without onnx
    except ImportError as error:
        raise Unsupported(f"reading an ONNX file needs the package onnx: pip install onnx ({error})") from error
    module = own_onnx.OwnFile(Path(str(job.onnx)), job.onnx_shapes)
    if module.batch_size != job.case.batch_size:
        raise UsageError(
            f"{module.path.name} takes batches of {module.batch_size}, not {job.case.batch_size}: give --input "
            f"{module.input_name}=... its first size, or --batch-sizes that one"
        )
    return module


def _own_module(job: Job) -> nn.Module:
    """Return what the user's `FILE.py:function` builds; the path comes from the command line alone."""
    path, _, function = str(job.module).rpartition(":")
    if job.case.variant.kernels == "custom":
        raise Unsupported("a module of your own has no custom kernels")
    spec = importlib.util.spec_from_file_location("benchd_own_module", path)
    if spec is None or spec.loader is None:
        raise UsageError(f"--module {job.module}: {path} is not a Python file")
    source = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(source)
    if not hasattr(source, function):
        raise UsageError(f"--module {job.module}: {path} has no {function!r}")
    module = getattr(source, function)()
    if not isinstance(module, nn.Module):
        raise UsageError(f"--module {job.module}: {function} returned {type(module).__name__}, not torch.nn.Module")
    if job.weights:
        weights.apply(module, weights.read(Path(job.weights)))
    return module.float().eval()


def _judged_by(job: Job, module: nn.Module) -> Literal["outputs", "codes"]:
    if job.onnx:
        return "outputs"
    if job.module:
        return "codes" if hasattr(module, "neurons") else "outputs"
    return catalog.entry(job.case.model).judged_by


def _inputs(job: Job, module: nn.Module, shape: tuple[int, ...]) -> tuple[Tensor, Tensor | None, str]:
    """Return images, labels or None, and where they come from."""
    entry = None if job.module or job.onnx else catalog.entry(job.case.model)
    dataset = entry.dataset if entry else None
    kind: Literal["unit", "normal"] = entry.inputs if entry else "normal"
    batch = job.case.batch_size
    if job.data:
        images = data.open_data(
            job.data,
            shape,
            max(POOL_IMAGES, batch, job.limits.check_images),
            dataset=dataset,
            inputs=kind,
            preprocess=getattr(module, "preprocess", None),
        )
        return images.images, images.labels, images.source
    image_bytes = 4 * torch.Size(shape).numel()
    count = max(batch, job.limits.check_images, min(max(POOL_IMAGES, 2 * batch), POOL_BYTES // image_bytes))
    if not getattr(module, "dtype", torch.float32).is_floating_point:
        draw = torch.Generator().manual_seed(job.case.seed)
        return torch.randint(2, (count, *shape), generator=draw).float(), None, f"random 0 and 1, seed {job.case.seed}"
    return data.random_images(shape, count, kind, job.case.seed), None, f"random {kind}, seed {job.case.seed}"


def _facts(job: Job, module: nn.Module, shape: tuple[int, ...], source: str) -> ModelFacts:
    return ModelFacts(
        options=job.options,
        input_shape=list(shape),
        parameters=sum(parameter.numel() for parameter in module.parameters()),
        weights=Path(job.weights or job.onnx or "").name or f"random, seed {job.case.seed}",
        weights_sha256=getattr(module, "sha256", None) or _digest(module),
        data=source,
    )


def _digest(module: nn.Module) -> str:
    """Return a hash over names, types and values of the state dict, whichever file it came from."""
    digest = hashlib.sha256()
    for name, tensor in sorted(module.state_dict().items()):
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(tensor.detach().reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()
