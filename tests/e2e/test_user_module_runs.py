"""A user's module through the real commands: what is measured is the file as it is, whatever was measured before."""

import sys
from pathlib import Path

import pytest
from records_made import written
from simulations import slow

from benchd.daemon.measuring import process
from benchd.daemon.verdicts import sameness

pytest.importorskip("onnxscript", reason="exports")
onnx = pytest.importorskip("onnx", reason="writes a file")
pytest.importorskip("onnx.parser", reason="writes a file")
pytest.importorskip("onnxruntime", reason="runs what was exported")

LIMITS = ("--config", "tiny.toml", "--preset", "quick", "--device", "cpu", "--output", "out")
NET = """
import sys
from pathlib import Path
from torch import nn
sys.path.insert(0, str(Path(__file__).parent))
{imports}

class Net(nn.Module):
    input_shape = (3, 8, 8)

    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(8, 8)

    def forward(self, images):
        for _ in range({turns}):
            images = self.fc(images)
        return images

def build():
    return Net()
"""


def net(folder, turns, imports=""):
    folder.mkdir(exist_ok=True)
    (folder / "net.py").write_text(NET.format(turns=turns, imports=imports))
    return f"{folder.name}/net.py:build"


def test_a_configuration_names_a_function_of_an_installed_package_and_not_of_the_current_folder(
    once, tmp_path, monkeypatch
):
    net(tmp_path / "site", 1)
    net(tmp_path, 2)  # is not taken
    with (tmp_path / "tiny.toml").open("a") as configuration:
        configuration.write('[[suite]]\nmodule = "net:build"\nvariants = ["eager"]\npreset = "quick"\n')
    # without the folders of user files that earlier tests imported
    monkeypatch.setattr(sys, "path", [folder for folder in sys.path if not Path(folder, "net.py").exists()])
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "site"))
    monkeypatch.syspath_prepend(tmp_path / "site")
    done = once()
    (record,) = written(tmp_path)
    assert (record.case.case_id, record.check.passed) == ("own.net.build,eager,b1", True), done.stdout
    monkeypatch.delenv("PYTHONPATH")
    sys.path.remove(str(tmp_path / "site"))
    done = once()
    assert done.returncode == 2
    assert "suite.module: net:build: no package 'net' in this environment" in done.stderr


@pytest.fixture
def run(here, once, tmp_path):
    """Return a function that runs a program and returns the records that it wrote, all checks passed."""

    def run(program, *arguments):
        before = len(written(tmp_path))
        done = once(*arguments) if program == "bench-once" else here(program, *arguments, *LIMITS)
        (tmp_path / "said").write_text(f"{done.stdout}exit {done.returncode}")
        results = written(tmp_path)[before:]
        assert [record.check and record.check.passed for record in results] == [True] * len(results), done.stdout
        assert results, done.stderr
        return results

    return run


def as_file(run, module, *arguments):
    """Measure a module as a file; return the record."""
    (record,) = run("bench-once", "--module", module, "--variants", "onnxruntime", *arguments)
    return record


def sha256(record):
    return record.artifacts[0].sha256


def test_a_module_is_measured_as_it_is_now_and_leaves_nothing_behind(run, tmp_path, monkeypatch):
    """A setting from outside, which no digest sees, counts; so does a file that the module imports, as its code."""
    module = net(tmp_path / "own", 'TURNS * int(os.environ["TURNS"])', "import os\nfrom helper import TURNS")
    (tmp_path / "own" / "helper.py").write_text("TURNS = 1")
    monkeypatch.setenv("TURNS", "1")
    first = as_file(run, module)
    monkeypatch.setenv("TURNS", "3")
    other = as_file(run, module)
    (tmp_path / "own" / "helper.py").write_text("TURNS = 2")
    eager, edited = run("bench-once", "--module", module, "--variants", "eager,onnxruntime")
    assert len({sha256(first), sha256(other), sha256(edited)}) == 3
    assert sameness.files_changed([first, other]) == ["$TURNS"]
    assert sameness.files_changed([other, edited]) == ["helper.py"]
    assert sameness.files_changed([eager, edited]) == []
    assert first.model.weights_sha256 == other.model.weights_sha256 == edited.model.weights_sha256
    store = tmp_path / "state" / "benchd" / "artifacts"
    assert [path.parent.name for path in store.glob("*/model.onnx")] == [edited.artifacts[0].key]


