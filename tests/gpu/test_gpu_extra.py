"""What the gpu extra installs can be used: where it cannot, its area of the verdict is wrong, not untested."""

from importlib import import_module
from importlib.metadata import requires

import pytest
from packaging.requirements import Requirement

from benchd.daemon.machine.gpu import open_nvml
from benchd.exporters import sessions, tegra, tensorrt

pytestmark = pytest.mark.gpu


def brings(distribution):
    """Return whether the gpu extra installs this distribution for this Python; a Jetson has an extra of its own."""
    requirements = [Requirement(line) for line in requires("benchd")]
    extra = {"extra": "gpu"}
    is_asked = any(
        requirement.name == distribution and requirement.marker and requirement.marker.evaluate(extra)
        for requirement in requirements
    )
    return is_asked and not tegra.is_tegra()


def open_onnxruntime():
    """Raise where ONNX Runtime cannot be used on CUDA."""
    assert sessions.why_not() is None
    assert sessions.PROVIDERS["cuda"] in import_module("onnxruntime").get_available_providers()


OPENED = {
    "triton": ("kernels", lambda: import_module("triton")),
    "onnxruntime-gpu": ("onnxruntime", open_onnxruntime),
    "tensorrt": ("tensorrt", tensorrt.load),
    "nvidia-ml-py": ("nvml", open_nvml),
}


@pytest.mark.parametrize(
    ("distribution", "opened"),
    [pytest.param(name, opened, marks=pytest.mark.area(area), id=name) for name, (area, opened) in OPENED.items()],
)
def test_what_the_gpu_extra_installs_can_be_used(distribution, opened):
    if not brings(distribution):
        pytest.skip(f"the gpu extra installs no {distribution} on this machine")
    opened()
