"""AOTInductor: torch.compile's output in a file, stored by its whole target; it loads without a compiler."""

import time
from collections import Counter
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import Tensor
from torch.export import ExportedProgram

from benchd.daemon.errors import Unsupported
from benchd.daemon.records import RuntimeFacts
from benchd.daemon.runtimes import Precision
from benchd.daemon.shipping.manifest import PACKAGE, REBUILT
from benchd.daemon.worker.backends import LoadedModel, eager
from benchd.daemon.worker.source import Source
from benchd.daemon.worker.structures import ONLY, Batch, InTuple, Tensors, cast, tensors, values
from benchd.exporters import aoti, artifacts, code, doubled
from benchd.exporters.aoti import Made
from benchd.exporters.artifacts import Artifact
from benchd.kernels import compiler

_NO_COMPILER = "an AOTInductor package is compiled by a C++ compiler: install g++ or set CXX, or use a shipped folder"


def load(source: Source, precision: Precision, device: torch.device, example: Batch) -> LoadedModel:
    """Return the package, ready to run; it is compiled if the store has none for this torch and this machine."""
    if getattr(source.module, "encoding", None) == "rate":
        raise Unsupported("a model that draws random numbers cannot be exported: use compile")
    start = time.monotonic()
    artifact, build_s, notes = _package(source, precision, device, example)
    loader = torch._C._aoti.AOTIModelPackageLoader(str(artifact.path), "model", False, 1, _index(device))
    source.built[PACKAGE] = artifact.path
    compiled_for = aoti.read(artifact.path)
    if source.kernels != "torch":
        notes.append(
            f"custom kernels in the package: {', '.join(f'{count} {name}' for name, count in compiled_for.ops.items())}"
        )
    facts = RuntimeFacts(
        provider=f"AOTInductor of torch {torch.__version__}",
        threads=torch.get_num_threads(),
        build_s=build_s,
        load_s=time.monotonic() - start - (build_s or 0.0),
        engine_bytes=artifact.metadata.bytes,
        notes=notes,
    )
    return LoadedModel(_run(loader, compiled_for.outputs), eager.DTYPES[precision], device, None, runtime=facts)


def _index(device: torch.device) -> int:
    return -1 if device.type == "cpu" else device.index or 0


def _run(loader: Any, outputs: list[str]) -> Callable[..., Batch]:
    """Return the package as a function of the model's inputs, with answers at these paths."""

    def run(*inputs: Tensor) -> Batch:
        answers = loader.boxed_run(list(inputs))
        return answers[0] if outputs == [ONLY] else Tensors(dict(zip(outputs, answers, strict=True)))

    return run


def _package(
    source: Source, precision: Precision, device: torch.device, example: Batch
) -> tuple[Artifact, float | None, list[str]]:
    """Return the package, the build time in seconds if it was just compiled, and notes on the build."""
    gpu = torch.cuda.get_device_name(device) if device.type == "cuda" else ""
    wanted = Made(torch=version("torch"), cpu=compiler.cpu(), gpu=gpu, threads=torch.get_num_threads())
    notes = []
    if source.engine:
        if not (why := aoti.read(source.engine).differs(wanted)):
            return artifacts.given(source.engine), None, []
        notes.append(f"{REBUILT}{PACKAGE} was compiled for {why}")
    facts = {
        "model": source.model,
        "precision": precision,
        "format": aoti.FORMAT,
        "options": dict(source.options),
        "weights_sha256": source.weights_sha256,
        "kernels": source.kernels,
        "code_sha256": code.sha256(),
        "read": [[str(value.dtype), list(value.shape)] for value in values(example)],
        "torch": wanted.torch,
        "cpu": wanted.cpu,
        "gpu": gpu,
        "threads": wanted.threads,
        **source.scope,
    }
    start = time.monotonic()
    artifact = source.store.produce(facts, lambda path: _compile(source, precision, device, example, path, wanted))
    return artifact, None if artifact.reused else time.monotonic() - start, notes


def _compile(
    source: Source, precision: Precision, device: torch.device, example: Batch, path: Path, wanted: Made
) -> None:
    """Compile the module for inputs of the example's sizes and write the package to `path`."""
    module = doubled.copied(source.module).to(device, eager.DTYPES[precision])
    inputs = values(cast(example, eager.DTYPES[precision]).to(device))
    with torch.inference_mode(mode=False), torch.no_grad():
        given = tuple(value.clone() for value in inputs)
        outputs = list(tensors(module(*given)))
        try:
            program = torch.export.export(InTuple(module), given, strict=False)
            ops = _ours(program)
            if source.kernels != "torch" and not ops:
                raise Unsupported("the exported graph does not call any custom kernels: use custom-compile")
            compiled_for = msgspec.structs.replace(wanted, outputs=outputs, ops=ops)
            settings = {"aot_inductor.metadata": aoti.metadata(compiled_for)}
            torch._inductor.aoti_compile_and_package(program, package_path=str(path), inductor_configs=settings)
        except Unsupported:
            raise
        except Exception as error:  # torch's many stages may raise anything
            reason = (str(error).strip() or type(error).__name__).splitlines()[0]
            lacks = "InvalidCxxCompiler" in f"{error!r}"
            raise Unsupported(_NO_COMPILER if lacks else f"torch cannot compile it ahead of time: {reason}") from error
    aoti.keep_library(path)


def _ours(program: ExportedProgram) -> dict[str, int]:
    """Return how often a program calls each of our kernels' ops."""
    targets = (node.target for node in program.graph.nodes if node.op == "call_function")
    ours = (op.name() for op in targets if isinstance(op, torch._ops.OpOverload) and op.namespace == "benchd")
    return dict(Counter(name.partition("::")[2] for name in ours))