EDITS = "Path(__file__).with_name('helper.py').open('a').write('TURNS += 1\\n')\nfrom helper import TURNS"
COUNTS = """
table = Path(__file__).with_name('table')
turns = int(table.read_text())
table.write_text(str(turns + 1))
"""
# a forked worker has the state of Python's own generator from the one before it
DRAWS = "import random, torch\ntorch.manual_seed(random.SystemRandom().getrandbits(32))"
REPLACES = """import random, torch
from safetensors.torch import save_file
weights = {'fc.weight': torch.full((8, 8), random.SystemRandom().random()), 'fc.bias': torch.zeros(8)}
save_file(weights, Path(__file__).with_name('w.safetensors'))
"""


def test_a_module_that_is_edited_while_it_is_measured_ends_the_comparison(run, tmp_path):
    """Its helper is another one in each process."""
    own = ("--module", net(tmp_path / "own", "TURNS", EDITS))
    (tmp_path / "own" / "helper.py").write_text("TURNS = 1\n")
    results = run("benchd", "compare", "--live", "eager,b1", *own, *own, "--pairs", "2")
    (edited,) = [record for record in results if len(record.processes) == 2]
    assert (edited.status, edited.timing) == ("failed", None)
    assert "exact answers to the same inputs differ" in edited.reason
    assert ": helper.py changed; " in edited.reason


def test_a_data_file_that_changes_between_two_variants_is_named_and_nothing_ships(run, tmp_path):
    own = net(tmp_path / "own", "turns", COUNTS)
    (tmp_path / "own" / "table").write_text("1")
    run("bench-once", "--module", own, "--variants", "eager,bf16")
    output = (tmp_path / "said").read_text()
    assert "own.net.build b1: nothing to ship: its exact answers to the same inputs differ" in output
    assert ": table changed; " in output
    assert output.endswith("exit 1")


@pytest.mark.parametrize(
    ("does", "options", "words"),
    [
        slow(DRAWS, [], "different weights: they differ each time the model is built: seed every random number"),
        slow(REPLACES, ["--weights", "own/w.safetensors"], "different weights: w.safetensors was replaced; "),
    ],
    ids=["drawn weights", "checkpoint"],
)
def test_variants_of_what_changes_during_a_run_are_not_ranked(run, tmp_path, does, options, words):
    own = net(tmp_path / "own", 1, does)
    (tmp_path / "own" / "w.safetensors").touch()
    eager, half = run("bench-once", "--module", own, "--variants", "eager,bf16", *options)
    assert (eager.status, half.status) == ("ok", "ok")
    output = (tmp_path / "said").read_text()
    assert f"own.net.build b1: nothing to ship: {words}" in output
    assert output.endswith("exit 1")


def test_an_onnx_file_that_is_replaced_between_two_processes_fails_its_case(here, tmp_path, monkeypatch):
    starts = iter([1.0, 2.0])
    start = process.Child._spawn

    def replacing(worker, *arguments):
        linear(tmp_path, next(starts))
        return start(worker, *arguments)

    monkeypatch.setattr(process.Child, "_spawn", replacing)
    linear(tmp_path, 1.0)
    done = here("bench-once", "--onnx", "net.onnx", "--processes", "2")
    assert "net.onnx changed" in done.stdout, done.stderr
    (record,) = written(tmp_path)
    assert (record.status, record.timing, len(record.processes)) == ("failed", None, 2)
    assert record.reason.startswith("different weights: net.onnx changed; ")


def linear(folder, bias):
    """Write net.onnx in one step: a reader sees the one or the other."""
    text = f"g (float[N,4] x) => (float[N,4] y) <float[4] bias = {{{bias},2,3,4}}> {{ y = Add(x, bias) }}"
    onnx.save(onnx.parser.parse_model(f'<ir_version: 9, opset_import: ["" : 20]> {text}'), folder / "new.onnx")
    (folder / "new.onnx").replace(folder / "net.onnx")
