"""The child of `benchd export`: an ExportRequest as JSON on stdin, the files on stdout, progress on stderr."""

import math
import sys
from collections.abc import Iterator
from contextlib import redirect_stdout
from itertools import product
from pathlib import Path
from typing import NamedTuple

import msgspec
import torch

from benchd.daemon.errors import BenchdError, NotAvailable, UsageError
from benchd.daemon.machine import folders
from benchd.daemon.machine.standard_streams import STDERR, lasting
from benchd.daemon.machine.ticker import ticker_of
from benchd.daemon.measuring.plan import PRESETS
from benchd.daemon.measuring.protocol import ExportRequest, Job, entry_of
from benchd.daemon.records import Case, OptionValue, Variant
from benchd.daemon.shipping.manifest import PLAN
from benchd.daemon.worker import backends, workload
from benchd.daemon.worker.source import Source
from benchd.exporters import files
from benchd.exporters.artifacts import Artifact
from benchd.exporters.files import Precision
from benchd.models import demo


class _File(NamedTuple):
    job: Job
    precision: Precision
    batch: int | None

    def __str__(self) -> str:
        return f"{self.job.case.model} {self.precision} batch {self.batch or 'dynamic'}"


def main() -> int:
    """Export the requested files; return 0, 1 if one could not be made, 2 for a usage error, 7 if one is missing."""
    sys.stderr, _ = lasting(sys.stderr, STDERR, ticker_of(sys.stderr))
    request = msgspec.json.decode(sys.stdin.buffer.read(), type=ExportRequest)
    try:
        with redirect_stdout(sys.stderr):  # because libraries print to stdout
            exported, wanted = _made(request)
    except BenchdError as error:
        sys.stderr.write(f"error: {error}\n")
        return 7 if isinstance(error, NotAvailable) else 2
    sys.stdout.buffer.write(msgspec.json.encode(exported, enc_hook=str))
    return int(len(exported) < wanted)


def _made(request: ExportRequest) -> tuple[list[Artifact], int]:
    if request.to == "tensorrt" and (None in request.batches or not torch.cuda.is_available()):
        raise NotAvailable("an engine is built on the GPU that will run it, for one batch size; --to onnx needs no GPU")
    wanted = list(_wanted(request))
    exported: list[Artifact] = []
    for number, file in enumerate(wanted, 1):
        sys.stderr.write(f"[{number}/{len(wanted)}] {file}\n")
        try:
            exported.append(_export(request, file))
        except Exception as error:  # torch, ONNX and TensorRT may raise anything; the other files are still exported
            sys.stderr.write(f"error: {file}: {str(error).strip() or type(error).__name__}\n")
    if request.out and request.single and exported:
        _copy(exported[0].path, Path(request.out))
    return exported, len(wanted)


def _wanted(request: ExportRequest) -> Iterator[_File]:
    names, models = sorted(request.options), [request.own.model] if request.own else request.models
    for model, *chosen in product(models, *(request.options[name] for name in names)):
        given: dict[str, OptionValue] = dict(zip(names, chosen, strict=True))
        if request.inputs.weights == demo.DEMO:
            given = demo.complete(model, given)
        entry = entry_of(model, request.own)
        options = entry.resolve(given) if entry else given
        for precision, batch in product(request.precisions, request.batches):
            yield _File(_job(request, model, options, precision, batch), precision, batch)


def _job(
    request: ExportRequest, model: str, options: dict[str, OptionValue], precision: Precision, batch: int | None
) -> Job:
    engine = request.to == "tensorrt"
    variant = Variant("tensorrt" if engine else "onnxruntime", precision)
    requested = request.inputs.weights
    weights, data = (requested, None) if request.own else demo.sources(model, options, requested, None)
    return Job(
        case=Case(model=model, variant=variant, batch_size=batch or 1, options=options, seed=request.seed),
        limits=msgspec.structs.replace(PRESETS["quick"], build_deadline_s=math.inf),
        device="cuda" if engine else "cpu",
        cache=str(folders.cache()),
        own=request.own,
        inputs=msgspec.structs.replace(request.inputs, weights=weights, data=data),
        artifacts=str(request.folder),
        workspace_bytes=request.workspace_bytes,
        calibration_images=request.calibration_images,
    )


def _export(request: ExportRequest, file: _File) -> Artifact:
    built = workload.build(file.job)
    if request.to == "onnx":
        form = files.form(file.job.options, "cpu")
        made_for = request.quantised_for or files.quantised_for("cpu")
        return built.source.export(file.precision, file.batch, form and (request.form or form), made_for)
    case = file.job.case
    backends.load(case.variant, built.source, torch.device("cuda"), built.example(case.batch_size))
    return _engine(built.source)


def _engine(source: Source) -> Artifact:
    return next(artifact for artifact in source.store.list() if artifact.path == source.built[PLAN])


def _copy(source: Path, target: Path) -> None:
    """Copy the file to `target` atomically; raise UsageError if that fails."""
    try:
        with source.open("rb") as content:
            folders.replace(target, content)
    except OSError as error:
        raise UsageError(f"--output {target}: {error.strerror}") from error


if __name__ == "__main__":
    sys.exit(main())
