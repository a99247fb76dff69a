"""Vision Mamba against its equations, written here with flips, a gate a direction and a loop over tokens."""

import copy
import math
import re
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch.nn import functional

from benchd.daemon.errors import UsageError
from benchd.kernels.dispatch import Unavailable
from benchd.models.catalog import build
from benchd.models.vim import PatchEmbedding, Vim, shape_from
from benchd.models.weights import WeightsError


def rms_norm(x, weight):
    return x / torch.sqrt((x * x).mean(-1, keepdim=True) + 1e-5) * weight


def softplus(x):
    return torch.where(x > 20, x, torch.log1p(torch.exp(x.clamp(max=20))))


def silu(x):
    return x / (1 + torch.exp(-x))


def direction(u0, z, w, suffix):
    """One direction of the mixer over tokens already in its order; u0, z (B, L, E)."""
    conv, bias = w[f"conv1d{suffix}.weight"][:, 0], w[f"conv1d{suffix}.bias"]
    width = conv.shape[1]
    padded = torch.cat((torch.zeros_like(u0[:, :1]).repeat(1, width - 1, 1), u0), 1)
    u = silu(bias + sum(padded[:, k : k + u0.shape[1]] * conv[:, k] for k in range(width)))
    rank = w[f"dt_proj{suffix}.weight"].shape[1]
    low, B, C = (u @ w[f"x_proj{suffix}.weight"].T).split([rank, 16, 16], -1)
    delta = softplus(low @ w[f"dt_proj{suffix}.weight"].T + w[f"dt_proj{suffix}.bias"])
    A = -torch.exp(w["A_b_log" if suffix else "A_log"])
    h, y = torch.zeros(len(u), *A.shape, dtype=u.dtype), []
    for t in range(u.shape[1]):
        h = torch.exp(delta[:, t, :, None] * A) * h + (delta[:, t] * u[:, t])[:, :, None] * B[:, t, None, :]
        y.append((h * C[:, t, None, :]).sum(-1) + w[f"D{suffix}"] * u[:, t])
    return torch.stack(y, 1) * silu(z)


def mixer(x, w):
    u0, z = (x @ w["in_proj.weight"].T).chunk(2, -1)
    forward, backward = direction(u0, z, w, ""), direction(u0.flip(1), z.flip(1), w, "_b").flip(1)
    return (forward + backward) / 2 @ w["out_proj.weight"].T


def equations(model, images):
    """Return the logits in float64 and the hidden tokens after the last block, by the published equations."""
    w = {key: value.detach().double() for key, value in model.state_dict().items()}
    stride, patch = model.patch_embed.proj.stride, model.patch_embed.proj.kernel_size[0]
    columns = functional.unfold(images.double(), patch, stride=stride).transpose(1, 2)
    tokens = columns @ w["patch_embed.proj.weight"].flatten(1).T + w["patch_embed.proj.bias"]
    middle = tokens.shape[1] // 2
    cls = w["cls_token"].expand(len(images), -1, -1)
    hidden, residual = torch.cat((tokens[:, :middle], cls, tokens[:, middle:]), 1) + w["pos_embed"], 0.0
    for i in range(len(model.layers)):
        own = {key.split(".mixer.")[1]: value for key, value in w.items() if key.startswith(f"layers.{i}.mixer.")}
        residual = residual + hidden
        hidden = mixer(rms_norm(residual, w[f"layers.{i}.norm.weight"]), own)
    x = rms_norm(residual + hidden, w["norm_f.weight"])[:, middle]
    return x @ w["head.weight"].T + w["head.bias"]


def lively(model):
    """Weights some times the initial ones and nothing at its default, so that every term tells in the logits."""
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype), alpha=0.1)
    return model.eval()


@pytest.fixture(scope="module")
def tiny():
    torch.manual_seed(0)
    return build("vim_tiny", depth=4)


SMALL = {
    "one block": {"dim": 32, "depth": 1},
    "three blocks": {"dim": 48, "depth": 3},
    "an odd number of patches": {"dim": 32, "depth": 2, "image_size": 48},
    "one patch": {"dim": 32, "depth": 2, "image_size": 16},
    "overlapping patches": {"dim": 32, "depth": 2, "patch_size": 8, "stride": 5, "image_size": 43},
    "a rank that is rounded up": {"dim": 40, "depth": 2},
}


