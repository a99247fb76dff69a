"""torch.compile with the inductor backend; shapes are static, except the length axis if items differ in length."""

import re
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from benchd.daemon.errors import Unsupported
from benchd.daemon.runtimes import Precision
from benchd.daemon.worker.backends import LayerRun, LoadedModel, eager
from benchd.daemon.worker.source import Source
from benchd.daemon.worker.structures import Batch, Tensors, cast, values

_GRAPHS = ("## Call CompiledFxGraph", "Torch-Compiled Region")  # the second one is from torch 2.8
_KERNEL = re.compile(r"^graph_\d+_cpp_(.*)_\d+$|^aten::")


def load(source: Source, precision: Precision, device: torch.device, example: Batch) -> LoadedModel:
    """Return the compiled module; it is compiled here, so that this counts as loading, not as part of the first run."""
    plain = eager.load(source, precision, device, example)
    given = cast(example, plain.dtype).to(device)
    varies = [given.named[name] for name in given.lengths] if isinstance(given, Tensors) else []
    run = torch.compile(plain.run, dynamic=None if varies else False)
    try:
        with torch.inference_mode():
            for value in varies:
                torch._dynamo.maybe_mark_dynamic(value, 1)
            run(*values(given))
    except torch._dynamo.exc.BackendCompilerFailed as error:
        if "InvalidCxxCompiler" in str(error):
            raise Unsupported("torch.compile needs a C++ compiler on the CPU; install g++ or set CXX") from error
        raise
    except torch._dynamo.exc.TorchRuntimeError:
        plain.run(*values(given))  # an error in this run shows the line of the model
        raise
    layer_times = None if device.type != "cpu" or varies else partial(_layer_times, plain.run)
    return LoadedModel(run, plain.dtype, device, None, layer_times=layer_times)


def _layer_times(plain: Callable[..., Any], runs: int, *inputs: Tensor) -> list[list[LayerRun]]:
    """Return the kernels of each run; the module is recompiled, so that its kernels record their times."""
    torch._dynamo.reset()
    with torch._inductor.config.patch({"cpp.enable_kernel_profile": True}):
        run = torch.compile(plain, dynamic=False)
        run(*inputs)
        return [_profiled(run, *inputs) for _ in range(runs)]


def _profiled(run: Callable[..., Any], *inputs: Tensor) -> list[LayerRun]:
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        run(*inputs)
    rows, counts = [], Counter[str]()
    for event in profiler.events() or ():
        is_kernel = "::" in event.name or _KERNEL.match(event.name)
        if is_kernel and event.cpu_parent and event.cpu_parent.name.startswith(_GRAPHS):
            kind = _KERNEL.sub(r"\1", event.name)
            counts[kind] += 1
            rows.append(LayerRun(f"{kind} {counts[kind]}", event.cpu_time_total / 1e3, kind))
    return rows
