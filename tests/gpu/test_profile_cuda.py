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
    profiled = profile("custom", "--variants", "custom", "--method", "memory,benchmark,layers,torch")
    assert profiled.kernels_ran == "triton"
    assert profiled.memory.peak_bytes > 0
    assert profiled.benchmark.step.median_ns > 0
    assert sum(row.share for row in profiled.layers.layers if row.parent is None) == pytest.approx(1, abs=0.01)
    if profiled.torch is None and "was not allowed" in profiled.missing["torch"]:
        pytest.skip(profiled.missing["torch"])
    assert profiled.torch.kernels, profiled.missing
    assert 0 < profiled.torch.gpus[0].utilization <= 1


def test_tensorrt_times_its_own_layers(profile):
    try:
        tensorrt.load()
    except tensorrt.TensorRtUnavailable as error:
        pytest.skip(str(error))
    profiled = profile("tensorrt", "--variants", "tensorrt", "--method", "layers").layers
    assert profiled.timed_by == "tensorrt"
    assert all(row.ns > 0 for row in profiled.layers)
    assert sum(row.share for row in profiled.layers) == pytest.approx(1, abs=0.01)
