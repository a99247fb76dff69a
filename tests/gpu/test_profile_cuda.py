"""`benchd profile` on a GPU: kernels and their occupancy, memory, layers of the model and layers of TensorRT."""

import msgspec
import pytest

from benchd.daemon.profiling.profile import Profile
from benchd.exporters import tensorrt

pytestmark = [pytest.mark.gpu, pytest.mark.area("profile")]


@pytest.fixture(scope="module")
def profile(command, folder):
    """Return a function that profiles a small case with these options and returns the profile."""

    def run(name, *options):
        what = (
            "snn_onepass",
            "--option",
            "time_steps=2",
            "--batch-sizes",
            "2",
            "--device",
            "cuda",
            "--preset",
            "quick",
        )
        command("benchd", "profile", *what, *options, "--output", name)
        return msgspec.json.decode((folder / name / "profile.json").read_bytes(), type=Profile)

    return run


def test_a_trace_has_kernels_and_the_layers_add_up(profile):
    found = profile("custom", "--variants", "custom", "--method", "memory,benchmark,layers,torch")
    assert found.kernels_ran == "triton"
    assert found.memory.peak_bytes > 0
    assert found.benchmark.step.median_ns > 0
    assert sum(row.share for row in found.layers.layers if row.parent is None) == pytest.approx(1, abs=0.01)
    if found.torch is None and "was not allowed" in found.missing["torch"]:
        pytest.skip(found.missing["torch"])
    assert found.torch.kernels, found.missing
    assert 0 < found.torch.gpus[0].utilization <= 1


def test_tensorrt_times_its_own_layers(profile):
    try:
        tensorrt.load()
    except tensorrt.TensorRtUnavailable as error:
        pytest.skip(str(error))
    found = profile("tensorrt", "--variants", "tensorrt", "--method", "layers").layers
    assert found.timed_by == "tensorrt"
    assert all(row.ns > 0 for row in found.layers)
    assert sum(row.share for row in found.layers) == pytest.approx(1, abs=0.01)
