"""A backend's input: the built module, or a file made from it, which is taken from a store or exported."""

import copy
import hashlib
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, cast

import msgspec
import torch
from torch import Tensor, nn

from benchd.daemon.errors import Unsupported
from benchd.daemon.records import ArtifactFacts, OptionValue, Provider, Quantisation
from benchd.daemon.runtimes import Precision
from benchd.daemon.worker.structures import ONLY, Batch, InTuple, Tensors, cycled, leading, tensors, values
from benchd.exporters import code, files, sessions
from benchd.exporters.artifacts import Artifact, ArtifactStore
from benchd.exporters.calibrated import CannotQuantise, Quantised, refuse_few
from benchd.exporters.files import ONLY_OUTPUT, QuantisedFor, Target

STORE_BYTES = 8 * 2**30
_IN_TORCH = ("torch", "torchvision", "timm", "torchao")  # packages whose versions affect torchao's ranges


@dataclass(frozen=True)
class Calibration:
    """The images with which an int8 file is calibrated, their description, and a digest of each.

    `is_asked` is set if the command line specified them: otherwise, a given file may have been calibrated with any
    images.
    """

    images: Batch
    source: str
    digests: list[str]
    is_asked: bool


@dataclass(frozen=True)
class Source:
    """A module in float32 on the CPU, some of its images, and the store of files made from it.

    `model`, `options`, `weights_sha256` and `scope` identify its files; `scope` contains other dependencies of a user's
    module, and the run after which its files are not reused. `given` is a read-only store. `own` is the user's ONNX
    file, which replaces any export, and `is_own` is set if the module is the user's or a library's, whose answer may
    have any structure; `input_name` is the user's name for its only input, if any. `provider` is ONNX Runtime's, None
    for the device's default. `dla` is the core that TensorRT uses, None for the GPU alone, and `build_limit_s` the time
    limit of its builds; `is_alone` is set if no other stream or model computes beside it. `calibration` returns the
    images for an int8 file, or raises Unsupported. `used` lists the opened files, and `calibrated` the digests of their
    calibration images. `engine` is a TensorRT plan or an AOTInductor package to load instead of building one, and
    `built` maps the file names in a shipped folder to the loaded files and the kernel timings of the build. `kernels`
    is the kind of kernels that the module uses.
    """

    module: nn.Module
    images: Batch
    model: str
    options: Mapping[str, OptionValue]
    weights_sha256: str
    judged_by: Literal["outputs", "codes"]
    folder: Path
    kernels: str = "torch"
    scope: Mapping[str, Any] = field(default_factory=dict)
    given: Path | None = None
    own: Path | None = None
    is_own: bool = False
    input_name: str = ""
    provider: Provider | None = None
    dla: int | None = None
    build_limit_s: float = math.inf
    workspace_bytes: int | None = None
    is_alone: bool = True
    engine: Path | None = None
    calibration: Callable[[], Calibration] | None = None
    calibrated: set[str] = field(default_factory=set)
    used: list[ArtifactFacts] = field(default_factory=list)
    built: dict[str, Path] = field(default_factory=dict)
    _opened: dict[tuple[object, ...], Artifact] = field(default_factory=dict)

    @cached_property
    def store(self) -> ArtifactStore:
        """Return this machine's store, with its size limit."""
        return ArtifactStore(self.folder, STORE_BYTES)

    @property
    def encode(self) -> Callable[[Tensor, Tensor | None], Tensor] | None:
        """Return the function that draws a file's random input for images, None if it takes the module's inputs."""
        return None if self.is_own else getattr(self.module, "encode", None)

    def inputs(self, *given: Tensor) -> list[Tensor]:
        """Return a file's inputs: the given ones, encoded if the module draws random numbers."""
        return [self.encode(given[0], given[1] if given[1:] else None)] if self.encode else list(given)

    def for_runs(self) -> "Source":
        """Return the source as needed by runs of a file: without images and, unless it draws random input, module."""
        module = self.module if self.encode else nn.Module()
        return replace(self, module=module, images=self.images[:0].clone(), calibration=None)

    def onnx(self, precision: Precision, batch: int, target: Target) -> Artifact:
        """Return the ONNX file for this target: the user's, a given one, or one that was or is now exported.

        Raises Unsupported if there is no file and none can be made, and the errors of the store and the exporter.
        """
        wanted = (precision, batch, target)
        if wanted not in self._opened:
            start = time.monotonic()
            self._opened[wanted] = self._onnx(*wanted)
            self._note(self._opened[wanted], start)
        return self._opened[wanted]

    def _note(self, artifact: Artifact, start: float) -> None:
        """Record the opened file and its calibration images."""
        self.used.append(_facts(artifact, time.monotonic() - start))
        self.calibrated.update(artifact.metadata.measured.get("calibration_images", []))

    def _onnx(self, precision: Precision, batch: int, target: Target) -> Artifact:
        if precision not in files.PRECISIONS:
            raise Unsupported(f"files are exported in fp32, fp16 and int8, not in {precision}")
        if self.own:
            from benchd.daemon.measuring.user_onnx import precision as written  # noqa: PLC0415 - see `_export`
            from benchd.daemon.worker import user_onnx  # noqa: PLC0415 - onnx is not needed for files of the store

            if precision != "int8" or written(self.own) == "int8":
                return user_onnx.artifact(self.own, precision, self.weights_sha256)
            return self.quantise(batch, None, files.quantised_for(target))
        form = files.form(self.options, target)
        made_for = files.quantised_for(target)
        if self.given is None:
            return self.export(precision, batch, form, made_for)
        given = ArtifactStore(self.given, read_only=True)
        try:
            artifact = self._given(given, precision, batch, form, made_for)
            artifact = artifact or self.export(precision, batch, form, made_for)
        except Unsupported as error:
            raise Unsupported("; ".join([*given.notes, str(error)])) from error
        return msgspec.structs.replace(artifact, note="; ".join(filter(None, [*given.notes, artifact.note])))

    def _given(
        self,
        store: ArtifactStore,
        precision: files.Precision,
        batch: int,
        form: files.Form | None,
        made_for: QuantisedFor,
    ) -> Artifact | None:
        """Return the newest file in the given store, preferably for this batch size, else for any; None if absent.

        A file made by different versions of torch or the exporter is accepted; one made by different code of benchd is
        not. The store's notes report both.
        """
        candidates = sorted(store.list(), key=lambda artifact: artifact.metadata.made_at, reverse=True)
        wanted = [self._facts(precision, size, form) for size in (batch, None)]
        but = ["versions"]
        if precision == "int8":
            calibration = self._calibration() if self.calibration is not None else None
            more = (
                self._int8_facts(calibration, made_for)
                if calibration and calibration.is_asked
                else {"quantised_for": made_for}
            )
            wanted = [facts | more for facts in wanted]
            but += [] if "calibration" in more else ["calibration", "calibration_sha256"]
        for facts in wanted:
            for artifact in candidates:
                if _shared(artifact.metadata.facts, but) == _shared(facts, but) and (stored := store.get(artifact.key)):
                    store.notes.extend(_other_versions(stored, facts))
                    return stored
        store.notes.extend(_of_other_code(candidates, wanted))
        return None

    def export(
        self, precision: files.Precision, batch: int | None, form: files.Form | None, made_for: QuantisedFor = "cpu"
    ) -> Artifact:
        """Return the file with this form, exporting it if it is not in the store; None means a dynamic `batch`.

        `made_for` is the target of an int8 file.
        """
        if precision == "int8":
            return self.quantise(batch, form, made_for)
        facts = self._facts(precision, batch, form)
        return self.store.produce(facts, lambda path: self._export(path, facts, batch))

    def quantise(self, batch: int | None, form: files.Form | None, made_for: QuantisedFor) -> Artifact:
        """Return the int8 file, made from the float32 one and the calibration images if it is not in the store."""
        calibration = self._calibration()
        facts = self._facts("int8", batch, form) | self._int8_facts(calibration, made_for)
        return self.store.produce(facts, lambda path: self._quantise(path, calibration, batch, form, made_for))

    def _calibration(self) -> Calibration:
        if self.calibration is None:
            raise Unsupported("int8 needs calibration images: give --calibration")
        return self.calibration()

    def _int8_facts(self, calibration: Calibration, made_for: str) -> dict[str, Any]:
        digest = hashlib.sha256("".join(calibration.digests).encode()).hexdigest()
        return {"calibration": calibration.source, "calibration_sha256": digest, "quantised_for": made_for}

    def _quantise(
        self, path: Path, calibration: Calibration, batch: int | None, form: files.Form | None, made_for: QuantisedFor
    ) -> dict[str, Any]:
        if why := sessions.why_not():
            raise Unsupported(f"int8 calibration needs ONNX Runtime: {why}")
        try:
            from benchd.exporters import onnx_files, quantised  # noqa: PLC0415 - see `_export`
        except ImportError as error:
            raise Unsupported(self._no_exporter(error)) from error
        start = time.monotonic()
        if self.own:
            from benchd.daemon.worker import user_onnx  # noqa: PLC0415 - see `_onnx`

            base = user_onnx.artifact(self.own, "fp32", self.weights_sha256)
        else:
            base = self.export("fp32", batch, form)
        about = {"benchd.precision": "int8", "benchd.calibration": calibration.source}
        try:
            names, _ = onnx_files.names_of(base.path)
            feeds = [
                {name: value.numpy() for name, value in zip(names, self.inputs(*parts), strict=True)}
                for parts in _batches(calibration, batch or 1)
            ]
            quantisation = quantised.quantise(base.path, path, feeds, made_for, about, smooth=form is not None)
        except CannotQuantise as error:
            raise Unsupported(str(error)) from error
        return _measured(quantisation, calibration, start) | {"outputs": paths(base)}

    def ranges(self, batch: int, calibrate: Callable[[Path, list[list[Tensor]]], Quantised]) -> Artifact:
        """Return the file with torchao's ranges, which `calibrate` writes if it is not in the store.

        `calibrate` gets the calibration images in batches of `batch`. Raises Unsupported and CannotQuantise.
        """
        start, calibration = time.monotonic(), self._calibration()
        facts = self._facts("int8", batch, None) | self._int8_facts(
            calibration, "torchao-avx2" if files.overflows() else "torchao"
        )
        facts |= {"format": "safetensors", "options": dict(self.options), "versions": code.versions(*_IN_TORCH)}

        def write(path: Path) -> dict[str, Any]:
            return _measured(calibrate(path, list(_batches(calibration, batch))), calibration, start)

        artifact = self.store.produce(facts, write)
        self._note(artifact, start)
        return artifact

    def _facts(self, precision: files.Precision, batch: int | None, form: files.Form | None) -> dict[str, Any]:
        known = files.onnx_facts(self.model, self.options, self.weights_sha256, precision, batch, form)
        varies = sorted(self.images.lengths) if isinstance(self.images, Tensors) else []
        return known | dict(self.scope) | ({"lengths": varies} if varies else {})

    def _export(self, path: Path, facts: Mapping[str, Any], batch: int | None) -> dict[str, Any]:
        try:
            from benchd.exporters import onnx  # noqa: PLC0415 - a board may run files without being able to make them
        except ImportError as error:
            raise Unsupported(self._no_exporter(error)) from error
        module, answers = self._answering(batch) if self.is_own else (self.module, [ONLY])
        try:
            exported = onnx.export(
                module,
                self._named(),
                path,
                precision=facts["precision"],
                batch=batch,
                form=facts["form"],
                judged_by=self.judged_by,
                outputs=[ONLY_OUTPUT] if answers == [ONLY] else answers,
                axes=self.images.axes if isinstance(self.images, Tensors) else {},
                lengths=self.images.lengths if isinstance(self.images, Tensors) else {},
            )
        except onnx.NotExportable as error:
            if not self.is_own:
                raise
            raise Unsupported(f"{error}; a file that you export yourself is measured with --onnx") from error
        facts = cast("dict[str, Any]", msgspec.to_builtins(exported))
        return facts | {"outputs": dict(zip(exported.outputs, answers, strict=True))}

    def _named(self) -> Tensor | Mapping[str, Tensor]:
        """Return the images by the user's input names, or a tensor if the single input has no name."""
        if isinstance(self.images, Tensors):
            return self.images.named
        return {self.input_name: self.images} if self.input_name else self.images

    def _no_exporter(self, error: ImportError) -> str:
        where = f"{self.given} has no file for this case, and " if self.given else ""
        elsewhere = (
            "export the module on another machine and measure that file with --onnx"
            if self.scope
            else "run `benchd export` with the same weights on another machine and give its folder as --artifacts"
        )
        return f"{where}none can be exported here ({error}): pip install onnx onnxscript, or {elsewhere}"

    def _answering(self, batch: int | None) -> tuple[nn.Module, list[str]]:
        """Return the module wrapped to return a tuple, and the paths of its elements."""
        example = cycled(self.images, batch or 1)
        with torch.inference_mode():
            output = copy.deepcopy(self.module)(*values(example))
        return InTuple(self.module), list(tensors(output))


