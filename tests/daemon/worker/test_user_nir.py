"""A NIR file given as a model: measured, checked, counted, exported and packed as a user's module is."""

import sys

import msgspec
import numpy as np
import pytest
from manifests_made import load_text_of, run_alone
from worker_jobs import changed, job, measured, run_here

pytest.importorskip("h5py", reason="reads NIR files")

from nir_made import chain, neuron, write

from benchd.daemon.errors import Unsupported
from benchd.daemon.measuring.protocol import Pack
from benchd.daemon.records import UserNir, Variant
from benchd.daemon.shipping.manifest import CODE
from benchd.models import nir


@pytest.fixture
def a_job(tmp_path):
    """A job of a net with a layer of weights between two populations."""
    layer = {"type": "Affine", "weight": np.random.default_rng(0).normal(size=(3, 3)), "bias": np.full(3, 0.5)}
    path = write(tmp_path / "net.nir", chain(neuron("LIF"), layer, neuron("CubaLIF")))
    options = {"dt": 1e-3, "time_steps": 6, "reset": "subtract"}
    base_job = job(tmp_path, model="own.net", options=options, probes=True)
    return msgspec.structs.replace(base_job, own=UserNir(str(path)))


@pytest.mark.parametrize("name", ["eager", "onnxruntime", "amp"])
def test_its_variants_run_checked_by_their_spikes(a_job, name):
    variant = Variant.parse(name)
    if variant.backend == "onnxruntime":
        pytest.importorskip("onnxscript", reason="exports")
        pytest.importorskip("onnxruntime")
    outcome = measured(changed(a_job, variant=variant))
    assert outcome.check.passed, outcome.check.note
    assert "net.nir" in outcome.model.read  # beside what other tests have imported here
    assert outcome.model.options == {
        "current": "new",
        "dt": 1e-3,
        "fires": "above",
        "gain": "absolute",
        "readout": "steps",
        "reset": "subtract",
        "time_steps": 6,
    }
    assert outcome.model.input_shape == [6, 3]
    if name == "eager":
        metrics = outcome.neurobench
        assert (metrics.dense_operations, metrics.effective_macs) == (9 * 6, 0.0)
        assert 0 < metrics.effective_acs < metrics.dense_operations
        assert metrics.activation_sparsity is not None
        assert outcome.counted.matrix_flops == 2 * 9 * 6


def test_load_md_builds_the_same_net_with_the_same_options(a_job, tmp_path):
    out = tmp_path / "shipped"
    out.mkdir()
    outcome = run_here(msgspec.structs.replace(a_job, recipe=Pack(str(out))))
    assert outcome.packed, outcome.process.reason
    assert {"benchd", "h5py"} <= outcome.packed.packages.keys()
    text = load_text_of(a_job.case, outcome.packed)
    assert run_alone(text, out).stdout == "the answers match the golden ones\n"
    code = out / CODE / "net.py"
    code.write_text(code.read_text().replace("'subtract'", "'zero'"))
    assert "answers differ" in run_alone(text, out).stderr


def test_without_h5py_a_sentence_says_what_to_install(a_job, monkeypatch):
    monkeypatch.setitem(sys.modules, "h5py", None)
    with pytest.raises(Unsupported, match="reading a NIR file needs the package h5py: pip install h5py"):
        nir.build(a_job.own.path, **a_job.options)
