"""`benchd ship` and `benchd verify` on a small module: the folder, its LOAD.md, and every planted fault."""

import json
import re
import shutil
import subprocess
from pathlib import Path

import fresh
import msgspec
import numpy as np
import onnx
import pytest
import torch
from manifests_made import seal
from onnx import helper, numpy_helper
from planted import planted
from safetensors.torch import load_file, save_file
from waiting import WAIT_S

from benchd.daemon.errors import UsageError
from benchd.daemon.shipping import manifest
from benchd.daemon.shipping.folder import refuse_existing
from benchd.daemon.shipping.racing import PROMISED
from benchd.daemon.verdicts import doubts, results

MODULE = """
import torch
from torch import nn


class Two(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(64, 96), nn.Linear(96, 8)

    def forward(self, x):
        hidden = torch.relu(self.first(x.flatten(1)))
        scores = self.second(hidden)
        return {"scores": scores, "others": -scores.flip(1)}


def build():
    torch.manual_seed(0)
    return Two()
"""
CONFIG = """
[device]
id = "test-device"

[limits]
warm_up_cap_s = 0.1
measure_cap_s = 0.1
check_images = 2
"""
OTHERS = ("eager", "fp16", "bf16", "amp", "aoti", "compile", "compile-amp", "openvino", "openvino-bf16")
OURS = ("eager", "custom", "custom-int8", "custom-bf16", "custom-aoti", "custom-compile", "onnxruntime-int8")
OWN = ("--module", "two.py:build", "--input", "x=4x4x4")
SHORT = ("--config", "tiny.toml", "--device", "cpu", "--wait")


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A folder with the module and our own caches, in which each variant is shipped once."""
    folder = tmp_path_factory.mktemp("ships")
    (folder / "two.py").write_text(MODULE)
    (folder / "tiny.toml").write_text(CONFIG)
    return folder


@pytest.fixture
def benchd(place, here, monkeypatch):
    """Return a function that runs a command there, in this process, with caches that all tests here share."""
    for name in ("STATE", "CACHE"):
        monkeypatch.setenv(f"XDG_{name}_HOME", str(place / name.lower()))

    def run(*arguments, cwd=place):
        monkeypatch.chdir(cwd)
        return here("benchd", *map(str, arguments))

    return run


@pytest.fixture
def shipped(benchd, place):
    """Return a function that gives the folder of a variant, shipped once."""

    def folder(variant, *model):
        out = place / f"{model[0] if model else 'own'}-{variant}"
        if not out.exists():
            given = (*(model or (*OWN, "--json")), "--variants", variant, "--threads", "1")
            done = benchd("ship", *given, "--output", out, *SHORT)
            for _ in range(9):  # beside other load its processes may be too far apart to promise anything
                if done.returncode != 4 or "is no promise" not in done.stdout:
                    break
                done = benchd("ship", *given, "--output", out, *SHORT)
            if done.returncode == 6 and "unsupported: OpenVINO computes none of its layers in bf16" in done.stdout:
                pytest.skip("needs a CPU with bf16")
            assert done.returncode == 0, done.stdout + done.stderr
            if model:
                assert "ship: " in done.stdout
            else:
                report = json.loads(done.stdout)
                assert (report["race"]["winner"], report["folder"]) == (variant, str(out))
                assert report["manifest"] == json.loads((out / manifest.MANIFEST).read_text())
        return out

    return folder


def copy_of(folder, tmp_path):
    return Path(shutil.copytree(folder, tmp_path / "copy"))


def sealed(folder):
    """Make the hashes those of the files again, as one who changes them on purpose would."""
    content = msgspec.json.decode((folder / manifest.MANIFEST).read_bytes())
    content["resources"] = msgspec.to_builtins(manifest.resources(folder))
    (folder / manifest.MANIFEST).write_bytes(msgspec.json.encode(content))
    seal(folder)


def test_a_folder_is_whole_and_nothing_is_left_beside_it(shipped):
    folder = shipped("onnxruntime")
    contents = manifest.read(folder)
    assert {resource.name for resource in contents.resources} == {
        "LOAD.md",
        "golden.npz",
        "model.onnx",
        "records.jsonl",
    }
    assert not folder.with_name(f"{folder.name}.race").exists()
    assert len(contents.promised.processes_ms) >= PROMISED  # more where their interval is wide
    assert contents.promised.low_ms <= contents.promised.latency_ms <= contents.promised.high_ms
    assert [tensor.name for tensor in contents.outputs] == ["scores", "others"]
    assert [tensor.name for tensor in (*contents.inputs, *contents.read)] == ["x", "x"]  # as the user calls it


def test_a_folder_that_is_there_already_is_not_replaced(shipped, benchd):
    done = benchd("ship", "--module", "two.py:build", "--input", "4x4x4", "--output", shipped("onnxruntime"), *SHORT)
    assert (done.returncode, "already exists" in done.stderr) == (2, True)


def test_a_link_that_leads_nowhere_is_there_already(tmp_path):
    (tmp_path / "out").symlink_to(tmp_path / "nothing")
    with pytest.raises(UsageError, match="already exists"):
        refuse_existing(tmp_path / "out")


def test_what_was_shipped_is_verified_and_its_name_is_no_path(shipped, benchd, tmp_path):
    folder, outside = copy_of(shipped("onnxruntime"), tmp_path), tmp_path / "outside"
    content = json.loads((folder / manifest.MANIFEST).read_text())
    content["name"] = f"a/{'../' * 20}{outside}/x"
    (folder / manifest.MANIFEST).write_text(json.dumps(content))
    seal(folder)
    done = benchd("verify", folder, "--json", "--processes", "3", *SHORT)
    assert not outside.exists()
    report = json.loads(done.stdout)
    assert report["answer"] in {"kept", "slower", "faster", "inconclusive"}, report  # a busy machine is slow
    assert report["processes"] == 3
    of_winner = results.read(folder)[-1]
    assert all(layer.covers for process in of_winner.processes for layer in process.layers)
    assert of_winner.processes[0].layers
    reasons = set(re.split("; the promise is doubtful: |, ", report["reason"]))
    assert report["answer"] != "kept" or reasons <= {"", *doubts.PLAIN.values()}


@pytest.mark.parametrize(
    ("variant", "given"), [("eager", ("--inputs", "items.py:items")), ("onnxruntime", ("--input", "x=@x.npy"))]
)
def test_a_folder_holds_the_inputs_that_it_was_measured_on(benchd, place, tmp_path, monkeypatch, variant, given):
    """It is verified wherever it is, again, and whatever has become of the files that the inputs came from."""
    monkeypatch.delenv("PYTHONDONTWRITEBYTECODE", raising=False)  # by default, an import writes into the folder
    items = np.random.default_rng(0).random((20, 4, 4, 4), np.float32)
    np.save(place / "x.npy", items)
    (place / "items.py").write_text("import numpy\n\ndef items():\n    return list(numpy.load('x.npy'))\n")
    asked = ("--variants", variant, "--threads", "1", "--max-latency", "10s", "--output", tmp_path / "made")
    done = benchd("ship", "--module", "two.py:build", *given, *asked, *SHORT)
    assert done.returncode == 0, done.stdout + done.stderr
    for name in ("x.npy", "items.py"):
        (place / name).unlink()
    folder = (tmp_path / "made").rename(tmp_path / "moved")
    assert np.array_equal(np.load(folder / manifest.INPUTS / "0.npy")[:20], items)
    done = benchd("verify", folder, "--json", "--processes", "3", *SHORT)
    assert json.loads(done.stdout)["answer"] in {"kept", "slower", "faster", "inconclusive"}, done.stdout


def test_verifying_within_a_folder_runs_no_file_of_it(shipped, command, tmp_path):
    """Not even one that the manifest lists and that bears the name of a module that each process imports."""
    folder = copy_of(shipped("onnxruntime"), tmp_path)
    planted(folder, tmp_path / "mark")
    sealed(folder)
    done = command("benchd", "verify", ".", "--json", "--processes", "1", "--device", "cpu", "--wait", cwd=folder)
    assert '"processes":1' in done.stdout, done.stdout + done.stderr
    assert not (tmp_path / "mark").exists()


def test_a_changed_byte_is_found(shipped, benchd, tmp_path):
    folder = copy_of(shipped("onnxruntime"), tmp_path)
    content = bytearray((folder / "model.onnx").read_bytes())
    content[len(content) // 2] ^= 1
    (folder / "model.onnx").write_bytes(content)
    done = benchd("verify", folder, *SHORT)
    assert (done.returncode, "model.onnx has changed" in done.stderr) == (2, True)


@pytest.mark.parametrize("fault", ["missing", "unlisted", "link", "newer", "damaged", "outside"])
def test_a_damaged_folder_is_refused_in_one_sentence(shipped, tmp_path, fault):
    folder = copy_of(shipped("onnxruntime"), tmp_path)
    path, content = folder / manifest.MANIFEST, (folder / manifest.MANIFEST).read_text()
    if fault == "missing":
        (folder / "golden.npz").unlink()
    elif fault == "unlisted":
        (folder / "more.pt").write_bytes(b"")
    elif fault == "link":
        (folder / "LOAD.md").rename(tmp_path / "LOAD.md")
        (folder / "LOAD.md").symlink_to(tmp_path / "LOAD.md")
    elif fault == "newer":
        path.write_text(content.replace("benchd.shipped/1", "benchd.shipped/9"))
        seal(folder)
    elif fault == "damaged":
        path.write_text(content[:-40])
        seal(folder)
    else:
        path.write_text(content.replace('"model.onnx"', '"../model.onnx"'))
        seal(folder)
    with pytest.raises(manifest.UsageError) as refused:
        manifest.read(folder)
    assert "\n" not in str(refused.value)


def leaves(value, path=()):
    """Yield the path to every number, text, flag, null and empty list or object in JSON."""
    keys = value if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ()
    for key in keys:
        yield from leaves(value[key], (*path, key))
    if not keys:
        yield path


def test_a_manifest_with_any_leaf_changed_is_refused(shipped, tmp_path):
    folder = copy_of(shipped("onnxruntime"), tmp_path)
    path, content = folder / manifest.MANIFEST, (folder / manifest.MANIFEST).read_bytes()
    changed = list(leaves(msgspec.json.decode(content)))
    assert len(changed) > 80
    for *route, name in changed:
        part = whole = msgspec.json.decode(content)
        for key in route:
            part = part[key]
        was = part[name]
        part[name] = not was if isinstance(was, bool) else was + 1 if isinstance(was, int | float) else f"{was} other"
        path.write_bytes(msgspec.json.format(msgspec.json.encode(whole)) + b"\n")
        with pytest.raises(manifest.UsageError):
            manifest.read(folder)
    path.write_bytes(content)
    assert manifest.read(folder).name


def edited(folder, change):
    """Change the graph of a folder's file, and its hash with it."""
    model = onnx.load(folder / "model.onnx")
    change(model.graph)
    onnx.save(model, folder / "model.onnx")
    sealed(folder)


