"""What the pinned wheels of the gpu extra link is what the others bring, for each Python: read from their ELF headers.

The wheels of ONNX Runtime and TensorRT are too large for a test. What they link was read with
`pip download --no-deps NAME==VERSION`, `unzip` and `readelf -d FILE | grep NEEDED`; a new pin needs a new entry here.
"""

import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from packaging.requirements import Requirement

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).parents[2]
PYTHONS = ("3.10", "3.11", "3.12", "3.13")
# by pin: the NEEDED of libonnxruntime_providers_{cuda,tensorrt}.so and of tensorrt.so in tensorrt-cu13-bindings
LINKED = {
    ("onnxruntime-gpu", "1.31.1"): [
        "libcublasLt.so.13 libcublas.so.13 libcurand.so.10 libcudart.so.13 libcuda.so.1",
        "libcublas.so.13 libnvinfer.so.10 libnvonnxparser.so.10 libcudart.so.13 libcudnn.so.9",
    ],
    ("tensorrt", "10.16.1.11"): ["libnvonnxparser.so.10 libnvinfer_plugin.so.10 libnvinfer.so.10"],
}
# by pin: the files of tensorrt-cu13-libs, which its bindings of the same version link
BROUGHT = {("tensorrt", "10.16.1.11"): "libnvinfer.so.10 libnvinfer_plugin.so.10 libnvonnxparser.so.10"}
DRIVER = {"libcuda.so.1"}


def pins(python):
    """Return the version of each package of the gpu extra that this Python installs."""
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pinned = [Requirement(line) for line in lines if line and not line.startswith("#")]
    wanted = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]["gpu"]
    names = [needed.name for needed in map(Requirement, wanted) if applies(needed, python)]
    versions = {pin.name: next(iter(pin.specifier)).version for pin in pinned if applies(pin, python)}
    return {(name, versions[name]) for name in names if name in versions}


def applies(requirement, python):
    facts = {"python_version": python, "platform_machine": "x86_64"}
    return requirement.marker is None or requirement.marker.evaluate(facts)


@pytest.fixture(scope="module")
def of_torch():
    """The libraries in the wheels that the installed torch requires."""
    if torch.version.cuda is None:
        pytest.skip("this torch brings no CUDA libraries")
    if f"torch=={torch.__version__.partition('+')[0]}" not in (ROOT / "constraints.txt").read_text().splitlines():
        pytest.skip("this torch is not the one that is pinned, so that its CUDA libraries are others")
    folders = [Path(folder) for folder in find_spec("nvidia").submodule_search_locations]
    return {path.name for folder in folders for path in folder.rglob("*.so.*")}


@pytest.mark.parametrize("python", PYTHONS)
def test_the_gpu_extra_links_only_what_it_brings(python, of_torch):
    pinned = pins(python)
    brought = of_torch | DRIVER | {name for pin in pinned for name in BROUGHT.get(pin, "").split()}
    for pin in {(name, number) for name, number in pinned if name in ("onnxruntime-gpu", "tensorrt")}:
        assert pin in LINKED, "read what it links, as said above"
        assert {name for linked in LINKED[pin] for name in linked.split()} <= brought, pin


def test_python_3_10_has_no_onnx_runtime_for_this_cuda():
    assert [python for python in PYTHONS if "onnxruntime-gpu" not in dict(pins(python))] == ["3.10"]
