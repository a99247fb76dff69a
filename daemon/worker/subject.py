"""What is measured: the built module, its inputs and the facts about both."""

import copy
import hashlib
import math
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor, nn

from benchd.daemon.errors import Unsupported, UsageError
from benchd.daemon.protocol import Job
from benchd.daemon.records import InputSpec, ModelFacts
from benchd.daemon.worker import own_module
from benchd.daemon.worker.source import Source
from benchd.daemon.worker.structures import Batch, Tensors, dtype_of
from benchd.kernels.dispatch import Unavailable
from benchd.models import catalog, data, weights

POOL_BYTES = 64 * 2**20
POOL_IMAGES = 256
REFERENCE_BATCH = 8


@dataclass(frozen=True)
class Subject:
    """What backends load, a pool of inputs (N, ...) whose floats are float32, and labels (N,) where there are any.

    `plain` is the same model with the same weights on plain PyTorch kernels: what a check compares with, in batches of
    `reference_batch`.
    """

    source: Source
    plain: nn.Module
    facts: ModelFacts
    judged_by: Literal["outputs", "codes"]
    reference_batch: int
    images: Batch
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
    specs = _specs(job, plain)
    if job.module:
        plain = module = own_module.called_by_place(plain, specs)
    images, labels, data_source = _inputs(job, module, specs)
    facts, judged_by = _facts(job, module, specs, data_source), _judged_by(job, plain)
    source = _source(job, module, images, facts, judged_by)
    # an output of a whole batch, such as a loss, is another in another batch
    batch = job.case.batch_size if job.module or job.onnx else REFERENCE_BATCH
    return Subject(source, plain, facts, judged_by, batch, images, labels)


def _specs(job: Job, module: nn.Module) -> list[InputSpec]:
    """Return what one item of a batch is made of."""
    if job.module:
        return own_module.inputs(job, module)
    inputs: list[InputSpec] | None = getattr(module, "inputs", None) if job.onnx else None
    return inputs or [InputSpec("", "float32", list(getattr(module, "input_shape")))]  # noqa: B009


def _plain(job: Job) -> nn.Module:
    if job.onnx:
        return _own_file(job)
    return _own_module(job) if job.module else _catalogued(job)


def _source(
    job: Job, module: nn.Module, images: Batch, facts: ModelFacts, judged_by: Literal["outputs", "codes"]
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
        is_own=job.case.model not in catalog.MODELS,
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
    module = own_onnx.OwnFile(Path(str(job.onnx)), job.inputs)
    if module.batch_size not in (None, job.case.batch_size):
        raise UsageError(
            f"{module.path.name} is written for batches of {module.batch_size}: give --batch-sizes {module.batch_size}"
        )
    return module


def _own_module(job: Job) -> nn.Module:
    """Return the user's module with the weights of the command line."""
    module = own_module.build(job)
    if job.weights:
        weights.apply(module, weights.read(Path(job.weights)))
    return module


def _judged_by(job: Job, module: nn.Module) -> Literal["outputs", "codes"]:
    if job.onnx:
        return "outputs"
    if job.module:
        return "codes" if hasattr(module, "neurons") else "outputs"
    return catalog.entry(job.case.model).judged_by


def _inputs(job: Job, module: nn.Module, specs: Sequence[InputSpec]) -> tuple[Batch, Tensor | None, str]:
    """Return the pool, labels or None, and where they come from."""
    entry = None if job.module or job.onnx else catalog.entry(job.case.model)
    kind: Literal["unit", "normal"] = entry.inputs if entry else "normal"
    batch, shape = job.case.batch_size, tuple(specs[0].shape)
    if job.data:
        if len(specs) > 1 or specs[0].dtype != "float32":
            raise UsageError("--data gives images, and this model reads something else; leave it out")
        dataset = entry.dataset if entry else None
        images = data.open_data(
            job.data,
            shape,
            max(POOL_IMAGES, batch, job.limits.check_images),
            dataset=dataset,
            inputs=kind,
            preprocess=getattr(module, "preprocess", None),
        )
        return images.images, images.labels, images.source
    item_bytes = sum(dtype_of(spec).itemsize * math.prod(spec.shape) for spec in specs)
    count = max(batch, job.limits.check_images, min(max(POOL_IMAGES, 2 * batch), POOL_BYTES // item_bytes))
    drawn = {
        spec.name or str(place): _random(spec, count, kind, job.case.seed + place) for place, spec in enumerate(specs)
    }
    pool = Tensors(drawn) if len(drawn) > 1 else next(iter(drawn.values()))
    kinds = {kind if dtype_of(spec).is_floating_point else "0 and 1": None for spec in specs}
    return pool, None, f"random {', '.join(kinds)}, seed {job.case.seed}"


def _random(spec: InputSpec, count: int, kind: Literal["unit", "normal"], seed: int) -> Tensor:
    """Return `count` items; of whole numbers 0 and 1, so that an index fits any table."""
    if dtype_of(spec).is_floating_point:
        return data.random_images(tuple(spec.shape), count, kind, seed).to(dtype_of(spec))
    draw = torch.Generator().manual_seed(seed)
    return torch.randint(2, (count, *spec.shape), generator=draw).to(dtype_of(spec))


def _facts(job: Job, module: nn.Module, specs: Sequence[InputSpec], source: str) -> ModelFacts:
    return ModelFacts(
        options=job.options,
        input_shape=specs[0].shape,
        inputs=list(specs) if job.module or job.onnx else [],
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
