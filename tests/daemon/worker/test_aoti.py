"""AOTInductor packages compiled and run here: eager's answers, kept by what they were made for, ours or rebuilt."""

from importlib.metadata import version

import msgspec
import numpy as np
import pytest
import torch
from manifests_made import load_text_of, run_alone
from worker_jobs import build_and_load, changed, job, run_here, user_module

from benchd.daemon.errors import UsageError
from benchd.daemon.measuring.protocol import Pack, Verify
from benchd.daemon.records import Variant
from benchd.daemon.shipping.manifest import PACKAGE, REBUILT, WEIGHTS
from benchd.exporters import aoti

NESTED = 'return {"scores": self.fc(images.flatten(1)), "more": [images.mean((1, 2, 3)), images]}'


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A folder with the module and a store that all tests here share: a compilation takes tens of seconds."""
    return tmp_path_factory.mktemp("aoti")


@pytest.fixture(scope="module")
def asked(place):
    """A job of a module with nested answers, as the package `aoti`."""
    return job(place, module=user_module(place, forward=NESTED), variant=Variant.parse("aoti"), batch_size=2)


@pytest.fixture
def loaded(asked):
    torch.set_num_threads(1)
    return build_and_load(asked)


def test_it_answers_as_eager_in_the_form_of_the_model_without_an_input_s_memory(loaded):
    workload, model = loaded
    images = workload.images[2:4]
    with torch.inference_mode():
        answers, want = model.run(images), workload.plain(images)
    assert list(answers.named) == ["scores", "more[0]", "more[1]"]
    torch.testing.assert_close(answers.named["scores"], want["scores"])
    torch.testing.assert_close(answers.named["more[0]"], want["more"][0])
    assert torch.equal(answers.named["more[1]"], images)
    assert answers.named["more[1]"].data_ptr() != images.data_ptr()


def test_it_is_compiled_once_for_these_threads_and_says_for_what(loaded, asked):
    workload, model = loaded
    facts = aoti.read(workload.source.built[PACKAGE])
    assert (facts.threads, facts.gpu, facts.torch) == (1, "", version("torch"))
    _, again = build_and_load(asked)
    assert again.runtime.build_s is None
    assert model.runtime.provider == again.runtime.provider == f"AOTInductor of torch {torch.__version__}"


def test_a_case_is_measured_and_checked(asked):
    outcome = run_here(asked)
    assert (outcome.process.status, outcome.check.verdict) == ("ok", "passed"), outcome.process.reason


def test_a_package_of_other_threads_is_not_loaded_but_built_again_and_that_is_told(loaded, asked, place, monkeypatch):
    workload, _ = loaded
    given = place / "given.pt2"
    given.write_bytes(workload.source.built[PACKAGE].read_bytes())
    verified = msgspec.structs.replace(asked, recipe=Verify(folder=str(place), engine=str(given)))
    _, model = build_and_load(verified)
    assert model.runtime.notes == []
    other = aoti.read(given)
    monkeypatch.setattr(aoti, "read", lambda path: msgspec.structs.replace(other, torch="2.0.0"))
    _, model = build_and_load(verified)
    assert model.runtime.notes == [f"{REBUILT}{PACKAGE} was compiled for torch 2.0.0, not {other.torch}"]


def test_a_given_package_with_another_part_is_not_loaded(asked, place):
    (place / "evil.pt2").write_bytes(b"PK")
    with pytest.raises(UsageError, match="not an AOTInductor package"):
        build_and_load(msgspec.structs.replace(asked, recipe=Verify(folder="", engine=str(place / "evil.pt2"))))


def test_its_files_are_the_package_which_load_md_runs_and_what_it_is_built_again_from(asked, place):
    out = place / "packed"
    out.mkdir()
    outcome = run_here(msgspec.structs.replace(asked, recipe=Pack(str(out))))
    assert outcome.packed, outcome.process.reason
    assert {path.name for path in out.iterdir()} == {PACKAGE, WEIGHTS, "golden.npz", "code"}
    assert [output.name for output in outcome.packed.outputs] == ["scores", "more[0]", "more[1]"]
    assert (outcome.packed.provider, outcome.packed.packages.keys()) == ("", {"numpy", "torch"})
    assert str(place).encode() not in (out / PACKAGE).read_bytes()
    text = load_text_of(asked.case, outcome.packed)
    assert run_alone(text, out).stdout == "the answers match the golden ones\n"
    with np.load(out / "golden.npz") as archive:
        golden = dict(archive)
    np.savez(out / "golden.npz", **golden | {"exact0:scores": golden["exact0:scores"] + 1.0})
    assert "golden ones for {'scores': 2, 'more[0]': 0, 'more[1]': 0} inputs" in run_alone(text, out).stderr


def test_what_torch_cannot_export_says_so_in_a_sentence(tmp_path):
    forward = "images = images if images.sum() > 0 else -images"
    outcome = run_here(job(tmp_path, module=user_module(tmp_path, forward=forward), variant=Variant.parse("aoti")))
    assert outcome.process.status == "unsupported"
    assert outcome.process.reason.startswith("torch cannot compile it ahead of time: ")
    assert "\n" not in outcome.process.reason


@pytest.mark.slow  # a minute of compiling
@pytest.mark.parametrize("variant", ["custom-aoti", "aoti-bf16"])
def test_our_kernels_run_in_a_package(tmp_path, variant):
    a_job = job(tmp_path, model="snn_onepass", variant=Variant.parse(variant), options={"time_steps": 2})
    outcome = run_here(changed(a_job, weights="demo", data="demo"))
    assert (outcome.process.status, outcome.check.verdict) == ("ok", "passed"), outcome.process.reason
