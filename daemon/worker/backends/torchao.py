"""Int8 within PyTorch on an x86 CPU: torchao quantises the exported graph, and inductor compiles it."""

import time
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from importlib import import_module
from importlib.metadata import version
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch import _inductor as inductor
from torch.fx import GraphModule
from torch.profiler import ProfilerActivity

from benchd.daemon.errors import Unsupported
from benchd.daemon.machine.installed import adding
from benchd.daemon.records import RuntimeFacts
from benchd.daemon.runtimes import Precision
from benchd.daemon.worker.backends import LoadedModel
from benchd.daemon.worker.source import Source
from benchd.daemon.worker.structures import Batch, values
from benchd.exporters.calibrated import CannotQuantise

_IN_INT8 = ("onednn::qconv", "onednn::qlinear")


def load(source: Source, precision: Precision, device: torch.device, example: Batch) -> LoadedModel:
    """Return the compiled quantised graph; raise Unsupported unless every layer quantised to int8 runs in int8."""
    if getattr(source.module, "encoding", None) == "rate":
        raise Unsupported("a model that draws random numbers cannot be exported for torchao: use onnxruntime-int8")
    pt2e, start, inputs = _quantiser(), time.monotonic(), values(example)
    try:
        prepared = pt2e.PreparedModule(source.module, inputs)
        graph = prepared.converted(source.ranges(len(example), prepared.calibrate).path)
    except CannotQuantise as error:
        raise Unsupported(str(error)) from error
    run = _compiled(graph, inputs)
    ran = in_int8(run, inputs)
    if ran.total() < len(prepared.layers):
        raise Unsupported(
            f"of the {len(prepared.layers)} products that torchao quantised, inductor runs only {ran.total()} in int8 "
            "and the others in float: use onnxruntime-int8"
        )
    facts = RuntimeFacts(
        provider=f"torchao {version('torchao')}",
        load_s=time.monotonic() - start,
        notes=[f"products in int8: {', '.join(f'{count} {name}' for name, count in ran.most_common())}"],
    )
    return LoadedModel(run, torch.float32, device, None, runtime=facts)


def _compiled(graph: GraphModule, inputs: Sequence[Tensor]) -> Callable[..., Any]:
    """Return the graph, compiled with constant weights, outside inference mode so that inductor can pack them."""
    with warnings.catch_warnings(), torch.inference_mode(mode=False), torch.no_grad():
        warnings.filterwarnings("ignore", "To copy construct from a tensor")  # torch itself causes this warning
        run: Callable[..., Any] = inductor.compile(graph, list(inputs), options={"freezing": True})
    return run


def in_int8(run: Callable[..., Any], inputs: Sequence[Tensor]) -> Counter[str]:
    """Return how often one run calls each of oneDNN's int8 products, by name."""
    with torch.inference_mode():
        # not counted: in the first run, inductor inspects arguments and therefore calls each product twice
        run(*inputs)
        with torch.profiler.profile(activities=[ProfilerActivity.CPU]) as profile:
            run(*inputs)
    names = (event.name for event in profile.events())
    return Counter(name.partition("::")[2] for name in names if name.startswith(_IN_INT8))


def _quantiser() -> ModuleType:
    try:
        return import_module("benchd.exporters.pt2e")
    except Exception as error:  # a torchao that was built for a different torch may raise anything
        line = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise Unsupported(
            f"the installed torchao does not work with torch {torch.__version__}: {adding('int8')} ({line})"
        ) from error