def small(case="three blocks"):
    torch.manual_seed(2)
    return lively(Vim(**{"image_size": 64, "num_classes": 10} | SMALL[case]).double())


def pictures(model, batch=2):
    generator = torch.Generator().manual_seed(3)
    return torch.randn(batch, *model.input_shape, generator=generator, dtype=torch.float64)


@pytest.mark.parametrize("case", SMALL)
def test_small_models_follow_the_equations(case):
    model = small(case)
    want = equations(model, pictures(model))
    with torch.no_grad():
        got = model(pictures(model))
    assert want.std() > 0.1
    torch.testing.assert_close(got, want, rtol=1e-7, atol=1e-8)
    assert torch.equal(got, model(pictures(model)).detach())


def relative_error(logits, want):
    return float((logits.double() - want).abs().max() / want.abs().max())


def test_published_shapes_and_names():
    with torch.device("meta"):
        tiny = build("vim_tiny")
    shapes = {name: tuple(tensor.shape) for name, tensor in tiny.state_dict().items()}
    layer = {
        "norm.weight": (192,),
        "mixer.in_proj.weight": (768, 192),
        "mixer.out_proj.weight": (192, 384),
        "mixer.A_log": (384, 16),
        "mixer.A_b_log": (384, 16),
    }
    for suffix in ("", "_b"):
        layer |= {
            f"mixer.conv1d{suffix}.weight": (384, 1, 4),
            f"mixer.conv1d{suffix}.bias": (384,),
            f"mixer.x_proj{suffix}.weight": (44, 384),
            f"mixer.dt_proj{suffix}.weight": (384, 12),
            f"mixer.dt_proj{suffix}.bias": (384,),
            f"mixer.D{suffix}": (384,),
        }
    want = {
        "cls_token": (1, 1, 192),
        "pos_embed": (1, 197, 192),
        "patch_embed.proj.weight": (192, 3, 16, 16),
        "patch_embed.proj.bias": (192,),
        "norm_f.weight": (192,),
        "head.weight": (1000, 192),
        "head.bias": (1000,),
    }
    want |= {f"layers.{i}.{name}": shape for i in range(24) for name, shape in layer.items()}
    assert shapes == want
    assert tiny.input_shape == (3, 224, 224)
    assert not tiny.training


def test_published_initial_values(tiny):
    mixer = copy.deepcopy(tiny.layers[3].mixer).requires_grad_(False)
    steps = functional.softplus(torch.cat((mixer.dt_proj.bias, mixer.dt_proj_b.bias)).double())
    assert 0.001 <= steps.min() < 0.0015
    assert 0.07 < steps.max() <= 0.1001
    assert steps.log().std() == pytest.approx(math.log(100) / math.sqrt(12), rel=0.1)
    torch.testing.assert_close(mixer.A_b_log.exp(), torch.arange(1, 17).float().expand(384, 16))
    assert torch.equal(mixer.D, torch.ones(384))
    assert mixer.in_proj.weight.std().item() == pytest.approx(0.02, rel=0.02)
    assert mixer.out_proj.weight.std().item() == pytest.approx(0.02 / math.sqrt(4), rel=0.02)
    assert tiny.head.bias.abs().max() == 0


@pytest.mark.parametrize("size", [(16, 16), (24, 40), (29, 18)])
def test_patches_are_also_a_matrix_product(size):
    torch.manual_seed(0)
    embedding = PatchEmbedding(12, 8, 8, "auto").double()
    images = torch.randn(3, 3, *size, dtype=torch.float64)
    torch.testing.assert_close(embedding.product(images), embedding(images))


@pytest.mark.parametrize(("name", "dim"), [("vim_small", 384), ("vim_base", 768)])
def test_larger_models_are_wider(name, dim):
    with torch.device("meta"):
        model = build(name)
    assert model.head.weight.shape == (1000, dim)
    assert len(model.layers) == 24


def test_derived_weights_follow_every_change_of_the_parameters():
    model, other = small(), lively(small())
    x = pictures(model)
    with torch.no_grad():
        before = model(x)
        model.load_state_dict(other.state_dict())
        torch.testing.assert_close(model(x), equations(other, x), rtol=1e-7, atol=1e-8)
        assert (model(x) - before).abs().max() > 0.01
        model.layers[0].mixer.A_log.mul_(0.5)
        torch.testing.assert_close(model(x), equations(model, x), rtol=1e-7, atol=1e-8)
        want = equations(model, x)
        assert relative_error(model.float()(x.float()), want) < 1e-5
        assert relative_error(model.half()(x.half()), want) < 2e-2
        assert relative_error(copy.deepcopy(model).double()(x), equations(model, x)) < 1e-6


