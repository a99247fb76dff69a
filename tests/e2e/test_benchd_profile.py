"""The real `benchd profile`: every method on a small net, what it leaves and publishes, and every way to end."""

import errno
import os
import signal
from pathlib import Path

import msgspec
import pytest
from records_made import written as published
from waiting import wait_for

from benchd.daemon.delivery.sinks import LogSink
from benchd.daemon.errors import UsageError
from benchd.daemon.profiling.profile import Profile

SMALL = ("snn_onepass", "--batch-sizes", "2", "--option", "time_steps=2", "--device", "cpu")


@pytest.fixture
def profile(tmp_path, here):
    """Return a function that runs `benchd profile` in `tmp_path`, in this process."""
    return lambda *arguments: here("benchd", "profile", *arguments, "--output", str(tmp_path / "out"))


def written(folder):
    return msgspec.json.decode((folder / "out" / "profile.json").read_bytes(), type=Profile)


def test_every_method_needs_no_gpu(profile, tmp_path, mosquitto):
    url = mosquitto.url.replace("//", "//me:not-for-others@")
    done = profile(*SMALL, "--method", "all", "--preset", "quick", "--mqtt", url)
    assert done.returncode == 0, done.stderr
    written_profile = written(tmp_path)
    assert all(
        (
            written_profile.torch,
            written_profile.memory,
            written_profile.benchmark,
            written_profile.layers,
        )
    )
    assert "nsight-systems" in written_profile.missing["nsys"]
    assert "nsight-compute" in written_profile.missing["ncu"]
    assert (written_profile.model.weights, written_profile.model.data) == ("demo", "256 of the 359 images of demo")
    assert "OnePass" in {module.name for module in written_profile.torch.modules}
    assert any("aten::" in operator.name for operator in written_profile.torch.operators)
    for text in ("Operators", "Benchmark", "Components", "Layers", "not installed"):
        assert text in done.stdout
    names = {path.name for path in (tmp_path / "out").iterdir()}
    assert {"profile.json", "report.md", "records.jsonl", "cursor.json", "trace.json.gz"} <= names
    assert written(tmp_path).command.endswith(f"--mqtt {mosquitto.url} --output {tmp_path / 'out'}")
    files = [path for path in (tmp_path / "out").rglob("*") if path.is_file()]
    assert [path.name for path in files if b"not-for-others" in path.read_bytes()] == []
    (record,) = published(tmp_path)
    flags = [flag for flag in record.flags if flag != "busy_machine"]  # as tests beside this one decide
    assert (record.status, flags, record.case_id) == ("ok", ["profiled"], written_profile.case_id)
    assert record.timing.median_ms == written_profile.benchmark.step.median_ns / 1e6
    warnings = [line for line in done.stderr.splitlines() if line.startswith("warning") and "busy machine" not in line]
    assert warnings == []

    again = profile(*SMALL)
    assert again.returncode == 2
    assert "is not empty; give a new folder" in again.stderr


def test_the_evaluation_s_profile_as_json(profile, tmp_path):
    done = profile(*SMALL, "--method", "torch", "--workload", "eval", "--steps", "2", "--warmup", "0", "--json")
    assert done.returncode == 0, done.stderr
    written_profile = msgspec.json.decode(done.stdout, type=Profile)
    assert written_profile == written(tmp_path)
    assert [step.number for step in written_profile.torch.steps] == [0, 1]
    assert {"OnePass", "CrossEntropyLoss"} <= {module.name for module in written_profile.torch.modules}
    assert "aten::item" in {operator.name for operator in written_profile.torch.operators}
    (record,) = published(tmp_path)
    assert (record.timing, record.missing["timing"]) == (None, "the benchmark method was not requested")


BENCHMARK = ("square", "--option", "size=16", "--device", "cpu", "--method", "benchmark", "--preset", "quick")


def test_a_record_and_files_that_cannot_be_stored_are_said_and_cost_no_table(profile, monkeypatch):
    replaced = Path.replace

    def publish(sink, record, body):
        raise UsageError("no room")

    def full(path, target):
        if target.name.startswith(("profile.json", "report.")) and target.parent.name == "out":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return replaced(path, target)

    monkeypatch.setattr(LogSink, "publish", publish)
    monkeypatch.setattr(Path, "replace", full)
    done = profile(*BENCHMARK, "--steps", "1")
    assert done.returncode == 1, done.stderr
    assert "warning: not stored: square,eager,b1,size=16: no room" in done.stderr
    assert "profile.json: No space left on device" in done.stderr
    assert "report.md: No space left on device" in done.stderr
    assert "ms" in done.stdout


def test_a_module_that_raises_is_an_error_with_its_reason(profile, tmp_path):
    text = (
        "from torch import nn\nclass Net(nn.Module):\n    def forward(self, x):\n        raise ValueError('no luck')\n"
    )
    (tmp_path / "net.py").write_text(text + "def build():\n    return Net()\n")
    done = profile("--module", "net.py:build", "--input", "3x4x4", "--device", "cpu")
    assert done.returncode == 6
    assert "error: torch: net.py:4: in forward: raise ValueError('no luck'): ValueError: no luck" in done.stderr
    (record,) = published(tmp_path)
    assert (record.status, record.timing) == ("failed", None)


def test_a_profiler_that_dies_is_said(profile, tmp_path):
    (tmp_path / "net.py").write_text("import os\ndef build():\n    os.abort()\n")
    done = profile("--module", "net.py:build", "--input", "3x4x4", "--device", "cpu")
    assert done.returncode == 6
    assert "the profiling process was killed by SIGABRT without a result" in done.stderr


def test_an_interrupt_ends_the_child_too(begun, tmp_path):
    text = "import os, time\ndef build():\n    open('pid', 'w').write(str(os.getpid()))\n    time.sleep(6000)\n"
    (tmp_path / "net.py").write_text(text)
    pid = tmp_path / "pid"
    words = ("profile", "--module", "net.py:build", "--input", "3x4x4", "--device", "cpu", "--output", "out")
    with begun("benchd", *words) as (process, stream):
        wait_for(lambda: pid.exists() and pid.read_text(), process, "the module was never built")
        process.send_signal(signal.SIGINT)
        output = stream.read()
    assert process.returncode == 130
    assert "interrupted" in output
    assert not Path("/proc", pid.read_text()).exists()


def test_the_rate_at_which_spikes_cost_what_the_ann_does(profile, tmp_path):
    net = ("snn_stbif_resnet18", "--option", "width=8", "--option", "time_steps=4", "--batch-sizes", "1")
    done = profile(*net, "--variants", "eager", "--method", "break-even", "--preset", "quick", "--device", "cpu")
    assert done.returncode == 0, done.stderr
    written_profile = written(tmp_path)
    assert (written_profile.break_even.processes, written_profile.break_even.ann) == (
        3,
        "qann_resnet18,eager,b1,width=8",
    )
    assert written_profile.model.options["time_steps"] == 4
    assert written_profile.break_even.energy is None
    assert "Break-even" in done.stdout
    assert "spikes per neuron per step" in (tmp_path / "out" / "report.md").read_text()
