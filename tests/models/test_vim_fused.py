"""The layers of Vim as four launches each, as on a GPU in half precision: their answers and their number."""

import pytest
import torch
from test_vim import SMALL, equations, lively, relative_error
from torch.utils._python_dispatch import TorchDispatchMode

pytest.importorskip("triton")

from launches import interpreted, without_gpu

from benchd.kernels import launch
from benchd.models.catalog import build
from benchd.models.vim import Vim


def halves(case):
    """Return a small model in half precision on our kernels for a GPU, and images."""
    torch.manual_seed(2)
    sizes = {"image_size": 64, "num_classes": 10} | SMALL[case]
    plain = lively(Vim(**sizes))
    model = Vim(**sizes, implementation="triton").eval()
    model.load_state_dict(plain.state_dict())
    return model.half(), torch.randn(2, *model.input_shape).half()


@torch.no_grad()
@pytest.mark.parametrize("case", SMALL)
def test_fused_layers_follow_the_equations(case):
    model, images = halves(case)
    logits, want = model(images), equations(model, images)
    assert model._kept.plans, "they were fused"
    assert relative_error(logits, want) < 2e-2


@torch.no_grad()
def test_the_prepared_launches_answer_as_they_did_when_they_were_recorded(monkeypatch):
    model, images = halves("an odd number of patches")
    want = model(images), model(images.flip(0))
    model._kept.plans.clear()
    count = []

    def repeated(each, places, device):
        again = interpreted(each, places, device)
        return lambda addresses, stream: (count.append(1), again(addresses, stream))

    without_gpu(monkeypatch, repeated)
    for given, wanted in zip((images, images.flip(0), images), (*want, want[0]), strict=True):
        count.clear()
        assert torch.equal(model(given), wanted)
        assert len(count) == 1 + 4 * 2
    assert len(model._kept.plans) == 1


@torch.no_grad()
def test_changes_of_the_parameters_and_hooks_are_seen():
    model, images = halves("one block")
    before, calls = model(images), []
    model.norm_f.weight = torch.nn.Parameter(2 * model.norm_f.weight, requires_grad=False)
    assert relative_error(model(images) - model.head.bias, 2 * (before - model.head.bias).double()) < 1e-2
    model.layers[0].mixer.D.zero_()
    assert not torch.equal(model(images), before)
    with model.norm_f.register_forward_hook(lambda *_: calls.append(1)):
        model(images)
    assert calls == [1]


class Launched(TorchDispatchMode):
    """The ops of torch that compute something on a GPU: those that only look at memory launch nothing."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if not (func.is_view or func.namespace == "benchd" or "empty" in str(func)):
            self.names.append(str(func))
        return func(*args, **(kwargs or {}))


@torch.no_grad()
def test_a_forward_of_vim_tiny_is_at_most_105_launches(monkeypatch):
    model = build("vim_tiny").half()
    for module in model.modules():
        if hasattr(module, "implementation"):
            module.implementation = "triton"
    monkeypatch.setattr(type(model.patch_embed), "forward", type(model.patch_embed).product)  # as on a GPU
    kernels = []
    monkeypatch.setattr(launch, "run", lambda kernel, *_, **__: kernels.append(kernel))
    images = torch.zeros(1, 3, 224, 224, dtype=torch.float16)
    model(images)
    kernels.clear()
    with Launched() as launched:
        model(images)
    assert len(kernels) == 1 + 4 * 24
    assert len(kernels) + len(launched.names) <= 105, launched.names