def test_training_reaches_every_parameter_with_the_right_gradient():
    model = small().train()
    model(pictures(model)).square().sum().backward()
    twin = copy.deepcopy(model)
    twin.zero_grad()
    want = equations_with_gradients(twin)
    for name, parameter in model.named_parameters():
        assert parameter.grad.abs().max() > 0, name
        torch.testing.assert_close(parameter.grad, want[name], rtol=1e-6, atol=1e-7, msg=lambda m, n=name: f"{n}: {m}")


def equations_with_gradients(model):
    parameters = dict(model.named_parameters())
    detached = {name: parameter.detach().clone().requires_grad_() for name, parameter in parameters.items()}
    logits = equations(_State(model, detached), pictures(model))
    return dict(zip(detached, torch.autograd.grad(logits.square().sum(), list(detached.values())), strict=True))


class _State:
    """The model's geometry with tensors that keep their graph through `equations`."""

    def __init__(self, model, tensors):
        self.patch_embed, self.layers, self._tensors = model.patch_embed, model.layers, tensors

    def state_dict(self):
        return {name: _Kept(tensor) for name, tensor in self._tensors.items()}


class _Kept:
    def __init__(self, tensor):
        self._tensor = tensor

    def detach(self):
        return self._tensor


def test_inference_mode_then_training_share_nothing_stale():
    model = small()
    with torch.inference_mode():
        first = model(pictures(model)).clone()
    second = model(pictures(model))
    second.sum().backward()
    assert torch.equal(first, second.detach())


def test_a_wrong_image_or_patch_is_named():
    with pytest.raises(ValueError, match=r"images must be \(batch, 3, 64, 64\), not \(1, 3, 32, 32\)"):
        small()(torch.zeros(1, 3, 32, 32))
    with pytest.raises(ValueError, match="patch_size=32 is larger than the image, 16 pixels"):
        Vim(32, 1, patch_size=32, image_size=16)
    with pytest.raises(UsageError, match="scan"):
        build("vim_tiny", scan="parallel")


def small_pair(image_size=64):
    """A small model in float32 twice, on plain PyTorch and on our kernels."""
    torch.manual_seed(2)
    plain = lively(Vim(32, 2, image_size=image_size, num_classes=10))
    custom = Vim(32, 2, image_size=image_size, num_classes=10, implementation="auto").eval()
    custom.load_state_dict(plain.state_dict())
    return plain, custom


@torch.no_grad()
@pytest.mark.parametrize("kernels", ["torch", "custom"])
def test_every_precision_a_compiler_and_an_exporter_take_it(kernels):
    plain, custom = small_pair(32)
    model = custom if kernels == "custom" else copy.deepcopy(plain)
    for dtype, limit in ((torch.float32, 1e-5), (torch.float16, 2e-2), (torch.bfloat16, 1e-1)):
        x = pictures(plain).to(dtype)
        want = equations(plain.to(dtype), x)
        logits = model.to(dtype)(x)
        assert (logits.dtype, bool(want.std() > 0.1)) == (dtype, True)
        assert relative_error(logits, want) < limit
    x = pictures(model.float()).float()
    want = model(x)
    assert model(x[:0]).shape == (0, 10)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x), want)
    torch.testing.assert_close(torch.export.export(model, (x,)).module()(x), want)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        half = model(x)
    assert 0 < relative_error(half, want.double()) < 1e-1
    assert torch.equal(model(x), want)


@torch.no_grad()
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("batch", [1, 3, 100])  # 17 tokens an image: 100 go through the layers in parts
def test_layers_called_without_their_ops_answer_as_with_them(dtype, batch):
    _, custom = small_pair()
    x = pictures(custom.to(dtype), batch).to(dtype)
    calls = []
    called = custom(x)
    with custom.layers[0].norm.register_forward_hook(lambda *_: calls.append(1)):
        assert torch.equal(custom(x), called)
    assert calls == [1]
    assert torch.equal(custom(x.flip(0)), called.flip(0))


