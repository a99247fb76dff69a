"""The workload of a case: the built module, its inputs and the facts about both."""

import copy
import hashlib
import inspect
import math
import subprocess
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Any, Literal

import msgspec
import torch
from torch import Tensor, nn

from benchd.daemon.errors import Unsupported, UsageError
from benchd.daemon.measuring import user_inputs
from benchd.daemon.measuring.protocol import Job, Verify
from benchd.daemon.records import OF_MODULE, InputSpec, ModelFacts
from benchd.daemon.worker import lookups, user_code, user_module
from benchd.daemon.worker.camera import FRAMES, Camera, open_camera
from benchd.daemon.worker.samples import StoredItems, open_samples
from benchd.daemon.worker.source import Calibration, Source
from benchd.daemon.worker.structures import Batch, Tensors, content, cycled, dtype_of, leading
from benchd.exporters import code, doubled
from benchd.exporters.artifacts import sha256_of
from benchd.kernels.dispatch import Unavailable
from benchd.models import catalog, data, demo, weights

POOL_BYTES = 64 * 2**20
POOL_IMAGES = 256
HASHED_TOGETHER = 2**20
CALIBRATION_SEED = 2**63  # not used by any case, so that calibration and check have no random image in common
REFERENCE_BATCH = 8
BUILD_SHARE = 0.9  # share of the deadline after which a build stops itself, to keep the timings of its kernels


@dataclass(frozen=True)
class Workload:
    """The source for backends, a pool of inputs (N, ...) with floats as float32, and labels (N,), if there are any.

    `dataset` is the data set, or the user's items, from which the pool is taken, None if it is random; `camera` has the
    frames of a pipeline's pool. `plain` is that model with the same weights on plain PyTorch kernels; checks use it as
    the reference and run it in batches of `reference_batch`.
    """

    source: Source
    plain: nn.Module
    facts: ModelFacts
    judged_by: Literal["outputs", "codes"]
    reference_batch: int
    images: Batch
    labels: Tensor | None
    dataset: data.ImageSet | StoredItems | None
    camera: Camera | None = None

    def reference(self) -> nn.Module:
        """Return the plain model in float64; a user's module in the form that `doubled.reading` accepts."""
        return doubled.in_float64(self.plain) if self.source.is_own else copy.deepcopy(self.plain).double()

    def example(self, count: int) -> Batch:
        """Return the first `count` inputs, repeating those of a smaller data set, because a file has a fixed batch."""
        return cycled(self.images, count)


def build(job: Job) -> Workload:
    """Build the job's model and its inputs; raise Unsupported or UsageError with the reason."""
    torch.manual_seed(job.case.seed)
    try:
        plain = _plain(job)
        module = plain if job.case.variant.kernels == "torch" else _custom(job, plain)
        plain = _own_file(job, job.onnx.reference) if job.onnx and job.onnx.reference else plain
        if job.onnx:
            getattr(plain, "require_session")()  # noqa: B009 - the method of a file, an untyped module here
    except Unavailable as error:
        raise Unsupported(str(error)) from error
    samples = open_samples(job.inputs.samples) if job.inputs.samples else None
    specs = _specs(job, plain, samples)
    if samples:
        samples, specs = samples.read_by(specs)
        if job.inputs.metric:
            samples.refuse_untargeted()
    if all(spec.batch_axis is None for spec in specs):
        raise UsageError(f"--input {specs[0]}: one input must have a batch axis: give its sizes without parentheses")
    pool = _inputs(job, plain, specs, samples)
    if job.module:
        plain = module = _fed(job, plain, specs, pool.images)
    calibration = partial(_calibration, job, plain, specs, samples)
    facts, judged_by = _facts(job, module, specs, pool.source), _judged_by(job, plain)
    source = replace(_source(job, module, pool.images, facts, judged_by), calibration=calibration)
    # an output for a whole batch, such as a loss, depends on the batch size, and a library's net may be large
    batch = REFERENCE_BATCH if job.case.model in catalog.MODELS else job.case.batch_size
    return Workload(source, plain, facts, judged_by, batch, pool.images, pool.labels, pool.of, pool.camera)


