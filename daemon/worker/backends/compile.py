"""torch.compile with the inductor back end, static shapes except the length of items that differ in it."""

import torch

from benchd.daemon.errors import Unsupported
from benchd.daemon.runtimes import Precision
from benchd.daemon.worker.backends import Loaded, eager
from benchd.daemon.worker.source import Source
from benchd.daemon.worker.structures import Batch, Tensors, cast, values


def load(source: Source, precision: Precision, device: torch.device, example: Batch) -> Loaded:
    """Return the compiled module; compilation happens here, so that it counts as loading, not as the first run."""
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
        plain.run(*values(given))  # its error names the line of the model
        raise
    return Loaded(run, plain.dtype, device, None)