@torch.no_grad()
def test_hooks_of_packed_products_see_and_change_them():
    plain, custom = small_pair()
    x = pictures(custom).float()
    before = custom(x)
    for model in (plain, custom):
        model.layers[0].mixer.in_proj.register_forward_hook(lambda _module, _inputs, output: 2 * output)
        model.layers[1].mixer.out_proj.forward = lambda y: y[..., : plain.layers[0].norm.weight.numel()]
    assert relative_error(custom(x), plain(x).double()) < 1e-5
    assert relative_error(custom(x), before.double()) > 1e-2


@torch.no_grad()
def test_parameters_that_keep_no_version_are_read_anew():
    plain, custom = small_pair()
    x = pictures(custom).float()
    custom(x)
    for model in (plain, custom):
        with torch.inference_mode():
            weight = torch.nn.Parameter(-2 * model.layers[0].mixer.in_proj.weight, requires_grad=False)
            model.layers[0].mixer.in_proj.weight = weight
            weight.mul_(1.5)
    assert relative_error(custom(x), plain(x).double()) < 1e-4


@torch.no_grad()
def test_called_layers_follow_every_change_of_the_parameters():
    plain, custom = small_pair()
    x = pictures(custom).float()
    custom(x)
    for name, parameter in custom.named_parameters():
        change = 1.5 if name.endswith("A_log") else parameter.mean() + 0.1
        plain.get_parameter(name).add_(change)
        if name.endswith("_b.weight"):
            parameter.data = parameter.data + change
        else:
            parameter.add_(change)
        assert relative_error(custom(x), plain(x).double()) < 1e-4, name
    for model in (plain, custom):
        model.layers[0].norm.weight = torch.nn.Parameter(torch.arange(32.0))
    assert relative_error(custom(x), plain(x).double()) < 1e-4


@torch.no_grad()
@pytest.mark.parametrize("batch", [1, 100])
def test_compiled_layers_are_those_called_without_their_ops(batch):
    _, custom = small_pair()
    x, twin = pictures(custom, batch).float(), copy.deepcopy(custom)
    twin.layers[0].norm.weight.mul_(2)
    torch._dynamo.reset()
    compiled = [torch.compile(model, fullgraph=True, backend="aot_eager") for model in (custom, twin)]
    for run, model in zip(compiled, (custom, twin), strict=True):
        assert torch.equal(run(x), model(x))
    assert not torch.equal(*(run(x) for run in compiled))
    custom.layers[0].mixer.out_proj.weight.add_(0.1)
    custom.layers[0].norm.weight = torch.nn.Parameter(torch.arange(32.0))
    calls = []
    with custom.layers[0].mixer.in_proj.register_forward_hook(lambda *_: calls.append(1)):
        torch.testing.assert_close(compiled[0](x), custom(x))
    assert calls == [1, 1]
    assert torch.equal(compiled[0](x), custom(x))
    tokens, given = torch.randn(batch, 17, 32), list(custom.layers[0].parameters())
    torch.library.opcheck(torch.ops.benchd.vim_layers.default, (tokens, given, custom._number))


@torch.no_grad()
def test_compiled_layers_compute_with_the_parameters_that_they_are_given():
    _, custom = small_pair(32)
    x, other = pictures(custom).float(), {name: 1.5 * p for name, p in custom.named_parameters()}
    torch._dynamo.reset()

    def edited(x):
        first = custom(x)
        custom.layers[0].norm.weight.mul_(2)
        return first, custom(x)

    def called(x):
        return torch.func.functional_call(custom, other, (x,))

    twin = copy.deepcopy(custom)
    outputs = torch.compile(edited, backend="aot_eager")(x)
    torch.testing.assert_close(outputs[0], twin(x))
    twin.layers[0].norm.weight.mul_(2)
    torch.testing.assert_close(outputs[1], twin(x))
    torch.testing.assert_close(custom(x), twin(x))
    torch.testing.assert_close(torch.compile(called, backend="aot_eager")(x), called(x))


@torch.no_grad()
def test_layers_that_were_parametrised_are_read_anew():
    _, custom = small_pair()
    x = pictures(custom).float()
    custom(x)
    torch.nn.utils.parametrizations.weight_norm(custom.layers[0].mixer.in_proj)
    compiled = torch.compile(custom, backend="aot_eager")
    before = compiled(x)
    torch.testing.assert_close(custom(x), before)
    custom.layers[0].mixer.in_proj.parametrizations.weight.original0.mul_(2)
    want = copy.deepcopy(custom)(x)
    assert not torch.allclose(want, before)
    torch.testing.assert_close(custom(x), want)
    torch.testing.assert_close(compiled(x), want)


