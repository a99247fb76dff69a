"""Exports a built model to an ONNX file of standard operators, and proves that the file computes that model.

The precision is part of the graph: an fp16 file has float16 weights, inputs and outputs, and float32 wherever the model
uses it. A model that draws random numbers is exported without its encoder. torch's exporter is not trusted: it may
declare a batch size dynamic although it traced a fixed one, or write a different opset than requested.
"""

import copy
import inspect
import logging
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

import msgspec
import numpy as np
import onnx
import onnx_ir
import onnxscript.optimizer
import torch
from onnx_ir.passes import common
from torch import Tensor, nn

from benchd.exporters import artifacts, doubled, onnx_files, parity, recurrence, sessions
from benchd.exporters.files import ONLY_OUTPUT, OPSET, FloatPrecision, Form
from benchd.exporters.parity import Parity

INPUT, BATCH = "inputs", "batch"
DYNAMIC_BATCHES = (1, 2, 5)
LEAST_IMAGES = 8
INLINE_BYTES = 2**31 - 2**24  # protobuf's limit, minus the size of the graph

_DTYPES = {"fp32": torch.float32, "fp16": torch.float16}
_TRACED_BATCH = 2  # torch treats a batch size of one as a constant


class ExportError(Exception):
    """A model cannot be exported, or the file is not as requested; the message says why."""


class NotExportable(ExportError):
    """torch cannot export the model, or ONNX Runtime cannot load the result; the message says why."""


class ExportFacts(msgspec.Struct, frozen=True):
    """Facts about a checked file; without ONNX Runtime `parity` is null and `unchecked` says so.

    `outputs` are the output names in the file, where a name that an input also uses is changed.
    """

    opset: int
    nodes: int
    outputs: list[str]
    form: Form | None
    input_shape: list[int | str]
    export_s: float
    load_s: float | None = None
    parity: Parity | None = None
    unchecked: str = ""


def export(
    module: nn.Module,
    images: Tensor | Mapping[str, Tensor],
    path: Path,
    *,
    precision: FloatPrecision,
    batch: int | None,
    form: Form | None,
    judged_by: Literal["outputs", "codes"],
    outputs: Sequence[str] = (ONLY_OUTPUT,),
    axes: Mapping[str, int | None] = MappingProxyType({}),
    lengths: Mapping[str, Tensor] = MappingProxyType({}),
    inline_bytes: int = INLINE_BYTES,
) -> ExportFacts:
    """Write `module`, float32 in eval mode on the CPU, to `path`; return facts about the file.

    `images` (n, ...) are the inputs for the comparison, by their names in the file if there are several. `axes` gives
    the axis of n where it is not the first, or None for an input shared by the batch. For inputs with `lengths`, the
    next axis is dynamic, up to the length of `images`, and inputs with the same lengths share it. The module returns a
    tensor for each of `outputs`, in a tuple if there are several. `batch` None leaves the batch dynamic. Weights above
    `inline_bytes` go to a second file. Raises ExportError, leaving no incomplete or wrong file behind.
    """
    start = time.monotonic()
    named = images if isinstance(images, Mapping) else {INPUT: images}
    given = {name: (values, axes.get(name, 0)) for name, values in named.items()}
    ready = _prepared(module, precision)
    repeated = [_repeated(values, axis, range(batch or _TRACED_BATCH)) for values, axis in given.values()]
    examples = [_inputs(module, repeated[0]), *repeated[1:]]
    # time steps, if any, are the first axis
    steps = len(examples[0].shape) - len(repeated[0].shape)
    lead = [axis if axis is None else axis + (0 if place else steps) for place, (_, axis) in enumerate(given.values())]
    sizes = [{axis: BATCH} if batch is None and axis is not None else {} for axis in lead]
    of_length = list(dict.fromkeys(tuple(item_lengths.tolist()) for item_lengths in lengths.values()))
    for place, name in enumerate(given):
        if name in lengths:
            sizes[place] = sizes[place] | {1: f"length{of_length.index(tuple(lengths[name].tolist()))}"}
    dynamic = sizes if any(sizes) else None
    names = list(given), list(outputs)
    model = _traced(ready, [_cast(example, _DTYPES[precision]) for example in examples], dynamic, names)
    _lowered(model, form)
    try:
        _save(model, path, inline_bytes)
        written = _checked(path, [list(example.shape) for example in examples], dynamic)
        export_s = time.monotonic() - start
        exported = ExportFacts(
            opset=OPSET,
            nodes=len(written.graph.node),
            outputs=[value.name for value in written.graph.output],
            form=form,
            input_shape=_shape(written.graph.input[0]),
            export_s=export_s,
        )
        return _proven(module, given, list(lengths), path, precision, batch, judged_by, exported)
    except Exception:
        for part in artifacts.parts(path):
            part.unlink(missing_ok=True)
        raise


