"""What cannot be deployed as files is refused before it is measured."""

from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
from manifests_made import manifest
from PIL import Image
from worker_jobs import NET, changed, job, measured, run, run_here, user_module

from benchd.daemon.errors import Unsupported
from benchd.daemon.measuring.protocol import CompareDeployable, Pack
from benchd.daemon.records import Variant
from benchd.daemon.shipping.manifest import CODE, GOLDEN, ONNX
from benchd.daemon.worker import backends, packing, workload
from benchd.daemon.worker.check.golden import _answers
from benchd.exporters import sessions


def refused(folder, module):
    """Return why this module is not shipped; it was neither checked nor measured."""
    outcome = run_here(msgspec.structs.replace(job(folder, module=module), recipe=CompareDeployable()))
    assert (outcome.process.status, outcome.check, outcome.process.timing) == ("unsupported", None, None)
    return outcome.process.reason


def test_a_file_that_load_could_not_import_is_refused(tmp_path):
    path = Path(user_module(tmp_path).rpartition(":")[0]).rename(tmp_path / "my net.py")
    reason = refused(tmp_path, f"{path}:build")
    assert reason == "LOAD.md imports its code, and 'my net' cannot be a module's name: rename the file"


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("models.class", r"'models\.class' cannot be a module's name"),
        ("json", "is also a package that it needs"),
        ("numpy.net", "is also a package that it needs"),
    ],
)
def test_a_name_that_is_none_or_another_module_s_is_refused(name, words):
    """By name alone: the next tests' processes might import such a file."""
    packing._refuse_name("models.zoo.net2")
    with pytest.raises(Unsupported, match=f"{words}: rename the file$"):
        packing._refuse_name(name)


@pytest.mark.parametrize(
    ("forward", "reason"),
    [
        ("return torch.fft.fft(self.fc(images.flatten(1)))", "its answer output is complex: return real tensors to"),
        ('return {"found": [self.fc(images.flatten(1))]}', "its answers are nested (found[0]): return a flat dict or"),
    ],
)
def test_answers_that_cannot_be_deployed_are_refused_where_they_will_ship(tmp_path, forward, reason):
    module = user_module(tmp_path, forward=forward)
    assert refused(tmp_path, module).startswith(reason)
    assert measured(job(tmp_path, module=module)).process.timing


def test_a_file_ships_where_onnx_runtime_is_missing_and_another_runtime_runs_it(tmp_path, monkeypatch):
    """As on a Jetson whose index lacks it, where TensorRT wins the race."""
    pytest.importorskip("openvino", reason="stands for TensorRT here")
    a_job = job(tmp_path, module=user_module(tmp_path), variant=Variant.parse("openvino"))
    with monkeypatch.context() as without:
        without.setattr(sessions, "why_not", lambda: "ONNX Runtime is not installed")
        outcome = run_here(msgspec.structs.replace(a_job, recipe=Pack(str(tmp_path))))
    assert outcome.packed, outcome.process.reason
    session, packed = sessions.open_session(tmp_path / ONNX), outcome.packed
    assert [tensor.name for tensor in packed.inputs] == [tensor.name for tensor in session.get_inputs()]
    assert [tensor.name for tensor in packed.outputs] == [tensor.name for tensor in session.get_outputs()]


def test_an_installed_package_ships_what_it_has_imported_and_names_the_others(tmp_path):
    site, out = tmp_path / "site-packages", tmp_path / "out"
    out.mkdir()
    (site / "lent").mkdir(parents=True)
    (site / "lent/__init__.py").touch()
    (site / "lent/unused.py").touch()
    (site / "lent/blocks.py").write_text(
        "import json\nimport msgspec.json\ntry:\n    import absent\nexcept ImportError: pass"
    )
    (site / "lent/model.py").write_text(
        f"from lent import blocks\nfrom . import blocks as again\n{NET}".format(build="pass", forward="pass")
    )
    a_job = changed(job(tmp_path, module="lent.model:build"), module_folder=str(site), recipe=Pack(str(out)))
    outcome = run(a_job)
    assert outcome.packed, outcome.process.reason
    assert outcome.packed.entry == "lent.model:build"
    files = {str(path.relative_to(out / CODE)) for path in (out / CODE).rglob("*.*")}
    assert files == {"lent/__init__.py", "lent/model.py", "lent/blocks.py"}
    assert set(outcome.packed.packages) == {"numpy", "torch", "safetensors", "msgspec"}


