"""A table of the backends and their requirements, with one row each, for plans, doctor, records and charts."""

from typing import Literal, get_args

from msgspec import Struct

Backend = Literal["eager", "compile", "aoti", "cudagraph", "onnxruntime", "openvino", "tensorrt"]
Precision = Literal["fp32", "fp16", "bf16", "amp", "int8"]

BACKENDS: tuple[Backend, ...] = get_args(Backend)
PRECISIONS: tuple[Precision, ...] = get_args(Precision)


class Package(Struct, frozen=True, kw_only=True):
    """A package that some variants need, by its import name, and the extra of benchd that installs it.

    On a Jetson, `wheel` comes from the board's index, or the command `on_board` installs it. `distributions` are the
    ones that contain it.
    """

    name: str
    extra: str
    wheel: str = ""
    on_board: str = ""
    distributions: tuple[str, ...] = ()


PACKAGES = {
    package.name: package
    for package in (
        Package(name="triton", extra="gpu", wheel="triton", distributions=("triton",)),
        Package(
            name="onnxruntime",
            extra="cpu",
            wheel="onnxruntime-gpu",
            distributions=("onnxruntime", "onnxruntime-gpu"),
        ),
        Package(name="openvino", extra="openvino", distributions=("openvino",)),
        Package(name="torchao", extra="int8", distributions=("torchao",)),
        Package(
            name="tensorrt",
            extra="gpu",
            on_board="sudo apt install python3-libnvinfer; the environment needs --system-site-packages",
        ),
    )
}


class Runtime(Struct, frozen=True, kw_only=True):
    """One backend: its name in sentences, its number formats, and the colour of its points in every chart.

    `device` is the only device that it supports, if any, and `elsewhere` is the message for others. `package` is
    required in addition to torch. `runs_files` is set if it runs an ONNX file, `allocates` if torch does not count its
    GPU memory, and `takes_lengths` if a model is built once for items of any length.
    """

    title: str
    colour: str
    precisions: tuple[Precision, ...] = PRECISIONS
    device: Literal["cpu", "cuda"] | None = None
    elsewhere: str = ""
    package: str = ""
    runs_files: bool = False
    allocates: bool = False
    takes_lengths: bool = False


RUNTIMES: dict[Backend, Runtime] = {
    "eager": Runtime(title="eager PyTorch", colour="#4c8bf5", takes_lengths=True),
    "compile": Runtime(title="torch.compile", colour="#8e6cef", takes_lengths=True),
    "aoti": Runtime(title="AOTInductor", colour="#b04fd0", precisions=("fp32", "fp16", "bf16")),
    "cudagraph": Runtime(
        title="CUDA graphs", colour="#b8860b", device="cuda", elsewhere="CUDA graphs need an NVIDIA GPU"
    ),
    "onnxruntime": Runtime(
        title="ONNX Runtime",
        colour="#d6409f",
        precisions=("fp32", "fp16", "int8"),
        package="onnxruntime",
        runs_files=True,
        allocates=True,
        takes_lengths=True,
    ),
    "openvino": Runtime(
        title="OpenVINO",
        colour="#5b6b7f",
        precisions=("fp32", "fp16", "bf16", "int8"),
        device="cpu",
        elsewhere="OpenVINO runs on the CPU only: give --device cpu",
        package="openvino",
        runs_files=True,
    ),
    "tensorrt": Runtime(
        title="TensorRT",
        colour="#12a594",
        precisions=("fp32", "fp16", "int8"),
        device="cuda",
        elsewhere="TensorRT needs an NVIDIA GPU",
        package="tensorrt",
        runs_files=True,
        allocates=True,
    ),
}

FILE_BACKENDS = tuple(name for name, runtime in RUNTIMES.items() if runtime.runs_files)

OPENVINO_FORMATS = {"fp32": "f32", "fp16": "f16", "bf16": "bf16"}
"""OpenVINO's names for the precisions; with int8, it chooses the format of the other layers itself."""


def openvino_settings(precision: Precision) -> dict[str, str]:
    """Return the settings, except the number of threads, that make single inferences fastest in this precision."""
    hint = {"INFERENCE_PRECISION_HINT": OPENVINO_FORMATS[precision]} if precision in OPENVINO_FORMATS else {}
    return hint | {"PERFORMANCE_HINT": "LATENCY", "NUM_STREAMS": "1"}