def other_weights(graph):
    for tensor in graph.initializer:
        value = numpy_helper.to_array(tensor)
        if value.dtype == np.float32:
            other = np.random.default_rng(1).standard_normal(value.shape).astype(np.float32) * value.std()
            tensor.CopyFrom(numpy_helper.from_array(other, tensor.name))


def larger_weights(graph):
    (tensor,) = [tensor for tensor in graph.initializer if tensor.name.endswith("second.weight")]
    tensor.CopyFrom(numpy_helper.from_array(1.3 * numpy_helper.to_array(tensor), tensor.name))


def other_layout(graph):
    """Let the file read (4, 16) instead of (4, 4, 4)."""
    read = graph.input[0]
    dims = [dim.dim_value for dim in read.type.tensor_type.shape.dim]
    inner = helper.make_node("Reshape", ["laid_out", "sizes"], [read.name])
    graph.initializer.append(numpy_helper.from_array(np.array(dims, np.int64), "sizes"))
    graph.node.insert(0, inner)
    graph.input[0].CopyFrom(helper.make_tensor_value_info("laid_out", 1, [dims[0], 4, 16]))


def swapped_outputs(graph):
    """Let each output answer what the other did."""
    names = [output.name for output in graph.output]
    for node in graph.node:
        for place, name in enumerate(node.output):
            if name in names:
                node.output[place] = f"inner_{name}"
        for place, name in enumerate(node.input):
            if name in names:
                node.input[place] = f"inner_{name}"
    for name, other in zip(names, reversed(names), strict=True):
        graph.node.append(helper.make_node("Identity", [f"inner_{other}"], [name]))