@pytest.mark.parametrize(
    ("source", "own", "words"),
    [
        (None, False, "none known; measured with random normal, seed 0"),
        (None, True, "net.Net.preprocess"),
        (
            "demo",
            True,
            "grey digits of 8x8, /16, enlarged to 4x4 (bilinear), equal channels, mean 0.3053, deviation 0.3236",
        ),
        (
            "imagefolder:{root}",
            False,
            "RGB, shorter side to 5 (bicubic, antialiased), centre crop 4x4, /255, mean (0.485, 0.456, 0.406), "
            "deviation (0.229, 0.224, 0.225)",
        ),
        ("imagefolder:{root}", True, "net.Net.preprocess"),
    ],
)
def test_the_preprocessing_is_that_of_the_measured_images(tmp_path, source, own, words):
    images = tmp_path / "images"
    (images / "a").mkdir(parents=True)
    Image.new("RGB", (8, 8)).save(images / "a" / "0.png")
    module, path = user_module(tmp_path), tmp_path / "net.py"
    if own:
        prepare = "    def preprocess(self, picture):\n        return torch.zeros(3, 4, 4)\n\n"
        path.write_text(path.read_text().replace("    def forward", f"{prepare}    def forward"))
    a_job = changed(job(tmp_path, module=module), data=source and source.format(root=images))
    preprocessing = packing._preprocessing(workload.build(a_job))
    assert preprocessing.removeprefix("own_") == words  # where another test has imported a net


def beyond(answers, exact, golden):
    """Return how many rows are beyond the tolerance, as LOAD.md counts them."""
    batches = zip(np.split(answers, golden.batches), np.split(exact, golden.batches), strict=True)
    off = np.concatenate([np.abs(observed - right).max(axis=1) / np.abs(right).max() for observed, right in batches])
    return int((off > golden.tolerances["output"]).sum())


@pytest.mark.parametrize("variant", ["amp", pytest.param("bf16", marks=pytest.mark.slow)])
def test_golden_rows_pass_a_right_variant_of_a_spiking_network_and_no_wrong_one(tmp_path, variant):
    spiking = job(tmp_path, model="snn_stbif_resnet18", variant=Variant.parse(variant))
    weights = {"options": {"width": 16, "time_steps": 4}, "weights": "demo", "data": "demo"}
    a_job = changed(spiking, recipe=Pack(str(tmp_path)), **weights)
    packed = run_here(a_job).packed
    arrays, golden = dict(np.load(tmp_path / GOLDEN)), packed.golden
    shipped, built = manifest(inputs=packed.inputs, outputs=packed.outputs), workload.build(a_job)
    loaded = backends.load(a_job.case.variant, built.source, torch.device("cpu"), built.images[:1])
    places = range(golden.batches)
    exact = np.concatenate([arrays[f"exact{place}:output"] for place in places])
    answers = np.concatenate([_answers(shipped, arrays, place, built, loaded)["output"] for place in places])
    assert beyond(answers, exact, golden) <= golden.rows_off
    # a channel that never wins may lie below the tolerance, which depends on the CPU's order of sums
    no_channel = [answers * (np.arange(answers.shape[1]) != channel) for channel in set(exact.argmax(axis=1))]
    for wrong in (np.roll(answers, 1, axis=0), np.roll(answers, 1, axis=1), 0 * answers, 2 * answers, *no_channel):
        assert beyond(wrong, exact, golden) > golden.rows_off
