"""The child as the command starts it: one job in, one answer out, whatever happens in between."""

import subprocess
import sys

import msgspec
import pytest
from profile_jobs import own_job, profile_job

from benchd.daemon.profiling.profile import CollectedProfile
from benchd.daemon.worker.profiling.__main__ import collected
from benchd.kernels.exact_conv2d import layer


@pytest.fixture
def answer(tmp_path, child_environment):
    """Run the child on a job; return its answer and what it wrote to stderr."""
    environment = child_environment | {"PYTHONPATH": ":".join(sys.path)}

    def run(job):
        command = [sys.executable, "-m", "benchd.daemon.worker.profiling"]
        given = msgspec.json.encode(job)
        done = subprocess.run(command, input=given, capture_output=True, check=False, env=environment, cwd=tmp_path)
        assert done.returncode == 0, done.stderr.decode()
        return msgspec.json.decode(done.stdout, type=CollectedProfile), done.stderr.decode()

    return run


def test_prints_do_not_reach_the_answer_and_progress_is_told(answer, tmp_path):
    loud = "print('loud'); os.system('echo louder')"
    profile, output = answer(own_job(tmp_path, forward=loud, methods=["torch", "memory"]))
    assert (profile.error, profile.benchmark, set(profile.missing)) == (None, None, {"snapshot"})
    assert (tmp_path / profile.trace).stat().st_size > 0
    assert profile.memory.peak_bytes > 0
    assert profile.model.input_shape == [3, 4, 4]
    for line in ("loud", "louder", "[1/2] memory", "[2/2] torch"):
        assert f"{line}\n" in output


def test_layers_and_the_rates_probed_with_them_precede_what_attaches_a_profiler(tmp_path, capsys):
    collected(own_job(tmp_path, methods=["benchmark", "layers"]))
    output = capsys.readouterr().err
    assert output.index("] layers") < output.index("] benchmark")


def test_a_module_that_raises_is_an_error_with_its_words_and_its_place(tmp_path, capsys):
    profile = collected(own_job(tmp_path, forward="raise ValueError('no such neuron')"))
    line = "net.py:14: in forward: raise ValueError('no such neuron')"
    assert (profile.error, profile.unsupported) == (f"{line}: ValueError: no such neuron", False)
    assert "net.py" in capsys.readouterr().err


def test_kernels_of_our_own_are_named(tmp_path):
    job = profile_job(tmp_path, variant="custom", methods=["torch"], options={"time_steps": 2})
    profile = collected(job)
    assert (profile.error, profile.kernels_ran, profile.device_name) == (None, layer.ran(), None)
    assert profile.kernels_ran.startswith("c")


def test_a_method_that_fails_costs_itself_alone(tmp_path):
    (tmp_path / "trace.json.gz").mkdir()  # where the trace is to be written
    profile = collected(own_job(tmp_path, methods=["torch", "memory"]))
    assert profile.trace is None
    assert "trace.json.gz" in profile.missing["torch"]
    assert profile.memory is not None


def test_what_cannot_run_here_is_unsupported_with_the_reason(tmp_path):
    profile = collected(own_job(tmp_path, variant="cudagraph"))
    assert (profile.error, profile.unsupported) == ("CUDA graphs need a CUDA device", True)
