"""The real `benchd export`: what it writes, lists and prunes, and what a full disk or a kill leaves."""

import json
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from disks import tmpfs
from waiting import wait_for
from worker_jobs import user_module

from benchd.exporters import sessions
from benchd.exporters.artifacts import ArtifactStore

onnx = pytest.importorskip("onnx", reason="reads and writes files")
parser = pytest.importorskip("onnx.parser")
pytest.importorskip("onnxscript", reason="exports")
pytest.importorskip("onnxruntime", reason="runs what was exported")

SMALL = ("square", "--option", "size=16")


def state(folder):
    return folder / "state" / "benchd" / "artifacts"


def test_a_file_is_written_where_it_was_asked_for_and_comes_from_the_store_the_next_time(here, tmp_path):
    done = here("benchd", "export", *SMALL, "--output", "net.onnx")
    assert done.returncode == 0, done.stderr
    assert "[1/1] square fp32 batch 1" in done.stderr
    assert "made" in done.stdout
    assert "in net.onnx" in done.stdout
    onnx.checker.check_model(tmp_path / "net.onnx", full_check=True)
    assert (tmp_path / "net.onnx").stat().st_mode & 0o777 == 0o644
    sessions.open_session(tmp_path / "net.onnx")

    again = here("benchd", "export", *SMALL, "--output", "deeper/net.onnx", "--json")
    assert again.returncode == 0, again.stderr
    (entry,) = json.loads(again.stdout)
    assert entry["reused"]
    assert (tmp_path / "deeper" / "net.onnx").read_bytes() == (tmp_path / "net.onnx").read_bytes()

    listed = here("benchd", "export", "--list")
    assert entry["key"] in listed.stdout
    assert f"\n1 file, 0.0 MB in {state(tmp_path)}\n" in listed.stdout
    assert here("benchd", "export", "--prune", "0").stdout == f"removed {entry['key']}\n"
    assert here("benchd", "export", "--list").stdout == f"0 files, 0.0 MB in {state(tmp_path)}\n"


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (("--prune", "much"), 2, "--prune much: expected a size such as 512MiB or 2GiB"),
        (("square", "--to", "tensorrt"), 7, "an engine is built on the GPU that will run it, for one batch size"),
        (("square", "--option", "size=16", "--output", "taken/net.onnx"), 2, "--output taken/net.onnx: "),
    ],
)
def test_what_does_not_work_ends_with_its_code_and_its_reason(here, tmp_path, arguments, code, words):
    (tmp_path / "taken").write_text("a file")
    done = here("benchd", "export", *arguments)
    assert done.returncode == code, done.stderr
    assert words in done.stderr
    assert "Traceback" not in done.stderr
    assert "[1/1]" not in done.stderr, "said after an export"
    assert not {path.name for path in tmp_path.iterdir()} - {"taken", "tiny.toml", "state", "cache"}


@pytest.fixture
def small_disk(tmp_path):
    """A file system of one megabyte in the place of the state folder."""
    with tmpfs(tmp_path / "small", "size=1m") as folder:
        yield folder


def test_a_full_disk_is_said_and_leaves_nothing_and_the_other_files_go_on(here, small_disk):
    done = here("benchd", "export", "snn_onepass,square", "--output", str(small_disk))
    assert done.returncode == 1
    assert "error: snn_onepass fp32 batch 1: artifact store" in done.stderr
    assert "disk full, and this artifact needs more than 1.0 MB" in done.stderr
    assert [artifact.metadata.facts["model"] for artifact in ArtifactStore(small_disk).list()] == ["square"]
    assert len(list(small_disk.rglob("*.onnx"))) == 1


def test_a_kill_of_the_command_alone_ends_its_child_too(tmp_path, child_environment):
    waits = "while torch.compiler.is_exporting(): time.sleep(0.01)"
    module = user_module(tmp_path, forward=waits)
    line = [Path(sys.executable).parent / "benchd", "export", "--module", module, "--output", "artifacts"]
    with subprocess.Popen(line, cwd=tmp_path, env=child_environment) as process:
        wait_for(lambda: list(tmp_path.glob("artifacts/.making/*")), process)
        (child,) = psutil.Process(process.pid).children()
        process.kill()
    wait_for(lambda: not child.is_running() or child.status() == psutil.STATUS_ZOMBIE)