def _save(model: onnx_ir.Model, path: Path, inline_bytes: int) -> None:
    """Write the model to one file, or to two, with large weights in the second, because a file is limited to 2 GB."""
    weights = (value.const_value for graph in model.graphs() for value in graph.initializers.values())
    is_small = sum(weight.nbytes for weight in weights if weight is not None) <= inline_bytes
    onnx_ir.save(model, path, external_data=None if is_small else path.name + artifacts.DATA)


def _prepared(module: nn.Module, precision: FloatPrecision) -> nn.Module:
    """Return a copy in this precision that does not recompute values derived from its weights in each run."""
    ready = doubled.copied(module).to(_DTYPES[precision]).eval().requires_grad_(False)
    freeze = getattr(ready, "freeze", None)
    if freeze:
        freeze()
    return _Encoder(ready) if hasattr(ready, "encoded") else ready


class _Encoder(nn.Module):
    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, inputs: Tensor) -> Tensor:
        encoded: Any = self.module.encoded
        return encoded(inputs)


def _inputs(module: nn.Module, images: Tensor) -> Tensor:
    """Return the file's input for these images; for a model with random encoding, that is a single random draw."""
    encode: Any = getattr(module, "encode", None)
    return images if encode is None else encode(images, _uniforms(module, images))


def _uniforms(module: nn.Module, images: Tensor) -> Tensor | None:
    if getattr(module, "encoding", None) != "rate":
        return None
    shape = (int(getattr(module, "time_steps")), *images.shape)  # noqa: B009 - of whichever module encodes by rate
    return torch.rand(shape, generator=torch.Generator().manual_seed(0))


def _repeated(values: Tensor, axis: int | None, places: Sequence[int]) -> Tensor:
    """Return the items at these places, repeated, as a copy: torch treats the sizes of a view's base as dynamic."""
    return values.clone() if axis is None else values.index_select(axis, torch.tensor(places) % values.shape[axis])


def _cast(value: Tensor, dtype: torch.dtype) -> Tensor:
    return value.to(dtype) if value.is_floating_point() else value


def _traced(
    module: nn.Module,
    examples: Sequence[Tensor],
    sizes: Sequence[Mapping[int, str]] | None,
    names: tuple[list[str], list[str]],
) -> onnx_ir.Model:
    """Return the graph that torch writes; raise ExportError if a dynamic size was traced with a different range."""
    longest = {
        name: example.shape[axis]
        for example, open_ones in zip(examples, sizes or [], strict=False)
        for axis, name in open_ones.items()
        if name != BATCH
    }
    dims = {name: torch.export.Dim(name, min=1, max=most) for name, most in longest.items()}
    dims[BATCH] = torch.export.Dim(BATCH, min=1)
    dynamic: Any = sizes and tuple({axis: dims[name] for axis, name in axes.items()} or None for axes in sizes)
    if dynamic and _gathers(module):
        dynamic = (dynamic,)
    try:
        with _quiet(), torch.no_grad():
            program = torch.onnx.export(
                module,
                tuple(examples),
                dynamo=True,
                opset_version=OPSET,
                optimize=False,
                verbose=False,
                dynamic_shapes=dynamic,
                input_names=names[0],
                output_names=names[1],
            )
    except Exception as error:  # its many stages may raise anything
        raise NotExportable(f"torch {torch.__version__} cannot export this: {_cause(error)}") from error
    if program is None or program.exported_program is None:
        raise ExportError(f"torch {torch.__version__} returned no exported program")
    constraints = program.exported_program.range_constraints
    if any(str(symbol).startswith("u") for symbol in constraints):
        raise NotExportable("cannot export a model whose sizes depend on the values of its inputs")
    ranges = list(constraints.values())
    opened = {name for axes in sizes or [] for name in axes.values()}
    wanted = sorted((1, longest.get(name, 2**31)) for name in opened)
    if sorted((int(bounds.lower), int(min(bounds.upper, 2**31))) for bounds in ranges) != wanted:
        expected = f"any {' and '.join(sorted(opened))} size of 1 or more" if opened else "a fixed batch size"
        traced = f"torch was asked for {expected}, but traced the ranges {ranges}"
        raise ExportError(f"{traced}: the file would be wrong outside them")
    return program.model


def _gathers(module: nn.Module) -> bool:
    """Return whether the module takes a variable number of inputs, which torch.export treats as one tuple."""
    kinds = [parameter.kind for parameter in inspect.signature(module.forward).parameters.values()]
    return inspect.Parameter.VAR_POSITIONAL in kinds


@contextmanager
def _quiet() -> Iterator[None]:
    """Hide the exporter's messages about its internals; real problems raise errors."""
    loggers = [logging.getLogger(name) for name in ("torch.onnx", "torch.export", "onnxscript", "onnx_ir")]
    levels = [logger.level for logger in loggers]
    try:
        for logger in loggers:
            logger.setLevel(logging.ERROR)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


def _cause(error: BaseException) -> str:
    """Return the innermost reason; the outer ones are advice on reporting it."""
    while error.__cause__ is not None:
        error = error.__cause__
    return f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else 'no message'}"


