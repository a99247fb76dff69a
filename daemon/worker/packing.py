"""Writes the files to deploy for a variant: those that its runtime reads, and golden inputs with their answers."""

import keyword
import shutil
import sys
from collections.abc import Iterator, Mapping
from importlib.machinery import all_suffixes
from importlib.metadata import packages_distributions, version
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.torch
import torch
from torch import nn

from benchd.daemon.errors import Unsupported
from benchd.daemon.machine.environment import installed_version
from benchd.daemon.measuring import user_python
from benchd.daemon.measuring.protocol import Golden, Job, PackedFiles, Tensor
from benchd.daemon.records import UserNir
from benchd.daemon.runtimes import FILE_BACKENDS
from benchd.daemon.shipping import load_text
from benchd.daemon.shipping.manifest import CODE, GOLDEN, INPUTS, JUMPING_SHARE, ONNX, WEIGHTS
from benchd.daemon.worker import backends, user_code, user_module
from benchd.daemon.worker.backends import LoadedModel
from benchd.daemon.worker.check import agreement, truth
from benchd.daemon.worker.check.checking import rule_of
from benchd.daemon.worker.check.observe import uniforms
from benchd.daemon.worker.source import paths
from benchd.daemon.worker.structures import (
    OF_BATCH,
    Answers,
    Batch,
    Tensors,
    axes_of,
    bytes_of,
    cast,
    cycled,
    of_batch,
    tensors,
    values,
)
from benchd.daemon.worker.workload import Workload
from benchd.models import data

GOLDEN_ROWS = 8
"""The approximate number of golden inputs, in whole batches, at least two."""

STORED_BYTES = 2**25
"""The approximate limit for the measured inputs in a shipped folder."""

IMPORTED = {"benchd", "numpy", "safetensors", "torch"}
"""The packages that a PyTorch variant's LOAD.md imports besides the standard library."""

NIR = "net.nir"
_NIR_CODE = """from pathlib import Path

from benchd.models import nir


def build():
    return nir.build(str(Path(__file__).with_name("{nir}")), **{options})
"""


def refuse(job: Job, workload: Workload, answer: Batch) -> None:
    """Raise Unsupported if the variant that gave this answer cannot be deployed as files."""
    if isinstance(workload.images, Tensors) and workload.images.lengths:
        raise Unsupported("the items differ in length, but a shipped folder has a single size: pad the items to ship")
    if not getattr(workload.plain, "answers_numbers", True):
        raise Unsupported("its outputs include strings or maps, which cannot be compared after deployment: remove them")
    if job.case.variant.backend not in FILE_BACKENDS:
        if job.module and job.module.is_hub:
            raise Unsupported(f"a net from the Hub is deployed as a file: ship one of {', '.join(FILE_BACKENDS)}")
        _state(workload.source.module)
        if job.case.variant.backend != "aoti":
            load_text.answer(list(tensors(answer)))
        complex_ones = [name for name, value in tensors(answer).items() if value.is_complex()]
        if complex_ones:
            raise Unsupported(f"its answer {complex_ones[0]} is complex: return real tensors to ship it")
        if job.module and not isinstance(job.module, UserNir):
            _refuse_name(job.module.name)


def _refuse_name(name: str) -> None:
    """Raise Unsupported if LOAD.md could not import a module with this name, or would import a different one."""
    first, *_ = parts = name.split(".")
    if not all(part.isidentifier() and not keyword.iskeyword(part) for part in parts):
        raise Unsupported(f"LOAD.md imports its code, and {name!r} cannot be a module's name: rename the file")
    if first in sys.stdlib_module_names | IMPORTED:
        raise Unsupported(f"LOAD.md imports its code, and {first} is also a package that it needs: rename the file")


def write(folder: Path, job: Job, workload: Workload, loaded: LoadedModel, answer: Batch) -> PackedFiles:
    """Write the files of the variant that gave this answer to a folder.

    Raises Unsupported or UnfitModel if it cannot be deployed.
    """
    is_file = job.case.variant.backend in FILE_BACKENDS
    if is_file:
        (reads, called), entry = _file(job, workload, folder), ""
    else:
        reads, called, entry = [], {}, _module(job, workload, folder)
    inputs, golden = _golden(job, workload, loaded, reads, called, folder)
    return PackedFiles(
        inputs=inputs,
        outputs=_outputs(answer, called),
        golden=golden,
        stored=_stored(job, workload, folder),
        preprocessing=_preprocessing(workload),
        entry=entry,
        provider=loaded.runtime.provider if is_file and loaded.runtime else "",
        packages=_packages(job, loaded),
    )