def _specs(job: Job, module: nn.Module, samples: StoredItems | None) -> list[InputSpec]:
    if not job.own:
        return [InputSpec("", "float32", list(getattr(module, "input_shape")))]  # noqa: B009
    specs: list[InputSpec] = getattr(module, "inputs", [])
    if job.module:
        specs = user_module.inputs(job.module, job, module, samples.specs() if samples else [])
    return specs if samples else _spanned(job, module, specs)


def _spanned(job: Job, module: nn.Module, specs: Sequence[InputSpec]) -> list[InputSpec]:
    """Return the inputs with the span of their integers, which trial runs find unless the user specifies it."""
    named = _named(specs)
    unknown = [name for name, spec in named.items() if user_inputs.spanned(spec) != spec]
    wanted = [name for name in unknown if not user_inputs.is_mask(name)]
    spans: dict[str, tuple[int, int]] = {}
    if wanted:
        of_ones = [
            msgspec.structs.replace(spec, span=(1, 1)) if name in unknown else spec for name, spec in named.items()
        ]
        ones = _drawn(of_ones, job.case.batch_size, "normal", job.case.seed)
        if job.module:
            module = user_module.takes(module, specs)
            user_module.settle(module, ones)
        # what the reference accepts is meant, even if the measured form also takes other numbers
        forms: list[Callable[..., object]] = [_exact(module), doubled.copied(module)] if job.module else [module]
        spans = lookups.spans(forms, ones, named, wanted, _sizes(job, module))
    return [user_inputs.spanned(spec, spans.get(name)) for name, spec in named.items()]


def _exact(module: nn.Module) -> Callable[..., object]:
    """Return the module's float64 form, which takes the same inputs; its first run makes it, or raises."""
    exact = cache(lambda: doubled.reading(doubled.in_float64(module)))
    return lambda *inputs: exact()(*(value.double() if value.is_floating_point() else value for value in inputs))


def _sizes(job: Job, module: nn.Module) -> set[int]:
    """Return the sizes of the model's stored tensors."""
    if job.onnx:
        of_file: set[int] = getattr(module, "sizes")  # noqa: B009 - of a file
        return of_file
    return {size for value in [*module.parameters(), *module.buffers()] for size in value.shape}


def _named(specs: Sequence[InputSpec]) -> dict[str, InputSpec]:
    """Return the inputs by name, or by position if unnamed."""
    return {spec.name or str(place): spec for place, spec in enumerate(specs)}


def _plain(job: Job) -> nn.Module:
    if job.onnx:
        return _own_file(job, job.onnx.path)
    return user_module.build(job.module, job) if job.module else _catalogued(job)


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
        kernels=job.case.variant.built_on,
        scope=_scope(job, facts),
        given=Path(job.given_artifacts) if job.given_artifacts else None,
        own=Path(job.onnx.path) if job.onnx else None,
        is_own=job.case.model not in catalog.MODELS,
        input_name=facts.inputs[0].name if len(facts.inputs) == 1 else "",
        provider=job.case.provider,
        dla=job.case.dla,
        build_limit_s=BUILD_SHARE * job.limits.build_deadline_s,
        workspace_bytes=job.workspace_bytes,
        is_alone=job.case.streams == 1 and job.case.beside is None,
        engine=Path(job.recipe.engine) if isinstance(job.recipe, Verify) and job.recipe.engine else None,
    )


def _scope(job: Job, facts: ModelFacts) -> dict[str, Any]:
    """Return other facts that identify a user's module, and the run after which its files are not reused."""
    if not job.module:
        return {}
    inputs = [str(spec) for spec in facts.inputs]
    return {"module": job.module.path, "read": facts.read, "inputs": inputs, "suite_id": job.suite_id}