@torch.no_grad()
def test_called_layers_serve_threads_copies_and_another_number_of_threads():
    _, custom = small_pair()
    x = [pictures(custom, batch).float() for batch in (1, 2, 2, 5)]
    want = [custom(each) for each in x]

    def repeated(i):
        with torch.no_grad():
            return all(torch.equal(custom(x[i]), want[i]) for _ in range(50))

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(repeated, range(4)))
    assert torch.equal(copy.deepcopy(custom)(x[3]), want[3])
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(threads + 1)
        torch.testing.assert_close(custom(x[3]), want[3])  # PyTorch's own sums depend on the threads
    finally:
        torch.set_num_threads(threads)
    with torch.inference_mode():
        assert torch.equal(custom(x[3]), want[3])


def test_custom_kernels_that_cannot_run_are_refused_at_build_time():
    with torch.device("meta"), pytest.raises(Unavailable, match="for CPU tensors, not meta"):
        build("vim_tiny", kernels="custom")


def geometry(patch_size, stride, image_size):
    return {"patch_size": patch_size, "stride": stride, "image_size": image_size}


def test_the_positions_of_the_options_are_accepted():
    for sizes in ((16, 16, 224), (16, 24, 224), (16, 8, 224), (4, 4, 32), (16, 16, 448)):
        options = geometry(*sizes) | {"dim": 32, "depth": 1}
        with torch.device("meta"):
            state = Vim(num_classes=7, **options).state_dict()
        assert shape_from(state, options | {"num_classes": 1000}) == {"num_classes": 7}
        with pytest.raises(WeightsError, match=r"num_classes=8, but head.weight has 7; leave num_classes out"):
            shape_from(state, options | {"num_classes": 8})


NO_SQUARE = "make 14x14+1; no option gives a count that is not N x N + 1"


@pytest.mark.parametrize(
    ("patches", "asked", "advice"),
    [
        (27 * 27, (16, 16, 224), "pass --option stride=8, which gives 224 pixels, or --option image_size=432"),
        (14 * 14, (16, 8, 224), "pass --option stride=16, which gives 224 pixels, or --option image_size=120"),
        (14 * 14, (16, 16, 384), "pass --option stride=28, which gives 384 pixels, or --option image_size=224"),
        (300 * 300, (16, 16, 224), "pass --option image_size=4800"),
        (1, (16, 16, 224), "pass --option image_size=16"),
        *((patches, (16, 16, 224), NO_SQUARE) for patches in (196 + 1, 2, 0)),
    ],
)
def test_positions_of_other_options_are_refused_with_the_options_that_fit(patches, asked, advice):
    side = math.isqrt(patches)
    positions = patches + 1 if advice == NO_SQUARE else f"{side}x{side}+1"
    with pytest.raises(
        WeightsError, match=rf"^pos_embed has {re.escape(str(positions))} positions, and .*{re.escape(advice)}$"
    ):
        shape_from({"pos_embed": torch.zeros(1, patches + 1, 2)}, geometry(*asked))


_TINY = {"dim": 192, "depth": 24, "patch_size": 16, "stride": 16, "image_size": 224}


@pytest.mark.parametrize(
    "given",
    [
        {"dim": 64, "depth": 2, "patch_size": 4, "stride": 4, "image_size": 32},
        {"dim": 32, "depth": 1, "patch_size": 8, "stride": 8},
        {"dim": 32, "depth": 2, "patch_size": 32, "stride": 8},
    ],
    ids=str,
)
def test_the_advised_options_load_the_checkpoint(given):
    base_options = _TINY | {"num_classes": 1000}
    state = Vim(**(_TINY | given)).state_dict()
    with pytest.raises(WeightsError) as refused:
        shape_from(state, base_options)
    message = str(refused.value)
    assert all(f"it has {name}={given[name]}, not" in message for name in given.keys() & {"dim", "depth", "patch_size"})
    advised = {name: int(value) for name, value in re.findall(r"--option (\w+)=(\d+)", message)}
    shape = {name: advised.pop(name) for name in given.keys() & advised.keys() - {"stride", "image_size"}}
    for either in advised.items() or [("stride", base_options["stride"])]:  # stride or image_size: each will do
        options = base_options | shape | dict([either])
        assert shape_from(state, options) == {"num_classes": 1000}
        Vim(**options).load_state_dict(state)