@pytest.mark.parametrize("change", [other_weights, other_layout, swapped_outputs])
def test_other_answers_are_found_where_the_hashes_were_made_to_fit(shipped, benchd, tmp_path, change):
    folder = copy_of(shipped("onnxruntime"), tmp_path)
    edited(folder, change)
    done = benchd("verify", folder, *SHORT)
    assert (done.returncode, "differ from the golden ones" in done.stdout) == (5, True), done.stdout + done.stderr


def test_a_tolerance_beyond_that_of_the_precision_hides_no_other_answers(shipped, benchd, tmp_path):
    folder = copy_of(shipped("onnxruntime"), tmp_path)
    content = msgspec.json.decode((folder / manifest.MANIFEST).read_bytes())
    content["golden"]["tolerances"] = dict.fromkeys(content["golden"]["tolerances"], 0.99)
    (folder / manifest.MANIFEST).write_bytes(msgspec.json.encode(content))
    edited(folder, larger_weights)
    done = benchd("verify", folder, "--processes", "1", *SHORT)
    assert (done.returncode, "be off by 0.99, but fp32 permits 0.0001" in done.stdout) == (5, True), done.stdout


@pytest.mark.slow  # ten processes more
def test_code_of_another_machine_runs_only_if_it_is_trusted_and_its_weights_are_tested(shipped, benchd, tmp_path):
    folder = copy_of(shipped("eager"), tmp_path)
    torch.manual_seed(1)
    weights = {name: torch.randn_like(value) for name, value in load_file(folder / "weights.safetensors").items()}
    save_file(weights, folder / "weights.safetensors")
    sealed(folder)
    done = benchd("verify", folder, *SHORT)
    assert (done.returncode, "--trust-code" in done.stderr) == (2, True)
    done = benchd("verify", folder, "--trust-code", *SHORT)
    assert (done.returncode, "differ from the golden ones" in done.stdout) == (5, True), done.stdout + done.stderr


