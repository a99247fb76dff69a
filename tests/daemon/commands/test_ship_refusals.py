"""What `benchd ship` and `benchd verify` refuse before anything is measured, each in one sentence."""

from contextlib import nullcontext

import manifests_made
import pytest
from machines import write
from sessions_made import session
from typer.testing import CliRunner

from benchd.daemon.commands import ship, verify
from benchd.daemon.errors import NotAvailable, UsageError
from benchd.daemon.machine.lock import Busy, MachineLock
from benchd.daemon.measuring import plan
from benchd.daemon.measuring.plan import PlannedCase
from benchd.daemon.records import Case
from benchd.daemon.runtimes import PACKAGES
from benchd.daemon.shipping import manifest, race, verifying
from benchd.daemon.shipping.race_limits import ShipLimits


@pytest.mark.parametrize(
    ("arguments", "kind", "words"),
    [
        ([], UsageError, "give a model"),
        (["vim_tny"], UsageError, "did you mean 'vim_tiny'"),
        (["vim_tiny", "--module", "net.py:build"], UsageError, "your own model runs alone"),
        (["vim_tiny", "--max-latency", "0ms"], UsageError, "--max-latency 0ms: must be more than 0"),
        (["vim_tiny", "--rate", "0Hz"], UsageError, "--rate 0Hz: must be more than 0"),
        (["vim_tiny", "--max-latency", "fast"], UsageError, "expected a number with its unit"),
        (["vim_tiny", "--rate", "30rpm"], UsageError, "--rate 30rpm: expected a number with its unit, one of Hz, fps"),
        (["vim_tiny", "--min-agreement", "2"], UsageError, "at most 1"),
        (["vim_tiny", "--min-effect", "0%"], UsageError, "give the smallest difference that counts"),
        (["vim_tiny", "--minutes", "0"], UsageError, "more than 0"),
        (["vim_tiny", "--max-drop", "1%"], UsageError, "add --data"),
        (["vim_tiny", "--data", "demo", "--max-drop", "1%"], UsageError, "--accuracy or --weights"),
        (["square", "--data", "imagefolder:absent"], UsageError, "absent"),
        (["vim_tiny", "--variants", "tensorrt", "--device", "cpu"], NotAvailable, "none of these variants can run"),
    ],
)
def test_bad_input_says_what_to_do(tmp_path, arguments, kind, words):
    error = CliRunner().invoke(ship.app, [*arguments, "--output", str(tmp_path / "out")]).exception
    assert isinstance(error, kind)
    assert words in str(error)
    assert "\n" not in str(error)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("arguments", "images"),
    [
        (["--module", "net.py:build", "--input", "1x8x8", "--data", "demo", "--accuracy", "100"], 100),
        (["snn_onepass"], plan.POOL_IMAGES),  # its weights and images are the demo's by default
    ],
    ids=["a module", "a trained model"],
)
def test_a_limit_of_accuracy_races_what_measures_it(tmp_path, monkeypatch, arguments, images):
    entries = []
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(ship, "Session", lambda *_, **__: nullcontext())
    monkeypatch.setattr(ship, "_ship", lambda session, candidates, *_, **__: entries.extend(candidates) or 0)
    (tmp_path / "net.py").write_text("def build(): ...\n")
    done = CliRunner().invoke(ship.app, [*arguments, "--max-drop", "1%", "--device", "cpu", "--output", "out"])
    assert done.exit_code == 0, done.exception
    assert {entry.inputs.accuracy for entry in entries} == {images}


def shipped(folder, *, page=False):
    """Ship a case into the folder, as after the command line was read."""
    candidates = [PlannedCase(Case(model="square"), "ship", race.LIMITS, True, None)]
    with session(folder) as opened:
        return ship._ship(opened, candidates, ShipLimits(), 1.0, folder / "out", page=page, json=False)


def test_a_busy_machine_leaves_the_log_of_the_race_that_runs_as_it_is(tmp_path, monkeypatch):
    monkeypatch.setenv("BENCHD_LOCK_DIR", str(tmp_path))
    log = tmp_path / race.LOG
    log.write_bytes(b'{"digest":"of another plan"}\n')
    with MachineLock(), pytest.raises(Busy):
        shipped(tmp_path)
    assert log.read_bytes() == b'{"digest":"of another plan"}\n'


def test_int8_inside_torch_is_left_out_and_says_why(tmp_path, monkeypatch):
    monkeypatch.setattr(
        plan,
        "inspect",
        lambda device: plan.Machine("cpu", True, packages=frozenset(PACKAGES)),
    )
    result = CliRunner().invoke(ship.app, ["vim_tiny", "--variants", "int8", "--output", str(tmp_path / "out")])
    assert isinstance(result.exception, NotAvailable)
    assert "not int8: int8 within PyTorch " in result.stderr
    assert result.stderr.count("\n") == 1


@pytest.mark.parametrize(("given", "device"), [([], "cpu"), (["--device", "cuda"], "cuda")])
def test_a_promise_of_the_cpu_is_verified_there_unless_told_otherwise(tmp_path, monkeypatch, given, device):
    def verify_on(folder, shipped, session, *_, **__):
        raise NotAvailable(session.machine.device)

    write(tmp_path, {"weights.safetensors": ""})
    manifest.write(tmp_path, manifests_made.manifest())
    monkeypatch.setattr(plan, "has_gpu", lambda *root: True)
    monkeypatch.setattr(verifying, "verify", verify_on)
    assert str(CliRunner().invoke(verify.app, [str(tmp_path), *given]).exception) == device