def _file(job: Job, workload: Workload, folder: Path) -> tuple[list[str], dict[str, str]]:
    """Copy the ONNX file that ran, and any plan built from it; return its input names, and its output names by path."""
    artifact = backends.file(job.case.variant, workload.source, torch.device(job.device), job.case.batch_size)
    from benchd.exporters import onnx_files  # noqa: PLC0415 - only files need onnx

    beside = {str(part.relative_to(artifact.path.parent)): part for part in onnx_files.data_files(artifact.path)}
    for name, path in {ONNX: artifact.path, **beside, **workload.source.built}.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, folder / name)
    reads, _ = onnx_files.names_of(folder / ONNX)
    return reads, {path: name for name, path in paths(artifact).items()}


def _module(job: Job, workload: Workload, folder: Path) -> str:
    """Write the weights, a user module's code and anything compiled from it; return the entry that builds it."""
    # copied, because safetensors rejects names that share memory
    apart = {name: value.detach().clone().contiguous() for name, value in _state(workload.source.module).items()}
    safetensors.torch.save_file(apart, folder / WEIGHTS)
    for name, path in workload.source.built.items():
        shutil.copyfile(path, folder / name)
    for name, path in _code(job).items():
        copy = folder / CODE / _place(name, path)
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, copy)
    if isinstance(job.module, UserNir):
        return _nir(job, job.module, folder / CODE)
    return f"{job.module.name}:{job.module.function}" if job.module else job.case.model


def _nir(job: Job, own: UserNir, folder: Path) -> str:
    """Write a NIR file and the code that builds its net; return the entry that builds it."""
    folder.mkdir(exist_ok=True)
    shutil.copyfile(own.path, folder / NIR)
    (folder / "net.py").write_text(_NIR_CODE.format(nir=NIR, options=job.options))
    return "net:build"


def _code(job: Job) -> dict[str, Path]:
    """Return the files of a user's module by the names under which LOAD.md imports them; empty for other models."""
    if not job.module or isinstance(job.module, UserNir):
        return {}
    return {**user_code.imported(job.module.package), job.module.name: user_module.file(job.module)}


def _place(name: str, path: Path) -> Path:
    """Return the path below `code/` from which a module's file, possibly compiled, is imported under this name."""
    place = Path(*name.split("."))
    suffix = next((suffix for suffix in all_suffixes() if path.name.endswith(suffix)), ".py")
    return place / path.name if path.name.startswith("__init__.") else place.with_name(f"{place.name}{suffix}")


def _state(module: nn.Module) -> dict[str, torch.Tensor]:
    """Return the module's weights; raise Unsupported if a file of tensors cannot store one of them."""
    state: dict[str, Any] = (module.module if isinstance(module, user_module.NamedInputs) else module).state_dict()
    odd = [name for name, value in state.items() if not isinstance(value, torch.Tensor) or value.is_quantized]
    if odd:
        raise Unsupported(f"its weight {odd[0]} is not a plain tensor; export the module and ship it with --onnx")
    return state