def paths(artifact: Artifact) -> dict[str, str]:
    """Return each output's path in the model's answer, by its name in the file and in the file's order."""
    known: dict[str, str] = artifact.metadata.measured.get("outputs", {})
    if known:
        return known
    from benchd.exporters import onnx_files  # noqa: PLC0415 - a file in the store comes with them

    _, names = onnx_files.names_of(artifact.path)
    return {names[0]: ONLY} if len(names) == 1 else dict(zip(names, names, strict=True))


def answer(outputs: Mapping[str, Tensor], paths: Mapping[str, str]) -> Batch:
    """Return the named outputs of a file in the model's form: one tensor, or tensors by path."""
    named = {path: outputs[name] for name, path in paths.items()}
    return named[ONLY] if list(named) == [ONLY] else Tensors(named)


def _batches(calibration: Calibration, size: int) -> Iterator[list[Tensor]]:
    """Yield the inputs in whole batches, repeating the first images in the last one; raise CannotQuantise for few."""
    images = calibration.images
    refuse_few([part.numpy() for part in leading(images)], calibration.source)
    for start in range(0, len(images), size):
        yield [part.contiguous() for part in values(cycled(images, start + size, start))]


def _measured(quantisation: Quantised, calibration: Calibration, start: float) -> dict[str, Any]:
    """Return the measurements that the store keeps with an int8 file."""
    return {
        "nodes": quantisation.nodes,
        "export_s": time.monotonic() - start,
        "parity": {"error_share": quantisation.max_error_share},
        "quantised": msgspec.to_builtins(quantisation),
        "calibration_images": calibration.digests,
    }


