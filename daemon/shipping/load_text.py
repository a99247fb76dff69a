"""Writes a shipped folder's LOAD.md: code that loads and runs the model in an environment with only its runtime."""

import re
from collections.abc import Sequence
from typing import Any

from benchd.daemon.errors import Unsupported
from benchd.daemon.measuring import user_inputs
from benchd.daemon.records import Environment
from benchd.daemon.runtimes import Precision, openvino_settings
from benchd.daemon.shipping.manifest import CODE, PACKAGE, Manifest
from benchd.exporters import sessions, tegra
from benchd.models import catalog

_PAGE = """# How to load this

{name}: {variant}, batch size {batch_size}, measured on {device}.

```sh
{install}
```
{needs}
Run this in the folder; it fails if the answers differ from the golden ones.

```python
{code}
```

| | name | type | shape |
| --- | --- | --- | --- |
{tensors}

Preprocessing: {preprocessing}.
"""

_GOLDEN = """


golden, rows_off = numpy.load("golden.npz", allow_pickle=False), {{}}
for batch in range({batches}):
    answers = run({{name: golden[f"input{{batch}}:{{name}}"] for name in {inputs}}})
    for name, tolerance in {tolerances}.items():
        exact = golden[f"exact{{batch}}:{{name}}"]
        largest = abs(exact[numpy.isfinite(exact)]).max(initial=0.0) or 1.0
        right = numpy.isclose(answers[name], exact, rtol=0.0, atol=tolerance * largest)
        rows_off[name] = rows_off.get(name, 0) + int((~right.all(tuple(range(1, exact.ndim)))).sum())
assert max(rows_off.values()) <= {rows_off}, f"answers differ from the golden ones for {{rows_off}} inputs"
print("the answers match the golden ones")"""

_ONNX = """import os

import numpy
import onnxruntime
{libraries}
options = onnxruntime.SessionOptions()
options.intra_op_num_threads = {threads}{exact}
session = onnxruntime.InferenceSession("model.onnx", options, providers=[{chosen}])
assert session.get_providers()[0] == "{provider}"
names = [output.name for output in session.get_outputs()]


def run(inputs):
    return dict(zip(names, session.run(names, inputs)))"""

_CUDA_LIBRARIES = """
if hasattr(onnxruntime, "preload_dlls"):
    onnxruntime.preload_dlls()  # CUDA's libraries, if they came in wheels
"""

_OPENVINO = """import os

import numpy
import openvino

settings = {{
    {settings},
}}
model = openvino.Core().compile_model("model.onnx", "CPU", settings)
names = {names}


def run(inputs):
    return dict(zip(names, model(list(inputs.values())).values()))"""

_TORCH = """import os
import sys

import numpy
import torch
from safetensors.torch import load_file

sys.dont_write_bytecode = True
{build}{exact}
model = model.eval().to("{device}", torch.{dtype})
call = {call}
torch.set_num_threads({threads})


def run(inputs):
    given = [torch.from_numpy(value).to("{device}") for value in inputs.values()]
    given = [value.to(torch.{dtype}) if value.is_floating_point() else value for value in given]
    with torch.inference_mode(){autocast}:
        answer = call({arguments})
    return {{name: torch.as_tensor(value).float().cpu().numpy() for name, value in {answer}.items()}}"""

_AOTI = """import os

import numpy
import torch
{kernels}
torch.set_num_threads({threads})
package = torch._C._aoti.AOTIModelPackageLoader("{package}", "model", False, 1, {index})
names = {names}


def run(inputs):
    given = [torch.from_numpy(value).to("{device}") for value in inputs.values()]
    given = [value.to(torch.{dtype}) if value.is_floating_point() else value for value in given]
    with torch.inference_mode():
        answers = package.boxed_run(given)
    return {{name: value.float().cpu().numpy() for name, value in zip(names, answers)}}"""

_TENSORRT = """import numpy
import tensorrt
import torch

runtime = tensorrt.Runtime(tensorrt.Logger(tensorrt.Logger.ERROR))
with open("model.plan", "rb") as file:
    engine = runtime.deserialize_cuda_engine(file.read())
assert engine, "model.plan was built for a different TensorRT or GPU: build it again from model.onnx"
context, dtypes = engine.create_execution_context(), {dtypes}
inputs, outputs = {inputs}, {outputs}


def run(given):
    memory = {{name: torch.from_numpy(value).to("{device}") for name, value in given.items()}}
    for name in inputs:
        memory[name] = memory[name].to(getattr(torch, dtypes[name]))
        context.set_input_shape(name, tuple(memory[name].shape))
    for name in outputs:
        shape = tuple(context.get_tensor_shape(name))
        memory[name] = torch.empty(shape, dtype=getattr(torch, dtypes[name]), device="{device}")
    for name, tensor in memory.items():
        context.set_tensor_address(name, tensor.data_ptr())
    assert context.execute_async_v3(torch.cuda.current_stream().cuda_stream)
    torch.cuda.synchronize()
    return {{name: memory[name].float().cpu().numpy() for name in outputs}}"""

