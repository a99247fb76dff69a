"""A user's own ONNX file as a module: run by ONNX Runtime on the CPU, it is the reference of its variants."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from benchd.daemon.errors import UnfitModel, Unsupported
from benchd.daemon.measuring import user_onnx
from benchd.daemon.records import FILE_BACKENDS, InputSpec, Precision, Variant
from benchd.daemon.worker.structures import Tensors, dtype_of
from benchd.exporters import artifacts, onnx_files, sessions
from benchd.exporters.artifacts import Artifact, sha256_of


class UserFile(nn.Module):
    """The file as a module, on the CPU and without graph optimisation: the reference of its variants.

    `given` fixes what the file leaves open. Raises UsageError for a file that cannot be measured.
    """

    def __init__(self, path: Path, given: Sequence[InputSpec]) -> None:
        super().__init__()
        self.inputs, self.batch_size = user_onnx.reads(path, given)  # refuses a file that cannot be read
        self.path, self.sha256 = path, sha256_of(path)
        self.is_quantised = user_onnx.precision(path) == "int8"
        self._session: Any = None

    def __deepcopy__(self, memo: object) -> "UserFile":
        return self  # nothing in it changes

    @property
    def outputs(self) -> list[str]:
        """Return the names of the outputs."""
        return [output.name for output in self._opened().get_outputs()]

    @property
    def casts_to(self) -> str:
        """Return the number formats below its own that a file in float32 casts to, empty for none."""
        return ", ".join(onnx_files.half(self.path)) if user_onnx.precision(self.path) == "fp32" else ""

    @property
    def why_changing(self) -> str:
        """Return why its answer to the same inputs would change between runs."""
        if drawing := onnx_files.drawing(self.path):
            return f"{self.path.name} draws random numbers ({', '.join(drawing)}): export it in eval mode"
        return (
            f"no operator of {self.path.name} draws random numbers, so ONNX Runtime reads or returns memory that no "
            "operator writes: leave that output out, or give other inputs"
        )

    def answer_again(self, *inputs: Tensor) -> Tensor | Tensors:
        """Return the outputs of a run into memory that holds other values than its answer: one not written differs."""
        session, feeds = self._opened(), self._feeds(inputs)
        binding = session.io_binding()
        for name, value in feeds.items():
            binding.bind_cpu_input(name, value)
        memory = [_unlike(answer) for answer in session.run(None, feeds)]
        for name, place in zip(self.outputs, memory, strict=True):
            at = ["cpu", 0, place.dtype.type, place.shape, place.ctypes.data] if place.size else []
            binding.bind_output(name, *at)
        session.run_with_iobinding(binding)
        return self._answer(memory)

    def _feeds(self, inputs: Sequence[Tensor]) -> dict[str, NDArray[Any]]:
        """Return the inputs by name, in the file's types."""
        return {
            spec.name: value.to(dtype_of(spec)).cpu().numpy() for spec, value in zip(self.inputs, inputs, strict=True)
        }

    def _opened(self) -> Any:
        self._session = self._session or sessions.open_session(self.path, level=sessions.LOWER[-1])
        return self._session

    def forward(self, *inputs: Tensor) -> Tensor | Tensors:
        """Return the outputs for inputs in the file's order, with floats of any type."""
        return self._answer(self._opened().run(None, self._feeds(inputs)))

    def _answer(self, outputs: Sequence[Any]) -> Tensor | Tensors:
        found = [torch.as_tensor(value) for value in outputs]
        return found[0] if len(found) == 1 else Tensors(dict(zip(self.outputs, found, strict=True)))


def _unlike(answer: NDArray[Any]) -> NDArray[Any]:
    """Return an array whose every element differs from the answer's."""
    return (
        ~answer if answer.dtype == bool else (~answer.ravel().view(np.uint8)).view(answer.dtype).reshape(answer.shape)
    )


def artifact(path: Path, asked: Precision, sha256: str) -> Artifact:
    """Return the user's file as an artifact.

    Raises Unsupported if it computes in another precision, and UnfitModel if it has changed.
    """
    own = user_onnx.precision(path)
    if asked != own:
        *others, last = (Variant(backend, own).name for backend in FILE_BACKENDS)
        raise Unsupported(f"{path.name} is written in {own}; ask for {', '.join(others)} or {last}")
    found = artifacts.given(path, format="onnx", model=path.stem, precision=own)
    if found.metadata.sha256 != sha256:
        raise UnfitModel(f"{path.name} was replaced while it was measured: leave it alone until the run ends")
    return found