def loaded_alone(folder, python):
    """Run the code of LOAD.md under this interpreter."""
    (code,) = [part for part in (folder / "LOAD.md").read_text().split("```") if part.startswith("python\n")]
    return subprocess.run(
        [python, "-I", "-B", "-c", code.removeprefix("python\n")],
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
        timeout=WAIT_S,
    )


def installed_alone(folder, tmp_path):
    """Return the interpreter of an environment with what LOAD.md installs, and no more."""
    (line,) = re.findall(r"^python -m pip install (.+)$", (folder / "LOAD.md").read_text(), re.MULTILINE)
    packages = line.partition(" --extra-index-url ")[0].split()
    return fresh.python(tmp_path, [re.sub(r"^(benchd)-.+\.whl$", r"\1", package) for package in packages])


@pytest.mark.parametrize("variant", ["onnxruntime", *(pytest.param(name, marks=pytest.mark.slow) for name in OTHERS)])
def test_load_runs_with_its_packages_alone_and_finds_other_answers(shipped, tmp_path, variant):
    folder = copy_of(shipped(variant), tmp_path)
    python = installed_alone(folder, tmp_path)
    done = loaded_alone(folder, python)
    assert (done.returncode, done.stdout) == (0, "the answers match the golden ones\n"), done.stderr
    if variant == "onnxruntime":
        edited(folder, other_weights)
        assert loaded_alone(folder, python).returncode != 0


@pytest.mark.slow
@pytest.mark.parametrize("variant", OURS)
def test_a_model_of_the_catalog_loads_with_benchd_installed_and_says_that_it_needs_it(shipped, tmp_path, variant):
    limits = ("--max-drop", "5%", "--data", "demo")
    folder = shipped(variant, "snn_onepass", "--option", "time_steps=2", "--weights", "demo", *limits)
    done = loaded_alone(folder, installed_alone(folder, tmp_path))
    assert (done.returncode, done.stdout) == (0, "the answers match the golden ones\n"), done.stderr
    assert ("benchd itself is needed" in (folder / "LOAD.md").read_text()) == (variant != "onnxruntime-int8")
