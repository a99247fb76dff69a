"""A record's case planned again: the same case, of the same inputs, by the name of each file."""

import msgspec
import pytest
from records_made import made

from benchd.daemon.config import LimitsConfig, Suite
from benchd.daemon.measuring import plan
from benchd.daemon.measuring.plan import Machine
from benchd.daemon.records import Case, Inputs, Load, Neighbour, UserFile, UserModule, UserNir, Variant

CPU = Machine("cpu", has_cxx=True)


def planned(record):
    """Return the only case that measures the record's again."""
    (entry,) = plan.plan([msgspec.convert(plan.again(record), Suite)], LimitsConfig(), CPU)
    return entry


@pytest.mark.parametrize(
    "case",
    [
        Case(model="square", variant=Variant("onnxruntime"), batch_size=3, provider="cpu", threads=2, seed=7),
        Case(model="square", variant=Variant("tensorrt", "fp16"), dla=0),
        Case(model="vim_tiny", variant=Variant(kernels="custom"), options={"patch_size": 32, "scan": "two_level"}),
        Case(model="torchvision:resnet18", options={"image_size": 64}),
        Case(model="snn_stbif_resnet18", direction="training", batch_size=2),
        Case(model="square", scenario="offline", batch_size=4),
        Case(model="square", scenario="server", streams=2, load=Load(rate_hz=30.0)),
        Case(model="square", scenario="server", load=Load(deadline_ms=33.0)),
        Case(model="square", scenario="server", load=Load(rate_hz=12.5, deadline_ms=0.5, percentile=99.9, queue=4)),
        Case(model="square", beside=Neighbour("vim_tiny,custom,b1", 30.0)),
    ],
    ids=lambda case: case.case_id,
)
def test_a_case_is_planned_again_as_it_was(case):
    assert planned(made(case=case)).case == case


@pytest.mark.parametrize(
    ("model", "inputs"),
    [
        ("snn_onepass", Inputs()),
        ("snn_onepass", Inputs(weights="demo", data="demo", accuracy=100)),
        ("vim_tiny", Inputs(data="imagefolder:val", calibration="random")),
    ],
)
def test_weights_and_images_are_those_of_the_record(model, inputs):
    assert planned(made(case=Case(model=model), inputs=inputs)).inputs == inputs


def test_a_record_names_files_without_their_folders():
    inputs = Inputs(weights="/srv/x/w.pt", data="imagefolder:/srv/x/val", labels="/l.txt", calibration="demo")
    assert inputs.named == Inputs(weights="w.pt", data="imagefolder:val", labels="l.txt", calibration="demo")
    assert UserModule("/srv/x/net.py:build").named == UserModule("net.py:build")
    assert UserModule("zoo.net:build", folder="/srv/x").named == UserModule("zoo.net:build")
    assert UserFile("/srv/x/net.onnx", reference="/srv/x/net32.onnx").named == UserFile(
        "net.onnx", reference="net32.onnx"
    )


def test_a_nir_file_is_measured_again_with_its_options():
    own = UserNir("net.nir", [])
    fields = plan.again(made(case=Case(model="own.net", options={"dt": 0.001}), own=own))
    assert (fields["nir"], fields["options"]) == ("net.nir", {"dt": [0.001]})
    assert UserNir("/srv/x/net.nir").named == own
