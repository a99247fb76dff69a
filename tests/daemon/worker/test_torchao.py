"""Int8 inside torch: quantised by torchao with the calibration images, and refused unless all of it ran in int8."""

import sys
import types

import pytest
from worker_jobs import changed, job, run_here, user_module

from benchd.daemon.machine.installed import adding
from benchd.daemon.measuring.plan import Machine, why_not
from benchd.daemon.records import Case, InputSpec, Variant
from benchd.daemon.worker.backends import torchao
from benchd.models import catalog

INT8 = Variant(precision="int8")
CONVS = """
    torch.manual_seed(0)
    parts = [nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(128, 5)]
    return nn.Sequential(*parts)
"""
TORCHAO = frozenset({"torchao"})
CPU = Machine("cpu", has_cxx=True, packages=TORCHAO)


def ran(folder, build=CONVS, **fields):
    """Run the module as int8 in this process, calibrated with 32 random inputs."""
    given = job(folder, module=user_module(folder, build=build), variant=INT8, **fields)
    spec = InputSpec("", "float32", [3, 8, 8])
    return run_here(changed(given, calibration="random", calibration_images=32, inputs=[spec]))


@pytest.fixture
def installed():
    pytest.importorskip("torchao", reason="quantises, beside a torch that it was made for", exc_type=ImportError)
    if why_not(Case(model="", variant=INT8), CPU):
        pytest.skip("its int8 is for x86")


@pytest.mark.slow  # inductor's compiler takes ten seconds
def test_what_is_in_int8_ran_in_int8_and_the_rest_is_in_the_record(installed, tmp_path):
    outcome = ran(tmp_path, batch_size=2)
    assert outcome.process.status == "ok", outcome.process.reason
    (facts,) = outcome.artifacts
    assert (facts.format, facts.quantisation.layers, facts.reused) == ("safetensors", 1, False)
    assert facts.quantisation.left_fp32 == {"0": "first layer", "5": "last layer"}
    assert facts.quantisation.calibration == "32 random inputs"
    assert outcome.runtime.notes == ["products in int8: 1 qconv_pointwise"]
    assert (outcome.check.rule, outcome.check.images) == ("outputs", 64)
    assert 1e-4 < outcome.check.error_share < 0.1, "float32 would be nearer"


def test_a_net_that_claims_int8_and_runs_float_is_refused(installed, tmp_path, monkeypatch):
    monkeypatch.setattr(torchao.inductor, "compile", lambda graph, inputs, options: graph)
    outcome = ran(tmp_path)
    assert (outcome.process.status, outcome.process.timing) == ("unsupported", None)
    assert "of the 1 products that torchao quantised, inductor runs only 0 in int8" in outcome.process.reason


@pytest.mark.parametrize(
    ("build", "reason"),
    [
        ("return nn.Sequential(nn.Flatten(), nn.Linear(192, 8), nn.Linear(8, 5))", "nothing to quantise: 2 products"),
        (
            "class Odd(nn.Sequential):\n"
            "        def forward(self, x):\n"
            "            return super().forward(x) if x.sum().item() > 0 else x.flatten(1)[:, :5]\n"
            "    return Odd(nn.Flatten(), nn.Linear(192, 5))",
            "torch.export and torchao cannot prepare it: ",
        ),
    ],
)
def test_what_cannot_be_quantised_says_why(installed, tmp_path, build, reason):
    outcome = ran(tmp_path, build)
    assert (outcome.process.status, outcome.process.reason.startswith(reason)) == ("unsupported", True), outcome.process


def test_a_net_that_draws_random_numbers_is_refused(tmp_path):
    a_job = job(tmp_path, model="snn_onepass", variant=INT8)
    options = catalog.entry("snn_onepass").resolve({"encoding": "rate", "time_steps": 1})
    outcome = run_here(changed(a_job, options=options))
    assert (outcome.process.status, "draws random numbers" in outcome.process.reason) == ("unsupported", True)


def test_a_torchao_of_another_torch_says_so_in_one_sentence(tmp_path, monkeypatch):
    monkeypatch.delitem(sys.modules, "benchd.exporters.pt2e", raising=False)
    monkeypatch.setitem(sys.modules, "torchao", types.ModuleType("torchao"))
    monkeypatch.setitem(sys.modules, "torchao.quantization.pt2e.observer", None)
    outcome = ran(tmp_path)
    assert outcome.process.status == "unsupported"
    assert "the installed torchao does not work with torch 2." in outcome.process.reason
    assert adding("int8") in outcome.process.reason