def _custom(job: Job, plain: nn.Module) -> nn.Module:
    """Return the job's model on custom kernels, with the weights of `plain`, because these are drawn only once."""
    try:
        with torch.device(job.device):  # builders try their kernels on the default device
            module = weights.build(job.case.model, plain.state_dict(), job.options, kernels=job.case.variant.built_on)
    except subprocess.CalledProcessError as error:
        needed = "custom kernels need a C compiler and, for Triton, Python's headers: sudo apt install gcc python3-dev"
        raise Unsupported(f"{needed} ({error})") from error
    return module.cpu()


def _catalogued(job: Job) -> nn.Module:
    model = job.case.model
    if not job.inputs.weights:
        return catalog.build(model, kernels="torch", **job.options)
    file = demo.CHECKPOINTS[model].path if job.inputs.weights == demo.DEMO else Path(job.inputs.weights)
    return weights.load(model, file, **job.options)


def _own_file(job: Job, path: str) -> nn.Module:
    """Return a user's ONNX file as a module; its path always comes from the command line."""
    try:
        from benchd.daemon.worker import user_onnx  # noqa: PLC0415 - everything else works without onnx
    except ImportError as error:
        raise Unsupported(f"reading an ONNX file needs the package onnx: pip install onnx ({error})") from error
    module = user_onnx.OnnxModule(Path(path), job.own.inputs if job.own else [])
    if module.batch_size not in (None, job.case.batch_size):
        raise UsageError(
            f"{module.path.name} has a fixed batch size of {module.batch_size}: give --batch-sizes {module.batch_size}"
        )
    return module


def _fed(job: Job, module: nn.Module, specs: Sequence[InputSpec], images: Batch) -> nn.Module:
    """Return the user's module, wrapped for these inputs, settled, and with the weights from the command line."""
    taking = user_module.takes(module, specs)
    user_module.settle(taking, images[: job.case.batch_size])
    if job.inputs.weights:
        weights.apply(module, weights.read(Path(job.inputs.weights)))
    return taking


def shows_codes(module: nn.Module) -> bool:
    """Return whether the module has a method `neurons`, which returns the neurons with comparable codes."""
    return inspect.ismethod(getattr(module, "neurons", None))


def _judged_by(job: Job, module: nn.Module) -> Literal["outputs", "codes"]:
    if job.onnx:
        return "outputs"
    if job.module:
        return "codes" if shows_codes(module) else "outputs"
    return catalog.entry(job.case.model).judged_by


@dataclass(frozen=True)
class _Pool:
    """The pool of inputs and its origin; for real images also labels and the data set."""

    images: Batch
    source: str
    labels: Tensor | None = None
    of: data.ImageSet | StoredItems | None = None
    camera: Camera | None = None


