"""TensorRT: an engine is built from the ONNX file, stored by everything that it depends on, and run as a CUDA graph.

Runs alternate between two slots, each with its own context, buffers and graph, so that two may be in flight. A run
overwrites the output of the run before the previous one.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from benchd.daemon.errors import Unsupported
from benchd.daemon.records import RuntimeFacts
from benchd.daemon.runtimes import Precision
from benchd.daemon.shipping.manifest import PLAN, REBUILT, TIMINGS
from benchd.daemon.worker.backends import LayerRun, LoadedModel
from benchd.daemon.worker.backends.cudagraph import SLOTS, Slot, capture, rotating
from benchd.daemon.worker.source import Source, answer, paths
from benchd.daemon.worker.structures import Batch, float_type
from benchd.exporters import artifacts, tensorrt
from benchd.exporters.artifacts import Artifact
from benchd.exporters.tensorrt import Context, Engine, EngineBuild, ForeignPlan

if TYPE_CHECKING:
    from benchd.exporters.tensorrt_api import TensorRT

DTYPES = {
    "FLOAT": torch.float32,
    "HALF": torch.float16,
    "BF16": torch.bfloat16,
    "INT64": torch.int64,
    "INT32": torch.int32,
    "INT8": torch.int8,
    "UINT8": torch.uint8,
    "BOOL": torch.bool,
}


def file(source: Source, precision: Precision, device: torch.device, batch: int) -> Artifact:
    """Return the file from which the engine is built, exporting it if it does not exist."""
    return source.onnx(precision, batch, target="tensorrt")


def load(source: Source, precision: Precision, device: torch.device, example: Batch) -> LoadedModel:
    """Return the engine, ready to run; without a working CUDA device, TensorRT is not even imported."""
    if device.type != "cuda":
        raise Unsupported("TensorRT needs a CUDA device")
    _refuse_open(source)
    try:
        trt = tensorrt.load()
        onnx = file(source, precision, device, len(example))
        start = time.monotonic()
        engine, artifact, built, notes = _engine(trt, source, onnx, precision, len(example))
    except (tensorrt.TensorRtUnavailable, tensorrt.OutOfMemory, tensorrt.NoLayerOnDla) as error:
        raise Unsupported(str(error)) from error
    slots, refusals = zip(*(_slot(engine, paths(onnx), len(example), device) for _ in range(SLOTS)), strict=True)
    facts = RuntimeFacts(
        provider=f"TensorRT {trt.__version__}",
        node_shares=_shares(engine.recipe.dla_share),
        typing=engine.recipe.typing,
        cuda_graph=not any(refusals),
        build_s=built.seconds if built else None,
        load_s=time.monotonic() - start - (built.seconds if built else 0.0),
        engine_bytes=artifact.metadata.bytes,
        workspace_bytes=engine.recipe.workspace_bytes,
        context_bytes=engine.device_memory_bytes,
        notes=[*notes, f"{engine.aux_streams} auxiliary streams", *filter(None, refusals[:1])],
    )
    run = of_images(source, rotating(slots))
    layer_times = partial(_layer_times, engine, source, len(example), device)
    dtype = float_type(buffer.dtype for buffer in slots[0].inputs)
    return LoadedModel(run, dtype, device, None, runtime=facts, layer_times=layer_times)


def packages(loaded: LoadedModel) -> dict[str, str]:
    """Return the packages needed to run the file where it is deployed."""
    built_by = loaded.runtime.provider.partition(" ")[2] if loaded.runtime else ""
    return {"torch": version("torch"), "tensorrt": built_by}


def _refuse_open(source: Source) -> None:
    """Raise Unsupported for a user's file with an open size that the engine would mistake for the batch."""
    if not source.own:
        return
    from benchd.daemon.measuring import user_onnx  # noqa: PLC0415 - onnx is not needed for files of the store

    if names := user_onnx.open_inputs(source.own):
        raise Unsupported(
            f"{source.own.name} has dynamic sizes other than the batch in {', '.join(names)}: export it with fixed "
            "sizes, or use onnxruntime"
        )


def of_images(source: Source, run: Callable[..., Batch]) -> Callable[..., Batch]:
    """Return `run`, which takes the file's inputs, as a function of images and the model's random numbers."""
    return lambda *inputs: run(*source.inputs(*inputs))


