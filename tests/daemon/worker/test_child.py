"""What a worker tells of itself: an exception as a status and one line, and its stages."""

import io
import re
import time
from contextlib import redirect_stderr
from io import FileIO, TextIOWrapper

import msgspec
import pytest
import torch
from worker_jobs import changed, job, measured, run_here, user_module

from benchd.daemon.errors import Unsupported, UsageError
from benchd.daemon.measuring.protocol import Stage
from benchd.daemon.worker import child
from benchd.models import catalog
from benchd.models.data_named import DataError


class OutOfMemoryError(RuntimeError):
    """Named as torch's."""


ASSERTION = 'captures_underway.empty() INTERNAL ASSERT FAILED at "/pytorch/c10/cuda/CUDACachingAllocator.cpp":3085'
NMS = "operator torchvision::nms does not exist"
RELATIVE = "attempted relative import with no known parent package"


@pytest.mark.parametrize(
    ("error", "status", "reason"),
    [
        (Unsupported("no GPU"), "unsupported", "no GPU"),
        (UsageError("no such file"), "failed", "no such file"),
        (MemoryError(), "failed", "out of memory: no message"),
        (OutOfMemoryError("tried 2 GiB"), "failed", "out of memory: tried 2 GiB"),
        (
            RuntimeError("CUDA error: out of memory\nCUDA kernel errors might be reported later"),
            "failed",
            "out of memory: CUDA error: out of memory",
        ),
        (RuntimeError("can't allocate 8 bytes"), "failed", "out of memory: can't allocate 8 bytes"),
        (RuntimeError(ASSERTION), "failed", f"RuntimeError: {ASSERTION}"),
        (
            RuntimeError(NMS),
            "failed",
            f"RuntimeError: {NMS}: torchvision was built for a different torch version; see `benchd doctor`",
        ),
        (
            ImportError(RELATIVE),
            "failed",
            f"ImportError: {RELATIVE}: name the package instead of the file, as in --module package.module:build",
        ),
        (KeyError("x"), "failed", "KeyError: 'x'"),
        (DataError("no images"), "failed", "no images"),
    ],
)
def test_an_exception_is_a_status_and_a_line(error, status, reason, capsys):
    assert child.diagnose(error) == (status, reason)
    assert bool(capsys.readouterr().err) is not isinstance(error, (Unsupported, UsageError))


def test_a_log_on_a_full_disk_hides_no_reason():
    with FileIO("/dev/full", "w") as file, redirect_stderr(TextIOWrapper(file, write_through=True)) as full:
        with pytest.raises(OSError, match="No space"):
            full.write("planted")
        assert child.diagnose(OSError(28, "No space left")) == ("failed", "OSError: [Errno 28] No space left")


GRADIENTS = """{mode}:
            images = images.flatten(1){clone}.requires_grad_()
            return torch.autograd.grad(self.fc(images).sin().sum(), images)[0]"""
OPENED = "with torch.inference_mode(False), torch.enable_grad()"


@pytest.mark.parametrize("mode", ["if True", OPENED])
def test_gradients_in_forward_are_told_from_a_fault_of_the_line(mode, tmp_path):
    outcome = run_here(job(tmp_path, module=user_module(tmp_path, forward=GRADIENTS.format(mode=mode, clone=""))))
    words = (
        r"net\.py:1\d: in forward: .* benchd runs inference without autograd: remove gradients .* clone of each input"
    )
    assert re.search(words, str(outcome.process.reason)), outcome.process.reason


def test_gradients_as_the_sentence_advises_run(tmp_path):
    forward = GRADIENTS.format(mode=OPENED, clone=".clone()")
    assert measured(job(tmp_path, module=user_module(tmp_path, forward=forward))).process.timing


def test_weights_that_do_not_fit_name_the_key(tmp_path):
    state = catalog.build("snn_onepass").state_dict()
    del state["fc2.bias"]
    torch.save(state, tmp_path / "weights.pth")
    options, weights = catalog.entry("snn_onepass").resolve({}), str(tmp_path / "weights.pth")
    outcome = run_here(changed(job(tmp_path, model="snn_onepass"), options=options, weights=weights))
    assert outcome.process.status == "failed"
    assert "fc2.bias" in outcome.process.reason


def test_a_stage_that_comes_twice_has_both_its_times(tmp_path):
    stages = child.StageClock(io.BytesIO(), job(tmp_path))
    for name in ("idle", "measure", "idle"):
        stages.enter(name)
        time.sleep(0.02)
    stages.leave()
    assert stages.stages().idle_s >= 0.04
    assert stages.stages().measure_s >= 0.02


def test_a_stage_that_goes_on_says_how_far_it_is(tmp_path):
    stages = child.StageClock(pipe := io.BytesIO(), job(tmp_path))
    stages.enter("accuracy")
    stages.go_on("image 2 of 5")
    lines = [msgspec.json.decode(line, type=Stage) for line in pipe.getvalue().splitlines()]
    assert lines == [Stage("accuracy"), Stage("accuracy", "image 2 of 5")]


def test_a_timed_stage_says_how_long_it_is_silent_whenever_its_turn_comes_back(tmp_path):
    stages = child.StageClock(pipe := io.BytesIO(), job(tmp_path))
    stages.enter("measure", "about 5 s without a sign")
    stages.wait_for_turn("measure")
    stages.go_on()
    lines = [msgspec.json.decode(line, type=Stage) for line in pipe.getvalue().splitlines()]
    assert [line.done for line in lines if line.name == "measure"] == ["about 5 s without a sign"] * 3