def _inputs(job: Job, module: nn.Module, specs: Sequence[InputSpec], samples: StoredItems | None) -> _Pool:
    dataset, kind = _preprocessed(job)
    batch = job.case.batch_size
    wanted = max(POOL_IMAGES, batch, job.limits.check_images)
    if job.case.scenario == "pipeline":
        return _frames(job, specs, data.normalisation(dataset, kind))
    if samples:
        return _Pool(*samples.taken(wanted), of=samples)
    if job.inputs.data:
        opened = _opened(job, module, specs).taken(wanted)
        return _Pool(opened.images, opened.source, opened.labels, opened.of)
    item_bytes = sum(dtype_of(spec).itemsize * math.prod(spec.shape) for spec in specs)
    count = max(batch, job.limits.check_images, min(max(POOL_IMAGES, 2 * batch), POOL_BYTES // item_bytes))
    pool = _drawn(specs, count, kind, job.case.seed)
    numbers = _ranges(specs, kind)
    return _Pool(pool, numbers if all(spec.file for spec in specs) else f"random {numbers}, seed {job.case.seed}")


def _ranges(specs: Sequence[InputSpec], kind: Literal["unit", "normal"]) -> str:
    """Describe the inputs' values, without names if all are the same: `normal`, or `ids 0-999, mask 0-1`."""
    numbers = [spec.numbers if spec.numbers != "normal" else kind for spec in specs]
    if len(set(numbers)) == 1:
        return numbers[0]
    return ", ".join(f"{name} {distribution}" for name, distribution in zip(_named(specs), numbers, strict=True))


def _frames(
    job: Job, specs: Sequence[InputSpec], normalisation: tuple[Sequence[float], Sequence[float]] | None
) -> _Pool:
    """Return the pool of a pipeline, made from its frames."""
    if len(specs) > 1:
        raise UsageError(f"--scenario pipeline feeds one input, but {job.case.model} takes {len(specs)}")
    count = max(FRAMES, job.case.batch_size, job.limits.check_images)
    device = torch.device(job.device)
    camera = open_camera(job.inputs.data, tuple(specs[0].shape), normalisation, count, device, job.case.seed)
    images = camera.images()
    return _Pool(cycled(images, count), camera.source, camera=camera)


def _calibration(job: Job, module: nn.Module, specs: Sequence[InputSpec], samples: StoredItems | None) -> Calibration:
    """Return the inputs for the job's calibration, by default those for its weights; raise Unsupported without any.

    The user's own inputs may be used too, unless a metric on them would then flatter int8.
    """
    weights = job.inputs.weights
    by_default = demo.DEMO if weights == demo.DEMO else None if weights or job.own else demo.RANDOM
    if samples and not (job.inputs.metric or job.inputs.calibration):
        images, source = samples.taken(job.calibration_images)
        return Calibration(images, source, data.digests(leading(images)), True)
    named = job.inputs.calibration or by_default
    if named is None:
        raise Unsupported(
            "int8 needs calibration inputs: give --calibration imagefolder:DIR or FILE with representative inputs, "
            "or --calibration random for a smoke test"
        )
    count = job.calibration_images
    if named == demo.RANDOM:
        images, source = _drawn(specs, count, _preprocessed(job)[1], CALIBRATION_SEED), f"{count} random inputs"
    elif user_inputs.are_samples(named):
        images, source = open_samples(named).read_by(specs)[0].taken(count)
    else:
        opened = _opened(job, module, specs, named).taken(count)
        images, source = opened.images, opened.source
    return Calibration(images, source, data.digests(leading(images)), job.inputs.calibration is not None)


def _preprocessed(job: Job) -> tuple[str | None, Literal["unit", "normal"]]:
    """Return the data set whose preprocessing the model expects, None if unknown, and the range of its inputs."""
    if job.own:
        return None, "normal"
    entry = catalog.entry(job.case.model)
    return entry.dataset, entry.inputs


def _opened(job: Job, module: nn.Module, specs: Sequence[InputSpec], calibration: str = "") -> data.ImageSet:
    """Return the images for measurement or calibration; raise UsageError for a model that takes other inputs."""
    if len(specs) > 1:
        raise UsageError(f"--data gives one input, but {job.case.model} takes {len(specs)}: leave it out")
    if not dtype_of(specs[0]).is_floating_point:
        raise UsageError(f"--data gives normalised images, but {job.case.model} takes {specs[0].dtype}: leave it out")
    dataset, kind = _preprocessed(job)
    return data.open_set(
        calibration or str(job.inputs.data),
        tuple(specs[0].shape),
        dataset=dataset,
        inputs=kind,
        labels=None if calibration else job.inputs.labels,
        preprocess=getattr(module, "preprocess", None),
        calibrating=bool(calibration),
    )


def _drawn(specs: Sequence[InputSpec], count: int, kind: Literal["unit", "normal"], seed: int) -> Batch:
    drawn = {
        name: _numbers(spec, count, kind, seed + place) for place, (name, spec) in enumerate(_named(specs).items())
    }
    axes = {name: spec.batch_axis for name, spec in _named(specs).items() if spec.batch_axis != 0}
    return Tensors(drawn, axes) if axes or len(drawn) > 1 else next(iter(drawn.values()))


def _numbers(spec: InputSpec, count: int, kind: Literal["unit", "normal"], seed: int) -> Tensor:
    """Return `count` items with the batch at its axis, repeating those of a shorter file; without a batch, one."""
    axis = spec.batch_axis
    if spec.file:
        from_file = torch.from_numpy(user_inputs.numbers_of(spec)).to(dtype_of(spec))
        items = from_file if axis is None else cycled(from_file, count)
    else:
        items = _random(spec, 1, kind, seed)[0] if axis is None else _random(spec, count, kind, seed)
    return items.movedim(0, axis).contiguous() if axis else items


def _random(spec: InputSpec, count: int, kind: Literal["unit", "normal"], seed: int) -> Tensor:
    """Return `count` items within the input's span; integers start with the ends of the span, whatever the seed."""
    dtype, (low, high) = dtype_of(spec), spec.span or (0, 1)
    if dtype.is_floating_point:
        images = data.random_images(tuple(spec.shape), count, "unit" if spec.span else kind, seed)
        return (low + (high - low) * images if spec.span else images).to(dtype)
    draw = torch.Generator().manual_seed(seed)
    numbers = torch.randint(int(low), min(int(high), 2**63 - 2) + 1, (count, *spec.shape), generator=draw)
    ends = torch.tensor([high, low])[: numbers.numel()]
    numbers.view(-1)[: len(ends)] = ends
    return numbers.to(dtype)


def _facts(job: Job, module: nn.Module, specs: Sequence[InputSpec], source: str) -> ModelFacts:
    weights_sha256 = getattr(module, "sha256", None) or _digest(module)
    return ModelFacts(
        options=job.options,
        input_shape=specs[0].shape,
        inputs=list(specs) if job.own else [],
        parameters=sum(parameter.numel() for parameter in module.parameters()),
        weights=_weights(job),
        weights_sha256=weights_sha256,
        read=_read(job, weights_sha256),
        data=source,
    )


def _weights(job: Job) -> str:
    """Return the name of the weights file, or a description of the weights' origin."""
    given = job.inputs.weights or (job.onnx and job.onnx.path)
    if given:
        return Path(given).name
    if job.module and job.module.is_hub:
        return Path(job.module.folder).name  # for a folder in the cache, this is the commit
    return OF_MODULE if job.module else f"random, seed {job.case.seed}"


def completed(job: Job, facts: ModelFacts) -> ModelFacts:
    """Return the facts of a model that has run, with everything that it has read; earlier reads keep their hashes."""
    read = _read(job, facts.weights_sha256) | facts.read
    user_code.unwatch()
    return msgspec.structs.replace(facts, read=read)


def _read(job: Job, weights_sha256: str) -> dict[str, str]:
    """Return hashes of everything the job's model was made from so far; an ONNX file contains code and weights."""
    if job.onnx:
        return {job.onnx.name: weights_sha256[:12]}
    if not job.module:
        return {"benchd": code.sha256()[:12]}
    folder = Path(job.module.folder) if job.module.folder else None
    if folder and job.module.is_hub:
        return {"config.json": sha256_of(folder / "config.json")[:12]} | code.versions("transformers")
    return user_code.read(user_module.file(job.module), job.module.package, folder)


def _digest(module: nn.Module) -> str:
    """Return a hash of the names, types and values in the state dict, regardless of its file."""
    digest = hashlib.sha256()
    for name, tensor in sorted(module.state_dict().items()):
        digest.update(f"{name} ".encode())
        for part in _content(tensor):
            digest.update(part)
    return digest.hexdigest()


def _content(value: Any) -> Iterator[Any]:
    """Yield the bytes of an entry's type and values in a state dict; a quantised module has tuples of packed values."""
    if isinstance(value, tuple | list):
        for part in value:
            yield from _content(part)
    elif isinstance(value, Tensor):
        numbers = value.dequantize() if value.is_quantized else value.detach()
        yield f"{value.dtype} {tuple(value.shape)}".encode()
        yield from (content(part).data for part in numbers.reshape(-1).split(HASHED_TOGETHER))
    else:
        yield repr(value).encode()