def _shared(facts: Mapping[str, Any], but: Sequence[str] = ("versions",)) -> dict[str, Any]:
    """Return the facts that a file made elsewhere must match: all except the versions with which it was made."""
    return {name: value for name, value in facts.items() if name not in but}


def _other_versions(artifact: Artifact, facts: Mapping[str, Any]) -> Iterator[str]:
    theirs, ours = artifact.metadata.facts.get("versions", {}), facts["versions"]
    others = [
        f"{name} {theirs[name]} (here {ours[name]})" for name in theirs if ours.get(name, theirs[name]) != theirs[name]
    ]
    if others:
        yield f"exported with {', '.join(others)}"


def _of_other_code(candidates: Sequence[Artifact], wanted: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Yield a line for the newest file that is unusable only because different code of benchd exported it."""
    makers = ("versions", "code_sha256")
    shared_facts = [_shared(facts, makers) for facts in wanted]
    alike = [artifact for artifact in candidates if _shared(artifact.metadata.facts, makers) in shared_facts]
    for artifact in alike[:1]:
        ours, theirs = wanted[0]["code_sha256"], artifact.metadata.facts.get("code_sha256", "unknown")
        yield (
            f"{artifact.key} was not used: a benchd with different code exported it ({theirs[:12]}, here {ours[:12]}); "
            "run `benchd export` with the version that measures"
        )


def _facts(artifact: Artifact, seconds: float) -> ArtifactFacts:
    metadata = artifact.metadata
    return ArtifactFacts(
        key=artifact.key,
        format=str(metadata.facts.get("format", "")),
        form=metadata.facts.get("form"),
        bytes=metadata.bytes,
        sha256=metadata.sha256,
        made_at=metadata.made_at,
        made_on=metadata.made_on,
        versions=metadata.versions,
        reused=artifact.reused,
        seconds=seconds,
        note=artifact.note,
        quantisation=_quantisation(metadata.measured.get("quantised"), str(metadata.facts.get("calibration", ""))),
    )


def _quantisation(facts: Mapping[str, Any] | None, calibration: str) -> Quantisation | None:
    if facts is None:
        return None
    return Quantisation(
        layers=len(facts["layers"]),
        exact=len(facts["exact"]),
        left_fp32=facts["left_fp32"],
        calibration=calibration,
        max_error_share=facts["max_error_share"],
        mean_error_share=facts["mean_error_share"],
    )
