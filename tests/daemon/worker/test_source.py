"""Where a variant's file comes from: the user's folder, the store, or an export now; and a board that cannot export."""

import inspect
import json
import shutil
import subprocess
import sys

import absent
import pytest
import torch
from torch import nn
from worker_jobs import job

from benchd.daemon.errors import Unsupported
from benchd.daemon.worker import workload
from benchd.daemon.worker.source import Calibration, Source, _batches
from benchd.exporters import code, files, sessions
from benchd.exporters.artifacts import ArtifactStore, key_of

pytest.importorskip("onnxscript", reason="exports")
pytest.importorskip("onnxruntime", reason="checks what was exported")

WEIGHTS = "ab" * 32


def source(folder, given=None, **fields):
    """Return a small module as a source; its option makes its files have a form, as those of a scan do."""
    torch.manual_seed(0)
    module = nn.Linear(4, 3).eval().requires_grad_(False)
    facts = {"model": "linear", "options": {"scan": "serial"}, "weights_sha256": WEIGHTS} | fields
    return Source(module=module, images=torch.randn(8, 4), judged_by="outputs", folder=folder, given=given, **facts)


def test_a_build_ends_itself_before_the_deadline_of_its_stage(tmp_path):
    a_job = job(tmp_path, dla=1)
    built = workload.build(a_job).source
    assert a_job.limits.build_deadline_s / 2 < built.build_limit_s < a_job.limits.build_deadline_s
    assert built.dla == 1


def facts_of(batch, **fields):
    facts = {"model": "linear", "options": {}, "weights_sha256": WEIGHTS, "precision": "fp32", "form": "scan"} | fields
    return files.onnx_facts(batch=batch, **facts)


@pytest.fixture(scope="module")
def brought(tmp_path_factory):
    """A folder with a file of batch 2 and one of any batch."""
    folder = tmp_path_factory.mktemp("brought")
    for batch in (2, None):
        source(folder).export("fp32", batch, "scan")
    return folder


def content(folder):
    """Return every file of a folder with its bytes and when it was written."""
    return {path: (path.read_bytes(), path.stat().st_mtime_ns) for path in folder.rglob("*") if path.is_file()}


def test_the_second_use_comes_from_the_store(tmp_path):
    first, again = source(tmp_path), source(tmp_path)
    artifact = first.onnx("fp32", 2, "cpu")
    assert first.onnx("fp32", 2, "cpu") is artifact
    stored = again.onnx("fp32", 2, "cpu")
    assert (artifact.reused, stored.reused) == (False, True)
    assert artifact.key == stored.key == key_of(facts_of(2))
    assert stored.path.is_relative_to(tmp_path)
    assert stored.metadata.measured["parity"]["batch_sizes"] == [2]
    (used_file,) = again.used
    assert (used_file.reused, used_file.sha256, used_file.form, used_file.format) == (
        True,
        artifact.metadata.sha256,
        "scan",
        "onnx",
    )


@pytest.mark.parametrize(
    ("other", "use"),
    [
        ({"weights_sha256": "cd" * 32}, ("fp32", 2, "cpu")),
        ({"model": "wide"}, ("fp32", 2, "cpu")),
        ({"options": {"scan": "serial", "size": 4}}, ("fp32", 2, "cpu")),
        ({}, ("fp16", 2, "cpu")),
        ({}, ("fp32", 2, "cuda")),
        ({}, ("fp32", 2, "tensorrt")),
    ],
)
def test_other_facts_another_precision_or_form_are_another_file(brought, tmp_path, other, use):
    artifact = source(tmp_path, brought, **other).onnx(*use)
    assert artifact.path.is_relative_to(tmp_path)
    assert artifact.metadata.facts["form"] == ("scan" if use[2] == "cpu" else "two_level")


OTHER_CODE = {"code_sha256": "0" * 64}
OTHER_TORCH = {"versions": code.versions(*files.EXPORTERS) | {"torch": "2.7.0"}}


@pytest.mark.parametrize("other", [OTHER_CODE, OTHER_TORCH], ids=["benchd", "torch"])
def test_a_file_that_other_code_or_another_torch_made_is_made_again(tmp_path, other):
    old = facts_of(2) | other
    store = ArtifactStore(tmp_path)
    store.put(old, lambda path: path.write_bytes(b"old"))
    artifact = source(tmp_path).onnx("fp32", 2, "cpu")
    assert (artifact.reused, artifact.metadata.facts["code_sha256"]) == (False, code.sha256())


def test_an_int8_file_is_of_the_onnx_runtime_that_wrote_it():
    ours = code.versions(*sessions.DISTRIBUTIONS)
    assert ours
    versions = {precision: facts_of(2, precision=precision)["versions"] for precision in ("fp32", "int8")}
    assert versions["int8"] == versions["fp32"] | ours != versions["fp32"]


def as_made_by(brought, folder, other):
    """Copy the file of batch 2 from one folder to another as if `other` had made it; return its key."""
    brought_store = ArtifactStore(brought, read_only=True)
    store = ArtifactStore(folder)
    artifact = brought_store.get(key_of(facts_of(2)))
    facts = facts_of(2) | other
    return store.put(facts, lambda path: path.write_bytes(artifact.path.read_bytes())).key


def test_a_given_file_of_another_torch_is_used_and_told(brought, tmp_path):
    key = as_made_by(brought, tmp_path / "given", OTHER_TORCH)
    given = source(tmp_path / "own", tmp_path / "given").onnx("fp32", 2, "cpu")
    version = code.versions("torch")["torch"]
    assert (given.key, given.note) == (key, f"exported with torch 2.7.0 (here {version})")