def _engine(
    trt: TensorRT, source: Source, onnx: Artifact, precision: Precision, batch: int
) -> tuple[Engine, Artifact, EngineBuild | None, list[str]]:
    """Return the engine, its artifact, the build if it was just built, and notes on the build."""
    given = artifacts.given(source.engine) if source.engine else None
    artifact, built = (given, None) if given else _plan(trt, source, onnx, precision, batch)
    origin = f"{artifact.metadata.made_at} on {artifact.metadata.made_on}".removesuffix(" on ")
    notes = [f"engine built at {origin}"] if artifact.reused else []
    try:
        engine = Engine(trt, artifact.path, source.dla)
    except ForeignPlan as error:
        notes = [f"{REBUILT}{error}"]
        artifact, built = _plan(trt, source, onnx, precision, batch, anew=given is None)
        engine = Engine(trt, artifact.path, source.dla)
    times = tensorrt.timing_cache_path(trt.__version__, tensorrt.gpu_name())
    source.built.update({name: path for name, path in ((PLAN, artifact.path), (TIMINGS, times)) if path.exists()})
    return engine, artifact, built, [*notes, *([built.note] if built and built.note else [])]


def _plan(
    trt: TensorRT, source: Source, onnx: Artifact, precision: Precision, batch: int, *, anew: bool = False
) -> tuple[Artifact, EngineBuild | None]:
    """Return the plan in the store, and the build if it was missing or had to be rebuilt."""
    gpu = tensorrt.gpu_name()
    # the default limit is left out: it depends on the currently free memory, which is no reason to rebuild
    flags = [*tensorrt.FLAGS, *([f"workspace={source.workspace_bytes}"] if source.workspace_bytes else [])]
    flags += [] if source.dla is None else [f"dla={source.dla}"]
    labels = {name: onnx.metadata.facts[name] for name in ("model", "precision") if name in onnx.metadata.facts}
    capability = torch.cuda.get_device_capability()
    facts = labels | tensorrt.engine_facts(onnx.metadata.sha256, trt.__version__, gpu, capability, flags, batch)
    builds: list[EngineBuild] = []

    def write(plan: Path) -> None:
        builds.append(
            tensorrt.build(
                trt,
                onnx.path,
                plan,
                batch,
                workspace_bytes=source.workspace_bytes or tensorrt.default_workspace_bytes(),
                timing_cache=tensorrt.timing_cache_path(trt.__version__, gpu),
                precision=precision,
                dla=source.dla,
                limit_s=source.build_limit_s,
            )
        )

    make = source.store.put if anew else source.store.produce
    return make(facts, write), builds[0] if builds else None


def _shares(dla_share: float | None) -> dict[str, float]:
    """Return the share of layers on the DLA and of those that fell back to the GPU; empty without a DLA."""
    return {} if dla_share is None else {"DLA": dla_share, "GPU": 1 - dla_share}


def _slot(engine: Engine, paths: Mapping[str, str], batch: int, device: torch.device) -> tuple[Slot, str]:
    """Return a slot and, if it has to run without a CUDA graph, the reason."""
    context, tensors = _bound(engine, batch, device)
    inputs = [tensors[name] for name in engine.inputs]
    output = answer(tensors, paths)

    def run() -> Batch:
        context.run(torch.cuda.current_stream().cuda_stream)
        return output

    try:
        graph, _ = capture(run)
    except Unsupported as error:
        return Slot(inputs, _beside(run), output, (context, tensors)), str(error)
    return Slot(inputs, graph.replay, output, (context, tensors)), ""


def _bound(engine: Engine, batch: int, device: torch.device) -> tuple[Context, dict[str, Tensor]]:
    """Return a context of the engine, and the memory that it reads and writes, by name."""
    context, shapes = engine.context(), engine.shapes(batch)
    shapes = shapes | context.set_shapes(shapes)
    tensors = {name: torch.zeros(shape, dtype=_dtype(engine, name), device=device) for name, shape in shapes.items()}
    context.bind({name: tensor.data_ptr() for name, tensor in tensors.items()})
    return context, tensors


def _layer_times(
    engine: Engine, source: Source, batch: int, device: torch.device, runs: int, *inputs: Tensor
) -> list[list[LayerRun]]:
    """Return the layers of each of several runs on these inputs, in a separate context."""
    context, tensors = _bound(engine, batch, device)
    for name, value in zip(engine.inputs, source.inputs(*inputs), strict=True):
        tensors[name].copy_(value)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    return [[LayerRun(*row) for row in run] for run in context.layer_times(stream.cuda_stream, runs)]


def _dtype(engine: Engine, name: str) -> torch.dtype:
    dtype = engine.dtype(name)
    if dtype not in DTYPES:
        raise Unsupported(f"the engine's {name} is {dtype}, a type that torch does not have")
    return DTYPES[dtype]


def _beside(run: Callable[[], Batch]) -> Callable[[], None]:
    """Return `run` on a separate stream, ordered after the current one: TensorRT synchronises on the default stream."""
    stream = torch.cuda.Stream()

    def launch() -> None:
        current = torch.cuda.current_stream()
        stream.wait_stream(current)
        with torch.cuda.stream(stream):
            run()
        current.wait_stream(stream)

    return launch
