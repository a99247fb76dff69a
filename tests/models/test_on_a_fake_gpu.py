"""Every model and precision on a CUDA device that is not there: a run neither waits for the device nor moves data.

Tensors are fake, so only shapes, dtypes and devices are computed, but every operator is called as on a GPU. What waits
for the device cannot be captured in a CUDA graph either.
"""

import pytest
import torch
from fake_gpu import needs_a_driver
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from benchd.daemon.worker.backends import eager
from benchd.models import catalog

pytest.importorskip("triton")
if needs_a_driver():
    pytest.skip("this torch has fake CUDA tensors only beside a CUDA driver", allow_module_level=True)

# small ones: more layers or channels run the same code again
OPTIONS = {
    "vim_tiny": {"depth": 2},
    "snn_onepass": {},
    "qann_resnet18": {"width": 8},
    "snn_stbif_resnet18": {"width": 8, "time_steps": 4},
    "square": {},
}
OTHERS = {"vim_tiny": [{"depth": 1, "scan": "two_level"}], "snn_onepass": [{"encoding": "rate"}]}
VARIANTS = [
    (model, kernels, precision, options)
    for model, given in OPTIONS.items()
    for kernels in (("torch", "custom") if "cuda" in catalog.MODELS[model].custom_kernels else ("torch",))
    for precision in ("fp32", "fp16", "amp")  # bf16 runs as fp16 does
    if kernels == "custom" or precision == "amp"
    for options in (given, *OTHERS.get(model, []))
]


class Watched(TorchDispatchMode):
    """Notes the operators that a GPU would wait for: those that meet a tensor in host memory."""

    def __init__(self):
        super().__init__()
        self.operators, self.waited = [], []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        met = [each for each in tree_leaves((args, kwargs, result)) if isinstance(each, torch.Tensor)]
        self.operators.append(func)
        self.waited += [str(func)] * any(each.device.type != "cuda" for each in met)
        return result


def on_gpu(module, dtype):
    """Return the module with fake CUDA tensors in the place of its own."""
    for part in module.modules():
        for tensors in (part._parameters, part._buffers):
            for name, tensor in tensors.items():
                if tensor is not None:
                    wanted = dtype if tensor.is_floating_point() else tensor.dtype
                    fake = torch.empty_strided(tensor.size(), tensor.stride(), dtype=wanted, device="cuda")
                    tensors[name] = nn.Parameter(fake) if tensors is part._parameters else fake
    return module


def run(module, precision, images):
    """Return what a run calls."""
    device = torch.device("cuda")
    with Watched() as watched:
        (eager._autocast(module, device) if precision == "amp" else module)(images)
    return watched


@pytest.mark.parametrize(("model", "kernels", "precision", "options"), VARIANTS, ids=str)
def test_a_run_does_not_wait_for_the_device(monkeypatch, model, kernels, precision, options):
    monkeypatch.setattr(torch.cuda.amp.common, "amp_definitely_not_available", lambda: False)
    dtype, built = eager.DTYPES[precision], catalog.build(model, kernels=kernels, **options)
    with FakeTensorMode(), torch.inference_mode():
        images = torch.empty(2, *catalog.entry(model).image_shape(options), device="cuda", dtype=dtype)
        watched = run(on_gpu(built, dtype), precision, images)
    assert watched.operators
    assert watched.waited == []
    own = {str(each) for each in watched.operators if each.namespace == "benchd"}
    assert bool(own) == (kernels == "custom")


class Passes(TorchDispatchMode):
    """Notes of each convolution whether it adds a bias, and its answer, and the shapes that are copied."""

    def __init__(self):
        super().__init__()
        self.add_biases, self.answers, self.copied = [], [], []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.aten.convolution.default:
            self.add_biases.append(args[2] is not None)
        if func is torch.ops.aten.clone.default:
            self.copied.append(tuple(args[0].shape))
        result = func(*args, **(kwargs or {}))
        if func is torch.ops.aten.convolution.default:
            self.answers.append(result)
        return result


