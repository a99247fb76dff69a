"""The exit code of a pass, and which of several facts decides it."""

import pytest
import records_made
from records_made import made
from sessions_made import session
from typer.testing import CliRunner

from benchd.daemon.commands import once
from benchd.daemon.config import LimitsConfig, Suite
from benchd.daemon.measuring import plan
from benchd.daemon.measuring.plan import Machine
from benchd.daemon.records import Case, Variant
from benchd.daemon.verdicts.compare import comparison
from benchd.daemon.verdicts.effects import Verdict

CPU = Machine("cpu", has_cxx=True)
OK = made()
WRONG = made(check=records_made.WRONG)
DEAD = made(status="failed", timing=None)
LATE = made(status="timeout", timing=None)
ABSENT = made(status="unsupported", timing=None, case=Case(model="vim_tiny", variant=Variant("tensorrt")))


def test_the_records_name_the_gpu_that_is_measured(tmp_path, monkeypatch):
    (tmp_path / "nvidia-smi").write_text('#!/bin/sh\necho "$1, 560.35.03, 170 W"\n')
    (tmp_path / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    machine = Machine("cuda", has_cxx=True, gpu_uuid="GPU-1a2b")
    assert session(tmp_path, machine=machine).run("suite").environment.gpu == "--id=GPU-1a2b"


@pytest.mark.parametrize(
    ("records", "by_name", "interrupted", "code"),
    [
        ([OK], False, False, 0),
        ([OK, ABSENT], False, False, 0),
        ([OK, DEAD], False, False, 1),
        ([OK, LATE], False, False, 1),
        ([OK, WRONG], False, False, 5),
        ([WRONG, DEAD], False, False, 1),
        ([DEAD], False, False, 6),
        ([], False, False, 6),
        ([ABSENT], False, False, 6),
        ([OK, ABSENT], True, False, 7),
        ([DEAD, ABSENT], True, False, 7),
        ([OK, ABSENT], True, True, 130),
    ],
)
def test_the_first_of_what_holds_decides(records, by_name, interrupted, code):
    variants = ["eager", "tensorrt"] if by_name else []
    planned = plan.plan([Suite(models=["vim_tiny"], variants=variants, preset="quick")], LimitsConfig(), CPU)
    assert once.exit_code(planned, records, interrupted) == code


@pytest.mark.parametrize(
    ("answers", "records", "fail_on", "code"),
    [
        (["same", "slower", "inconclusive"], [OK], ["slower", "check"], 3),
        (["faster", "inconclusive"], [OK], ["slower", "check"], 0),
        (["faster", "inconclusive"], [OK], ["inconclusive"], 4),
        (["slower", "inconclusive"], [OK], ["slower", "inconclusive"], 3),
        (["slower"], [WRONG], ["slower", "check"], 5),
        (["slower"], [WRONG], ["slower"], 3),
        (["slower"], [OK, DEAD], ["slower"], 1),
        ([], [WRONG], ["slower"], 0),
    ],
)
def test_a_verdict_fails_the_pass_where_that_was_asked_for(answers, records, fail_on, code):
    planned = plan.plan([Suite(models=["vim_tiny"], preset="quick")], LimitsConfig(), CPU)
    comparisons = [comparison(("a", "a"), Verdict(answer=answer), ([], []), ([], [])) for answer in answers]
    assert once.exit_code(planned, records, False, fail_on, comparisons) == code


def test_models_replace_a_configured_module_with_its_inputs_and_weights(tmp_path):
    file = tmp_path / "device.toml"
    file.write_text(
        '[[suite]]\nmodule = "package.net:build"\ninputs = ["8"]\nweights = "/absent.pth"\npreset = "quick"\n'
    )
    plain = ["--models", "snn_onepass", "--variants", "eager", "--dry-run", "--device", "cpu"]
    replaced = CliRunner().invoke(once.app, [*plain, "--config", str(file)])
    assert replaced.stdout == CliRunner().invoke(once.app, plain).stdout
    assert "snn_onepass,eager,b64" in replaced.stdout