def test_a_given_file_of_other_code_is_passed_over_and_told(brought, tmp_path):
    key = as_made_by(brought, tmp_path / "given", OTHER_CODE)
    artifact = source(tmp_path / "own", tmp_path / "given").onnx("fp32", 2, "cpu")
    assert artifact.path.is_relative_to(tmp_path / "own")
    assert artifact.note.startswith(
        f"{key} was not used: a benchd with different code exported it (000000000000, here "
    )


def test_what_a_user_s_module_depends_on_and_its_run_make_another_file(brought, tmp_path):
    scope = {"module": "net.py:build", "module_sha256": "ab", "inputs": ["torch.float32", 4], "suite_id": "one"}
    keys = {key_of(facts_of(2))}
    for other in ({}, *({name: "other"} for name in scope)):
        artifact = source(tmp_path, brought, scope=scope | other).onnx("fp32", 2, "cpu")
        assert artifact.path.is_relative_to(tmp_path)
        keys.add(artifact.key)
    assert len(keys) == 6


@pytest.mark.parametrize(("batch", "found"), [(2, 2), (3, None)], ids=["its batch", "any batch"])
def test_a_given_file_is_preferred_static_before_dynamic(brought, tmp_path, batch, found):
    before = content(brought)
    given = source(tmp_path / "own", brought).onnx("fp32", batch, "cpu")
    assert given.key == key_of(facts_of(found))
    assert given.path.is_relative_to(brought)
    assert (given.reused, given.note) == (True, "")
    assert content(brought) == before
    assert not (tmp_path / "own").exists()


def flip(folder, batch):
    path = folder / key_of(facts_of(batch)) / "model.onnx"
    damaged = bytearray(path.read_bytes())
    damaged[len(damaged) // 2] ^= 1
    path.write_bytes(damaged)


def test_a_tampered_given_file_is_passed_over_told_and_left_alone(brought, tmp_path):
    shutil.copytree(brought, tmp_path / "given")
    own = source(tmp_path / "own", tmp_path / "given")
    flip(tmp_path / "given", 2)
    assert own.onnx("fp32", 2, "cpu").key == key_of(facts_of(None))
    flip(tmp_path / "given", None)
    before = content(tmp_path / "given")
    assert own.onnx("fp32", 3, "cpu").path.is_relative_to(tmp_path / "own")
    assert content(tmp_path / "given") == before
    assert ["SHA-256" in used.note for used in own.used] == [True, True]


@pytest.mark.parametrize(
    ("options", "forms"),
    [
        ({}, (None, None, None)),
        ({"scan": "serial"}, ("scan", "two_level", "two_level")),
        ({"scan": "two_level"}, ("two_level", "two_level", "two_level")),
    ],
)
def test_the_form_is_the_target_s_best_unless_two_levels_were_asked_for(options, forms):
    assert tuple(files.form(options, target) for target in ("cpu", "cuda", "tensorrt")) == forms


@pytest.mark.parametrize("size", [3, 16, 20, 64])
def test_every_image_calibrates_and_the_last_batch_is_whole(size):
    images = torch.arange(80.0).view(20, 4)
    batches = [part for (part,) in _batches(Calibration(images, "images", [], is_asked=True), size)]
    assert [len(part) for part in batches] == [size] * -(-20 // size)
    assert torch.equal(torch.cat(batches), images.repeat(4, 1)[: len(batches) * size])


def test_int8_without_onnx_runtime_is_unsupported_before_anything_is_computed(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "onnxruntime", None)  # as `absent` has it in a child
    calibration = Calibration(torch.randn(16, 4), "images", [], is_asked=True)
    own = source(tmp_path, calibration=lambda: calibration)
    with pytest.raises(Unsupported, match=r"^int8 calibration needs ONNX Runtime: ONNX Runtime is not installed: pip"):
        own.quantise(2, None, "tensorrt")
    assert not list(tmp_path.glob("*/*.onnx"))


CHILD = f"""
import gc, json, sys
gc.disable()
from pathlib import Path
import torch
from torch import nn
from benchd.daemon.worker.source import Source
WEIGHTS = {WEIGHTS!r}
{inspect.getsource(source)}
"""
BOARD = """
from benchd.daemon.errors import Unsupported
from benchd.exporters import sessions
for folders in json.loads(sys.argv[1]):
    own = source(*map(Path, folders))
    try:
        given = own.onnx("fp32", 2, "cpu")
        images = torch.randn(2, 4)
        (outputs,) = sessions.open_session(given.path).run(None, {"inputs": images.numpy()})
        print(given.key, torch.allclose(torch.from_numpy(outputs), own.module(images)))
    except Unsupported as error:
        print(error)
"""


def test_a_board_without_an_exporter_runs_a_given_file_and_else_says_how(brought, tmp_path, child_environment):
    """In a child that has ONNX Runtime and none of the packages that export."""
    for name in ("packages", "empty"):
        (tmp_path / name).mkdir()
    environment = child_environment | absent.environment(tmp_path / "packages", "onnx", "onnx_ir", "onnxscript")
    own, empty = str(tmp_path / "own"), str(tmp_path / "empty")
    command = [sys.executable, "-c", CHILD + BOARD, json.dumps([[own, str(brought)], [own], [own, empty]])]
    done = subprocess.run(command, check=True, capture_output=True, text=True, env=environment)
    given, alone, without = done.stdout.splitlines()
    assert given == f"{key_of(facts_of(2))} True"
    advice = (
        "pip install onnx onnxscript, or run `benchd export` with the same weights on another machine and give its "
        "folder as --artifacts"
    )
    assert alone.startswith("none can be exported here (")
    assert alone.endswith(f"): {advice}")
    assert without.startswith(f"{empty} has no file for this case, and none can be exported here")
    assert not list(tmp_path.glob("own/*/model.onnx"))
