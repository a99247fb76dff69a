"""The child as the command starts it: one job in, one answer out, whatever happens in between."""

import subprocess
import sys

import msgspec
import pytest
from profile_jobs import own_job, profile_job

from benchd.daemon.profiling.profile import Collected
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
        return msgspec.json.decode(done.stdout, type=Collected), done.stderr.decode()

    return run


def test_prints_do_not_reach_the_answer_and_progress_is_told(answer, tmp_path):
    loud = "print('loud'); os.system('echo louder')"
    found, told = answer(own_job(tmp_path, forward=loud, methods=["torch", "memory"]))
    assert (found.error, found.benchmark, set(found.missing)) == (None, None, {"snapshot"})
    assert (tmp_path / found.trace).stat().st_size > 0
    assert found.memory.peak_bytes > 0
    assert found.model.input_shape == [3, 4, 4]
    for line in ("loud", "louder", "[1/2] memory", "[2/2] torch"):
        assert f"{line}\n" in told


def test_layers_and_the_rates_probed_with_them_precede_what_attaches_a_profiler(tmp_path, capsys):
    collected(own_job(tmp_path, methods=["benchmark", "layers"]))
    told = capsys.readouterr().err
    assert told.index("] layers") < told.index("] benchmark")


def test_a_module_that_raises_is_an_error_with_its_words_and_its_place(tmp_path, capsys):
    found = collected(own_job(tmp_path, forward="raise ValueError('no such neuron')"))
    line = "net.py:14: in forward: raise ValueError('no such neuron')"
    assert (found.error, found.unsupported) == (f"{line}: ValueError: no such neuron", False)
    assert "net.py" in capsys.readouterr().err


def test_kernels_of_our_own_are_named(tmp_path):
    job = profile_job(tmp_path, variant="custom", methods=["torch"], options={"time_steps": 2})
    found = collected(job)
    assert (found.error, found.kernels_ran, found.device_name) == (None, layer.ran(), None)
    assert found.kernels_ran.startswith("c")


def test_a_method_that_fails_costs_itself_alone(tmp_path):
    (tmp_path / "trace.json.gz").mkdir()  # where the trace is to be written
    found = collected(own_job(tmp_path, methods=["torch", "memory"]))
    assert found.trace is None
    assert "trace.json.gz" in found.missing["torch"]
    assert found.memory is not None


def test_what_cannot_run_here_is_unsupported_with_the_reason(tmp_path):
    found = collected(own_job(tmp_path, variant="cudagraph"))
    assert (found.error, found.unsupported) == ("CUDA graphs need a CUDA device", True)