_GRAPH = """


def captured(call):
    held, graph, answers = [], torch.cuda.CUDAGraph(), []

    def replayed(*given):
        if not held:
            held.extend(value.clone() for value in given)
            with torch.cuda.stream(torch.cuda.Stream()):
                for _ in range(3):  # libraries choose their kernels
                    call(*held)
            torch.cuda.synchronize()
            with torch.cuda.graph(graph):
                answers.append(call(*held))
        for memory, value in zip(held, given, strict=True):
            memory.copy_(value)
        graph.replay()
        return answers[0]

    return replayed


"""

_NO_TF32 = """
torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False"""

_PYTORCH_INDEX = "https://download.pytorch.org/whl"
_OF_BOARD = ("torch", "torchvision", "onnxruntime-gpu")

_HALF: dict[Precision, str] = {"fp16": "float16", "bf16": "bfloat16"}


def page(manifest: Manifest) -> str:
    """Return the text of LOAD.md; raise Unsupported if the answers are nested too deeply to name in a few lines."""
    rows = [("input", tensor) for tensor in manifest.inputs] + [("output", tensor) for tensor in manifest.outputs]
    return _PAGE.format(
        name=manifest.name,
        variant=manifest.case.variant.label,
        batch_size=manifest.case.batch_size,
        device=manifest.device,
        install=_install(manifest),
        needs=_needs(manifest),
        code=code(manifest),
        tensors="\n".join(f"| {kind} | `{tensor.name}` | {tensor.dtype} | {tensor.shape} |" for kind, tensor in rows),
        preprocessing=manifest.preprocessing,
    )


def _needs(manifest: Manifest) -> str:
    """Return the reason why benchd must also be installed, or an empty string if it need not be."""
    if "benchd" not in manifest.packages:
        return ""
    kernels = ", and the kernels, which need a C compiler" if manifest.case.variant.kernels == "custom" else ""
    wheel = "its wheel is on no package index: build it with `make wheel`"
    return f"\nbenchd itself is needed ({wheel}): it contains the code of {manifest.case.model}{kernels}.\n"


def _install(manifest: Manifest) -> str:
    """Return the shell commands that install the packages imported by the code."""
    wanted = {name: f"{name}=={version.partition('+')[0]}" for name, version in manifest.packages.items()}
    if "benchd" in wanted:
        wanted["benchd"] = f"benchd-{manifest.packages['benchd']}-py3-none-any.whl"
    environment = manifest.environment
    if environment.is_tegra:
        return _install_on_board(wanted, environment)
    builds = {version.partition("+")[2] for version in manifest.packages.values()}
    indexes = [f"--extra-index-url {_PYTORCH_INDEX}/{build}" for build in builds if re.fullmatch(r"cpu|cu\d+", build)]
    return " ".join(["python -m pip install", *wanted.values(), *indexes])


def _install_on_board(wanted: dict[str, str], board: Environment) -> str:
    """Return the install commands for a Jetson, for whose GPU PyPI has no builds.

    The last command lists the board's packages again, so that they stay and their requirements are installed.
    """
    lines = ["python3 -m venv --system-site-packages env && . env/bin/activate"]
    if "tensorrt" in wanted:
        lines.append(f"sudo apt install python3-libnvinfer  # JetPack's, here {wanted.pop('tensorrt')}")
    of_board = [wanted[name] for name in _OF_BOARD if name in wanted]
    try:
        known, _ = tegra.release_of(board.l4t or "", board.os)
        index, beside = known.index, known.beside if "torch" in wanted else ()
    except tegra.TooOld:
        index, beside = "URL", ()
    if of_board:
        linked = f"  # torch links to {', '.join(beside)}: benchd's `make once` sets that up" if beside else ""
        lines.append(f"python -m {tegra.install_from(index, ' '.join(of_board))}{linked}")
    return "\n".join([*lines, " ".join(["python -m pip install", *wanted.values()])])


def code(manifest: Manifest) -> str:
    """Return the Python code of LOAD.md."""
    golden = _GOLDEN.format(
        batches=manifest.golden.batches,
        inputs=[tensor.name for tensor in manifest.inputs],
        tolerances=manifest.golden.tolerances,
        rows_off=manifest.golden.rows_off,
    )
    texts = {"onnxruntime": _onnx, "openvino": _openvino, "tensorrt": _tensorrt, "aoti": _aoti}
    return texts.get(manifest.case.variant.backend, _torch)(manifest) + golden


def _threads(manifest: Manifest) -> str:
    return str(manifest.case.threads or "len(os.sched_getaffinity(0))")