@pytest.mark.parametrize(
    ("kernels", "options", "seen", "add_biases"),
    [
        ("custom", {}, [], [False, False]),
        ("custom", {"encoding": "rate"}, [], [False, False]),
        ("custom", {}, ["conv1"], [True, False]),
        ("custom", {}, ["conv2"], [False, True]),
        ("custom", {}, ["lif1"], [True, False]),
        ("custom", {"batch_norm": True}, [], [True, True]),
        ("torch", {}, [], [True, True]),
    ],
    ids=str,
)
def test_neurons_of_onepass_add_the_biases_of_layers_that_nobody_sees(kernels, options, seen, add_biases):
    built = catalog.build("snn_onepass", kernels=kernels, **options)
    for name in seen:
        built.get_submodule(name).register_forward_hook(lambda *_: None)
    assert passes(built)[0].add_biases == add_biases


def passes(built, dtype=torch.float16, *, batch=2, autocast=False):
    """Return what a run in this precision notes, and what another does."""
    with FakeTensorMode(), torch.no_grad(), torch.autocast("cuda", torch.float16, autocast):
        on_gpu(built, dtype)
        noted = Passes(), Passes()
        for each in noted:
            with each:
                built(torch.empty(batch, 3, 32, 32, device="cuda", dtype=dtype))
    return noted


@pytest.mark.parametrize(("batch", "copied"), [(2, (16, 128, 8, 8)), (32, (256, 128, 8, 8)), (33, (256, 8, 8, 128))])
def test_before_fc1_of_onepass_the_smaller_of_spikes_and_weights_is_copied(batch, copied):
    assert passes(catalog.build("snn_onepass", kernels="custom"), batch=batch)[1].copied == [copied]
    assert passes(catalog.build("snn_onepass"), batch=batch)[1].copied == [(8 * batch, 128, 8, 8)]


@pytest.mark.parametrize(
    ("dtype", "autocast", "layout"),
    [
        (torch.float32, False, torch.contiguous_format),
        (torch.float16, False, torch.channels_last),
        (torch.float32, True, torch.channels_last),
    ],
    ids=["fp32", "fp16", "amp"],
)
def test_convolutions_of_the_spiking_resnet_go_by_planes_in_float32_alone(monkeypatch, dtype, autocast, layout):
    monkeypatch.setattr(torch.cuda.amp.common, "amp_definitely_not_available", lambda: False)
    built = catalog.build("snn_stbif_resnet18", kernels="custom", width=8)
    noted = passes(built, dtype, autocast=autocast)[1]
    assert all(answer.is_contiguous(memory_format=layout) for answer in noted.answers)
    if layout == torch.contiguous_format:
        assert noted.copied == [(8, 2, 8, 8, 8)]  # by the pool alone, whose answer is channels last


@pytest.mark.parametrize(
    ("layer", "convolutions"),
    [
        (None, 0),
        (nn.Conv2d(3, 192, 16, 16, padding=0, dilation=1), 0),
        (nn.Conv2d(3, 192, 16, 16, padding=8), 1),
        (nn.Conv2d(3, 192, 8, 16), 1),
        (nn.utils.parametrizations.weight_norm(nn.Conv2d(3, 192, 16, 16)), 1),
    ],
    ids=["own", "same", "padded", "smaller", "parametrised"],
)
def test_patches_of_vim_are_a_product_while_they_do_not_overlap(layer, convolutions):
    embedding = catalog.build("vim_tiny", kernels="custom", depth=1).patch_embed
    embedding.proj = layer or embedding.proj
    with FakeTensorMode(), torch.no_grad(), Passes() as noted:
        on_gpu(embedding, torch.float32)(torch.empty(2, 3, 224, 224, device="cuda"))
    assert len(noted.answers) == convolutions


class Sums(TorchDispatchMode):
    """Notes the types of running sums."""

    def __init__(self):
        super().__init__()
        self.dtypes = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if func is torch.ops.aten.cumsum.default:
            self.dtypes.append(result.dtype)
        return result


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_the_plain_max_pool_sums_in_float64(precision):
    dtype, built = eager.DTYPES[precision], catalog.build("snn_stbif_resnet18", **OPTIONS["snn_stbif_resnet18"])
    with FakeTensorMode(), torch.inference_mode(), Sums() as sums:
        on_gpu(built, dtype)(torch.empty(2, 3, 32, 32, device="cuda", dtype=dtype))
    assert sums.dtypes == [torch.float64]
