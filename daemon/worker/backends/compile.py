"""torch.compile with the inductor back end, static shapes, on a CPU with the weights as constants."""

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from benchd.daemon.errors import Unsupported
from benchd.daemon.records import Precision, RuntimeFacts
from benchd.daemon.worker.backends import Loaded, eager
from benchd.daemon.worker.source import Source
from benchd.daemon.worker.structures import Batch, cast, values
from benchd.exporters import inductor


def load(source: Source, precision: Precision, device: torch.device, example: Batch) -> Loaded:
    """Return the compiled module; compilation happens here, so that it counts as loading, not as the first run.

    Nothing can write to a frozen weight unseen: the compiled copy is reachable from nowhere else, and a module that
    writes to its own tensors is not frozen.
    """
    plain = eager.load(source, precision, device, example)
    given = values(cast(example, plain.dtype).to(device))
    is_frozen = device.type == "cpu" and not _writes(eager.load(source, precision, device, example), given)
    _freeze(is_frozen)
    run = torch.compile(plain.run, dynamic=False)
    try:
        with torch.inference_mode():
            run(*given)
    except torch._dynamo.exc.BackendCompilerFailed as error:
        if "InvalidCxxCompiler" in str(error):
            raise Unsupported("torch.compile needs a C++ compiler on the CPU; install g++ or set CXX") from error
        raise
    except torch._dynamo.exc.TorchRuntimeError:
        plain.run(*given)  # its error names the line of the model
        raise
    facts = RuntimeFacts(provider=inductor.FROZEN if is_frozen else inductor.PLAIN, threads=torch.get_num_threads())
    return Loaded(run, plain.dtype, device, None, runtime=facts)


def _freeze(is_frozen: bool) -> None:
    """Freeze what this process compiles from now on, or not; as an option of torch.compile it would come too late."""
    import torch._inductor.config as settings  # noqa: PLC0415 - only this backend waits for its import

    settings.freezing = is_frozen


def _writes(probe: Loaded, given: tuple[Tensor, ...]) -> bool:
    """Return whether a run writes to a tensor of the module: between two graphs, a constant would not see that."""
    if probe.module is None:
        return False
    before = [value._version for value in _tensors(probe.module)]
    with torch.inference_mode():
        probe.run(*given)
    return before != [value._version for value in _tensors(probe.module)]


def _tensors(module: nn.Module) -> Iterator[Tensor]:
    for part in module.modules():
        for held in (part._parameters, part._buffers, vars(part)):
            yield from (value for value in held.values() if isinstance(value, Tensor))
