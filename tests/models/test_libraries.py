"""Names of other libraries' models: found in their source, refused with the closest one."""

import pytest
import timm_stub
from torchvision import models

from benchd.daemon.errors import NotAvailable, UsageError
from benchd.models import libraries


@pytest.fixture(autouse=True)
def _forget_names():
    libraries._registered.cache_clear()
    yield
    libraries._registered.cache_clear()


def test_every_name_that_torchvision_lists_is_known_and_no_other():
    assert libraries._registered("torchvision") == set(models.list_models())


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("torchvision:resnt18", "torchvision has no model 'resnt18'; did you mean torchvision:resnet18?"),
        (
            "torchvision:resnet18.a1_in1k",
            "torchvision has no model 'resnet18.a1_in1k'; did you mean torchvision:resnet1",
        ),
        ("torchvision:../resnet18", "torchvision has no model '../resnet18'"),
        ("torchvision:", "torchvision has no model ''"),
    ],
)
def test_what_torchvision_does_not_have_is_refused_with_the_closest_name(name, words):
    with pytest.raises(UsageError) as refused:
        libraries.refuse_unknown(name)
    assert words in str(refused.value)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("quantized_resnet18", "int8 modules"),
        ("raft_small", "takes two images"),
        ("fasterrcnn_mobilenet_v3_large_fpn", "two-stage detector"),
    ],
)
def test_what_is_not_measured_says_why(name, words):
    with pytest.raises(UsageError, match=f"^torchvision:{name}: .*{words}"):
        libraries.refuse_unknown(f"torchvision:{name}")


def test_timm_takes_the_weights_it_names_behind_a_dot(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(timm_stub.written(tmp_path))
    libraries.refuse_unknown("timm:tiny_conv")
    libraries.refuse_unknown("timm:tiny_vit.a1_in1k")
    with pytest.raises(UsageError, match="no model 'tiny_cnv'; did you mean timm:tiny_conv"):
        libraries.refuse_unknown("timm:tiny_cnv")
    with pytest.raises(UsageError, match="no model 'hf-hub:"):
        libraries.refuse_unknown("timm:hf-hub:timm/tiny_conv")


def test_a_library_that_is_not_installed_says_how_to_install_it(monkeypatch):
    monkeypatch.setattr("sys.path", [])
    with pytest.raises(NotAvailable, match="pip install timm"):
        libraries.refuse_unknown("timm:tiny_conv")