def _golden(
    job: Job, workload: Workload, loaded: LoadedModel, reads: list[str], called: Mapping[str, str], folder: Path
) -> tuple[list[Tensor], Golden]:
    """Write the golden inputs with their answers; return the inputs, and the criteria for comparing the outputs."""
    size = job.case.batch_size
    batches = max(2, GOLDEN_ROWS // size)
    images = cycled(workload.images, batches * size)
    rule = rule_of(workload, loaded, job)
    right = truth.find(workload, job, images, rule, loaded.device)
    arrays: dict[str, np.ndarray] = {}
    for place in range(batches):
        rows = range(place * size, (place + 1) * size)
        given = dict(_inputs(workload, loaded, images[rows.start : rows.stop], rows, reads, job))
        arrays |= {f"input{place}:{name}": value for name, value in given.items()}
        answers = _named(of_batch(right.exact.outputs, place, size, batches * size), called)
        arrays |= {f"exact{place}:{name}": value for name, value in answers.items()}
    np.savez(folder / GOLDEN, **arrays)  # type: ignore[arg-type]
    bounds = {path: right.limits.of(path) for path in _paths(right.exact.outputs)}
    limits: Answers = {path: np.array(agreement.row_limit(bound, rule)) for path, bound in bounds.items()}
    golden = Golden(
        batches=batches,
        rows=batches * size,
        tolerances={name: float(limit) for name, limit in _named(limits, called).items()},
        rows_off=int(JUMPING_SHARE * batches * size) if any(bound.jumps for bound in bounds.values()) else 0,
    )
    return [Tensor(name, str(value.dtype), list(value.shape)) for name, value in given.items()], golden


def _stored(job: Job, workload: Workload, folder: Path) -> list[str]:
    """Write the measured inputs, items first, unless a seed draws them again; return their files within the folder."""
    specs, pool = workload.facts.inputs, workload.images
    if not (job.inputs.samples or job.inputs.data or any(spec.file for spec in specs)):
        return []
    fitting = STORED_BYTES * len(pool) // max(bytes_of(pool), 1)
    (folder / INPUTS).mkdir()
    names = []
    some = pool[: max(2 * job.case.batch_size, fitting)]
    for place, (value, axis) in enumerate(zip(values(some), axes_of(some), strict=True)):
        names.append(f"{INPUTS}/{place}.npy")
        np.save(folder / names[-1], _array(value if axis is None else value.movedim(axis, 0)))
    return names


def _inputs(
    workload: Workload, loaded: LoadedModel, batch: Batch, rows: range, names: list[str], job: Job
) -> Iterator[tuple[str, np.ndarray]]:
    """Yield each input by name in the runtime's form."""
    random = uniforms(workload.plain, rows, batch, job.case.seed)
    given = [*values(batch), *random]
    if names:
        given = workload.source.inputs(*given)
    for place, value in enumerate(given):
        (as_read,) = values(cast(value, loaded.dtype))
        yield names[place] if names else str(place), _array(as_read)


def _array(value: torch.Tensor) -> np.ndarray:
    """Return a tensor as an array; bfloat16 as float32, because numpy lacks it."""
    plain = value.float() if value.dtype == torch.bfloat16 else value
    array: np.ndarray = plain.contiguous().cpu().numpy()
    return array


def _paths(answers: Mapping[str, Any]) -> list[str]:
    """Return the paths of the outputs; an output whose shape changes between batches is listed once."""
    return list(dict.fromkeys(path.partition(OF_BATCH)[0] for path in answers))


def _named(answers: Answers, called: Mapping[str, str]) -> Answers:
    """Return the answers by their names in the file, or by path if they have none."""
    return {called.get(path, path): value for path, value in answers.items()}


def _outputs(answer: Batch, called: Mapping[str, str]) -> list[Tensor]:
    """Return the outputs with the runtime's types, from which those of the golden answers differ."""
    return [
        Tensor(called.get(path, path), str(value.dtype).removeprefix("torch."), list(value.shape))
        for path, value in tensors(answer).items()
    ]


def _preprocessing(workload: Workload) -> str:
    """Describe how to make an input: like the measured images, else with the model's transform, if either is known."""
    if workload.dataset:
        return workload.dataset.preprocessing
    own = getattr(workload.plain, "preprocess", None)
    return data.described(own) if own else f"none known; measured with {workload.facts.data}"


def _packages(job: Job, loaded: LoadedModel) -> dict[str, str]:
    """Return the packages that the runtime needs, with the installed versions."""
    if job.case.variant.backend in FILE_BACKENDS:
        return {"numpy": version("numpy")} | backends.packages(job.case.variant, loaded)
    if job.case.variant.backend == "aoti":
        wanted = ["numpy", "torch", *(["safetensors", "benchd"] if job.case.variant.kernels == "custom" else [])]
        return {name: version(name) for name in wanted}
    library = job.case.model.partition(":")[0] if ":" in job.case.model else ""
    is_nir = isinstance(job.module, UserNir)
    wanted = ["numpy", "torch", "safetensors", *(["benchd"] if is_nir or not job.module else [])]
    wanted += [*(["h5py"] if is_nir else []), *([library] if library else [])]
    return {name: version(name) for name in wanted} | _imported_packages(_code(job))


def _imported_packages(code: Mapping[str, Path]) -> dict[str, str]:
    """Return the installed packages imported by these files, with their versions."""
    written = {name for path in code.values() if path.suffix == ".py" for name in user_python.imports(path)}
    names = (written & set(sys.modules)) - sys.stdlib_module_names - {name.partition(".")[0] for name in code}
    known = packages_distributions()  # Python 3.10 omits packages that do not declare their top-level names
    packages = sorted(package for name in names for package in known.get(name, [name]))
    return {package: version for package in packages if (version := installed_version(package))}