def _lowered(model: onnx_ir.Model, form: Form | None) -> None:
    """Lower the graph to standard operators and fold constants, in place."""
    with _quiet():
        if form:
            recurrence.expand(model, form)
        onnxscript.optimizer.inline(model)
        onnxscript.optimizer.fold_constants(model)
        passes = onnx_ir.passes.Sequential(
            common.RemoveUnusedNodesPass(),
            common.RemoveUnusedFunctionsPass(),  # type: ignore[no-untyped-call]
            common.RemoveUnusedOpsetsPass(),
            common.LiftConstantsToInitializersPass(lift_all_constants=True, size_limit=0),
            common.LiftSubgraphInitializersToMainGraphPass(),
            common.DeduplicateInitializersPass(),
            common.CommonSubexpressionEliminationPass(),
            common.OutputFixPass(),
            common.NameFixPass(),
        )
        passes(model)


def _checked(path: Path, shapes: list[list[int]], sizes: Sequence[Mapping[int, str]] | None) -> onnx.ModelProto:
    """Return the file as read back; raise ExportError if it is invalid or not as requested."""
    written = onnx.load(path, load_external_data=False)
    try:
        onnx.checker.check_model(str(path), full_check=True)
    except (onnx.checker.ValidationError, onnx.shape_inference.InferenceError) as error:
        raise ExportError(f"the file is not valid ONNX: {error}") from error
    opsets = {entry.domain: entry.version for entry in written.opset_import}
    if opsets != {"": OPSET}:
        raise ExportError(f"the file uses the opsets {opsets}, not only the standard opset {OPSET}")
    wanted: list[list[int | str]] = [list(shape) for shape in shapes]
    for shape, named in zip(wanted, sizes or [], strict=False):
        for axis, name in named.items():
            shape[axis] = name
    file_shapes = [_shape(value) for value in written.graph.input]
    if file_shapes != wanted:
        raise ExportError(f"the file takes {file_shapes}, not {wanted}")
    return written


def _shape(value: onnx.ValueInfoProto) -> list[int | str]:
    return [size.dim_param or size.dim_value for size in value.type.tensor_type.shape.dim]


def _proven(
    module: nn.Module,
    given: Mapping[str, tuple[Tensor, int | None]],
    varying: Sequence[str],
    path: Path,
    precision: FloatPrecision,
    batch: int | None,
    judged_by: Literal["outputs", "codes"],
    exported: ExportFacts,
) -> ExportFacts:
    """Run the file in ONNX Runtime and compare its outputs; raise ExportError if they differ."""
    reason = sessions.why_not()
    if reason:
        return msgspec.structs.replace(exported, unchecked=f"numbers not compared: {reason}")
    start = time.monotonic()
    try:
        session = sessions.open_session(path)
        load_s = time.monotonic() - start
        encoder = copy.deepcopy(module).to(torch.float64) if hasattr(module, "encode") else module

        def run(first: Tensor, *others: Tensor) -> list[np.ndarray]:
            read = [_inputs(encoder, _cast(first, torch.float64)), *others]
            feeds = [_cast(value, _DTYPES[precision]).numpy() for value in read]
            return session.run(None, dict(zip(given, feeds, strict=True)))

        batches = _batches(list(given.values()), batch)
        figures = parity.compare(_WithDraws(module), run, batches, precision, judged_by)
        if varying:
            halves = [(size, _halved(list(given), values, varying)) for size, values in batches]
            shorter = parity.compare(_WithDraws(module), run, halves, precision, judged_by)
            figures = max(figures, shorter, key=lambda comparison: comparison.error_share)
    except sessions.SessionError as error:
        itself = ", ".join(onnx_files.half(path)) if precision == "fp32" else ""
        raise NotExportable(f"{error}" + (f"; the model itself computes in {itself}" if itself else "")) from error
    except parity.Differs as error:
        raise ExportError(str(error)) from error
    return msgspec.structs.replace(exported, load_s=load_s, parity=figures)


def _halved(names: Sequence[str], values: Sequence[Tensor], varying: Sequence[str]) -> list[Tensor]:
    """Return these inputs, with the `varying` ones halved in length."""
    pairs = zip(names, values, strict=True)
    return [value[:, : (value.shape[1] + 1) // 2].contiguous() if name in varying else value for name, value in pairs]


class _WithDraws(nn.Module):
    """The module applied to the draws from `_inputs`, whatever its dtype."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, images: Tensor, *others: Tensor) -> Any:
        uniforms = _uniforms(self.module, images)
        extra = [] if uniforms is None else [uniforms.to(images.dtype)]
        return self.module(images, *others, *extra)


def _batches(given: Sequence[tuple[Tensor, int | None]], batch: int | None) -> list[tuple[int, list[Tensor]]]:
    """Return inputs in batches of the file's size, or of three if that is dynamic, and the size of each."""
    sizes = DYNAMIC_BATCHES if batch is None else (batch,) * -(-LEAST_IMAGES // batch)
    places = [range(end - size, end) for size, end in zip(sizes, np.cumsum(sizes).tolist(), strict=True)]
    return [(len(rows), [_repeated(values, axis, rows) for values, axis in given]) for rows in places]
