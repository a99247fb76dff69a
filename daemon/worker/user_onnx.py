"""A user's own ONNX file as a module, run by ONNX Runtime on the CPU, which is the reference for its variants."""

import copy
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from benchd.daemon.errors import UnfitModel, Unsupported
from benchd.daemon.measuring import user_onnx
from benchd.daemon.records import InputSpec, Variant, WorkCount
from benchd.daemon.runtimes import FILE_BACKENDS, Precision
from benchd.daemon.worker import onnx_answers
from benchd.daemon.worker.structures import Tensors, dtype_of
from benchd.exporters import artifacts, onnx_cost, onnx_files, sessions
from benchd.exporters.artifacts import Artifact, sha256_of


class OnnxModule(nn.Module):
    """The file as a module, on the CPU and without graph optimisation: the reference for its variants.

    `given` defines the sizes and ranges that the file leaves open. Raises UsageError for a file that cannot be
    measured.
    """

    def __init__(self, path: Path, given: Sequence[InputSpec]) -> None:
        super().__init__()
        self.inputs, self.batch_size = user_onnx.reads(path, given)  # raises UsageError for a file that cannot be read
        self.path, self.sha256 = path, sha256_of(path, *onnx_files.data_files(path))
        self.is_quantised = user_onnx.precision(path) == "int8"
        self._session: Any = None

    def __deepcopy__(self, memo: object) -> "OnnxModule":
        return self  # it has no state that could change

    def rounded(self, share: float, seed: int, *, floating: bool) -> "OnnxModule":
        """Return the file with random errors in its computations, added by `onnx_files.rounded`."""
        noisy = copy.copy(self)
        edited = onnx_files.rounded(self.path, share, seed, floating=floating)
        noisy._session = sessions.open_session(self.path, level=sessions.LOWER[-1], edited=edited)
        return noisy

    @property
    def sizes(self) -> set[int]:
        """Return the sizes of the stored tensors."""
        return onnx_files.sizes_of(self.path)

    @property
    def outputs(self) -> list[str]:
        """Return the names of the outputs."""
        return [output.name for output in self._opened().get_outputs()]

    @property
    def answers_numbers(self) -> bool:
        """Return whether the outputs are neither strings nor maps."""
        return onnx_answers.are_numbers(self._opened())

    @property
    def casts_to(self) -> str:
        """Return the half-precision formats to which a float32 file casts; empty if there are none."""
        return ", ".join(onnx_files.half(self.path)) if user_onnx.precision(self.path) == "fp32" else ""

    @property
    def why_changing(self) -> str:
        """Return why the answer to the same inputs may change between runs, if the file says."""
        drawing = ", ".join(onnx_files.drawing(self.path))
        return f"{self.path.name} draws random numbers ({drawing}): export it in eval mode" if drawing else ""

    def count(self, inputs: Sequence[Tensor]) -> WorkCount:
        """Return the work of one run on these inputs."""
        return onnx_cost.count(
            self.path, {spec.name: list(value.shape) for spec, value in zip(self.inputs, inputs, strict=True)}
        )

    def require_session(self) -> None:
        """Raise Unsupported if ONNX Runtime cannot run the file, so that no variant has a reference."""
        try:
            self._opened()
        except sessions.SessionError as error:
            raise Unsupported(str(error)) from error

    def _opened(self) -> Any:
        self._session = self._session or sessions.open_session(self.path, level=sessions.LOWER[-1])
        return self._session

    def forward(self, *inputs: Tensor) -> Tensor | Tensors:
        """Return the outputs for inputs in the file's order, with floats of any type."""
        feeds = {
            spec.name: value.to(dtype_of(spec)).cpu().numpy() for spec, value in zip(self.inputs, inputs, strict=True)
        }
        tensors = [torch.as_tensor(onnx_answers.numbers(value)) for value in self._opened().run(None, feeds)]
        return tensors[0] if len(tensors) == 1 else Tensors(dict(zip(self.outputs, tensors, strict=True)))


def artifact(path: Path, asked: Precision, sha256: str) -> Artifact:
    """Return the user's file as an artifact.

    Raises Unsupported if it computes in a different precision, and UnfitModel if it has changed.
    """
    own = user_onnx.precision(path)
    if asked != own:
        *others, last = (Variant(backend, own).name for backend in FILE_BACKENDS)
        raise Unsupported(f"{path.name} is in {own}; request {', '.join(others)} or {last}")
    stored = artifacts.given(path, onnx_files.data_files(path), format="onnx", model=path.stem, precision=own)
    if stored.metadata.sha256 != sha256:
        raise UnfitModel(f"{path.name} was replaced while it was measured: leave it alone until the run ends")
    return stored