def _onnx(manifest: Manifest) -> str:
    is_int8 = manifest.case.variant.precision == "int8"
    exact = f'\noptions.add_session_config_entry("{sessions.EXACT_INT8}", "1")' if is_int8 else ""
    provider = manifest.provider
    is_cuda = provider == sessions.PROVIDERS["cuda"]
    return _ONNX.format(
        threads=_threads(manifest),
        provider=provider,
        chosen=f'("{provider}", {sessions.CUDA_OPTIONS})' if is_cuda else f'"{provider}"',
        libraries=_CUDA_LIBRARIES if is_cuda else "",
        exact=exact,
    )


def _openvino(manifest: Manifest) -> str:
    options = openvino_settings(manifest.case.variant.precision)
    settings = [f'"{name}": "{value}"' for name, value in options.items()]
    settings += [f'"INFERENCE_NUM_THREADS": {_threads(manifest)}']
    return _OPENVINO.format(settings=",\n    ".join(settings), names=[tensor.name for tensor in manifest.outputs])


def _tensorrt(manifest: Manifest) -> str:
    read, answered = manifest.inputs, manifest.outputs
    return _TENSORRT.format(
        dtypes={tensor.name: tensor.dtype for tensor in [*read, *answered]},
        inputs=[tensor.name for tensor in read],
        outputs=[tensor.name for tensor in answered],
        device=manifest.environment.device,
    )


def _aoti(manifest: Manifest) -> str:
    variant, device = manifest.case.variant, manifest.environment.device
    module = catalog.entry(manifest.case.model).factory.partition(":")[0] if variant.kernels == "custom" else ""
    return _AOTI.format(
        kernels=f"\nimport {module}  # noqa: F401 - its kernels\n" if module else "",
        threads=_threads(manifest),
        package=PACKAGE,
        index=-1 if device == "cpu" else 0,
        names=[tensor.name for tensor in manifest.outputs],
        device=device,
        dtype=_HALF.get(variant.precision, "float32"),
    )


def _torch(manifest: Manifest) -> str:
    variant, device = manifest.case.variant, manifest.environment.device
    half = "float16" if device == "cuda" else "bfloat16"
    is_graph = variant.backend == "cudagraph"
    calls = {"compile": "torch.compile(model, dynamic=False)", "cudagraph": "captured(model)"}
    return _TORCH.format(
        build=_build(manifest) + (_GRAPH if is_graph else ""),
        exact=_NO_TF32 if device == "cuda" else "",
        device=device,
        dtype=_HALF.get(variant.precision, "float32"),
        call=calls.get(variant.backend, "model"),
        threads=_threads(manifest),
        # a CUDA graph outlives the weights that autocast would cache
        autocast=f', torch.autocast("{device}", torch.{half}, cache_enabled={not is_graph})'
        if variant.precision == "amp"
        else "",
        arguments=_arguments(manifest),
        answer=answer([tensor.name for tensor in manifest.outputs]),
    )


def _build(manifest: Manifest) -> str:
    """Return the lines that build the module with its weights."""
    if manifest.entry == manifest.case.model:
        given = f'"{manifest.case.model}", load_file("weights.safetensors"), {manifest.options}'
        kernels = f', kernels="{manifest.case.variant.built_on}"'
        return f"from benchd.models import weights  # noqa: E402\n\nmodel = weights.build({given}{kernels})"
    module, _, function = manifest.entry.partition(":")
    lines = [
        f'sys.path.insert(0, "{CODE}")',
        f"from {module} import {function}  # noqa: E402",
        "",
        f"model = {function} if isinstance({function}, torch.nn.Module) else {function}()",
        'model.load_state_dict(load_file("weights.safetensors"))',
    ]
    return "\n".join(lines)


def _arguments(manifest: Manifest) -> str:
    """Return the arguments of the call: positional, or keywords for inputs with names."""
    names = [spec.name for spec in manifest.read] or [""]
    named = {name: f"given[{place}]" for place, name in enumerate(names) if name}
    by_name = [f"{name}={_literal(value)}" for name, value in user_inputs.nested(named).items()]
    by_place = len(names) - len(named)
    return ", ".join([f"*given[:{by_place}]" if by_name else "*given", *by_name])


def _literal(value: Any) -> str:
    """Return the source code of a (nested) dict of expressions."""
    if isinstance(value, str):
        return value
    return "{" + ", ".join(f'"{key}": {_literal(nested)}' for key, nested in value.items()) + "}"


def answer(names: Sequence[str]) -> str:
    """Return the expression for the answers by name; raise Unsupported if they are nested."""
    wanted = list(names)
    if wanted == ["output"]:
        return '{"output": answer["output"] if isinstance(answer, dict) else answer}'
    if all(name.isdigit() for name in names):
        return f"{{name: answer[int(name)] for name in {wanted}}}"
    if all(name.isidentifier() for name in names):
        return f"{{name: answer[name] if isinstance(answer, dict) else getattr(answer, name) for name in {wanted}}}"
    raise Unsupported(f"its answers are nested ({', '.join(names)}): return a flat dict or tuple to ship it from torch")
