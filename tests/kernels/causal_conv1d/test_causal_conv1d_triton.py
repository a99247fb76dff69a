"""The Triton kernel of the short convolution against conv1d in float64, in the interpreter where there is no GPU."""

import pytest
import torch
from test_causal_conv1d import equation, inputs

from benchd.kernels import launch
from benchd.kernels.causal_conv1d import causal_conv1d, causal_conv1d_pair, ops
from benchd.kernels.dispatch import Unavailable

triton_impl = pytest.importorskip("benchd.kernels.causal_conv1d.triton_impl", exc_type=ImportError)

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
LENGTHS = range(2, 8)


def convolved(tensors, **arguments):
    """Return y of the kernel, (batch, length, channels), or (2, ...) for the weight of a pair."""
    op = causal_conv1d_pair if tensors["weight"].dim() == 3 else causal_conv1d
    return op(**{name: tensor.to(DEVICE) for name, tensor in tensors.items()}, **arguments, implementation="triton")


def wanted(tensors, activation="silu", reverse=False):
    if tensors["weight"].dim() == 2:
        return equation(**tensors, activation=activation, reverse=reverse)
    halves = [{name: tensors[name][g] for name in tensors if name != "x"} for g in (0, 1)]
    return torch.stack([equation(tensors["x"], **halves[g], activation=activation, reverse=g == 1) for g in (0, 1)])


def assert_right(y, want, limit=2e-6):
    torch.testing.assert_close(y.cpu().double(), want, rtol=0, atol=limit * float(want.abs().max()))


@pytest.mark.parametrize("activation", ["silu", None])
@pytest.mark.parametrize("biased", [True, False], ids=["bias", "no bias"])
@pytest.mark.parametrize(("lead", "reverse"), [((), False), ((), True), ((2,), False)], ids=["back", "ahead", "pair"])
@pytest.mark.parametrize("shape", [(2, 9, 70, 4), (3, 8, 144, 1), (1, 17, 130, 3)], ids=str)
def test_float32_agrees_with_the_equation(shape, lead, reverse, biased, activation):
    batch, longest, channels, width = shape
    few = 2, channels % 64  # less memory than a tile that reads without its mask
    # and a last token at each place of a tile, which neither the bias nor the activation sees
    places = LENGTHS if biased and activation else ()
    for length, wide in ((longest, channels), few, *((length, channels) for length in places)):
        tensors = inputs(batch, length, wide, width, lead=lead)
        if not biased:
            del tensors["bias"]
        y = convolved(tensors, activation=activation, **({} if lead else {"reverse": reverse}))
        assert y.dtype == torch.float32
        assert_right(y, wanted(tensors, activation, reverse))


@pytest.mark.parametrize("lead", [(), (2,)], ids=["back", "pair"])
def test_a_single_channel_is_convolved(lead):
    for length in (1, 9):
        tensors = inputs(1, length, 1, 4, lead=lead)
        assert_right(convolved(tensors), wanted(tensors))


@pytest.mark.parametrize(("dtype", "limit"), [(torch.float16, 1e-3), (torch.bfloat16, 8e-3)], ids=str)
def test_half_precision_rounds_only_what_comes_out(dtype, limit):
    tensors = inputs(2, 11, 70, 4, lead=(2,), dtype=dtype)
    y = convolved(tensors)
    assert y.dtype == dtype
    assert_right(y, wanted(tensors), limit)


def test_half_tokens_meet_float32_weights_as_they_are():
    tensors = inputs(1, 9, 70, 4, lead=(2,))
    tensors["x"] = tensors["x"].half()
    y = convolved(tensors)
    assert y.dtype == torch.float16
    assert_right(y, wanted(tensors), 1e-3)


def test_strided_inputs_stay_as_they_are():
    tensors = inputs(2, 11, 12, 4, lead=(2,))
    wide = torch.cat((tensors["x"], tensors["x"]), -1)
    before = wide.clone()
    transposed = {"weight": tensors["weight"].mT.contiguous().mT, "bias": tensors["bias"].T.contiguous().T}
    for x in (wide[..., :12], tensors["x"].mT.contiguous().mT, wide[:, 2:9, 12:]):
        assert_right(convolved({"x": x} | transposed), wanted({"x": x} | transposed))
    assert torch.equal(wide, before)


@pytest.mark.parametrize("shape", [(0, 5, 3, 4), (2, 0, 3, 4)], ids=["no images", "no tokens"])
def test_empty_inputs_give_empty_outputs(shape):
    assert convolved(inputs(*shape)).shape == shape[:3]
    assert convolved(inputs(*shape, lead=(2,))).shape == (2, *shape[:3])


@pytest.mark.filterwarnings("ignore:overflow encountered in exp2")  # infinity is what the division wants
def test_silu_is_right_far_from_zero():
    tensors = inputs(1, 9, 20, 4)
    scaled = tensors | {"x": tensors["x"] * 200}
    y = convolved(scaled)
    torch.testing.assert_close(y.cpu().double(), equation(**scaled), rtol=2e-6, atol=2e-4)


@pytest.mark.parametrize("lead", [(), (2,)], ids=["one", "pair"])
@pytest.mark.parametrize("biased", [True, False], ids=["bias", "no bias"])
def test_the_op_is_registered_as_torch_wants(lead, biased):
    x, weight, bias = (tensor.to(DEVICE) for tensor in inputs(2, 5, 6, 4, lead=lead).values())
    arguments = (x, weight, bias if biased else None, True, False)
    torch.library.opcheck(ops.conv_op["triton"], arguments)


def test_compiled_as_one_graph():
    tensors = inputs(2, 5, 6, 4, lead=(2,))
    compiled = torch.compile(convolved, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(tensors), convolved(tensors))


def test_it_refuses_what_it_cannot_do():
    tensors = inputs(1, 2, 3, 4)
    learning = tensors | {"weight": tensors["weight"].clone().requires_grad_()}
    with pytest.raises(Unavailable, match="the Triton kernel has no gradient; use implementation='torch'"):
        convolved(learning)
    with torch.no_grad():
        assert torch.equal(convolved(learning), convolved(tensors))
    with pytest.raises(Unavailable, match="computes in float32; use implementation='torch' for float64"):
        convolved({name: tensor.double() for name, tensor in tensors.items()})
    with pytest.raises(Unavailable, match="cannot run on meta"):
        causal_conv1d(**{name: tensor.to("meta") for name, tensor in tensors.items()}, implementation="triton")


def test_what_ships_is_what_the_launcher_makes(monkeypatch):
    launched = []

    class Recorded:
        def __getitem__(self, grid):
            return lambda *arguments, **options: launched.append((arguments, options))

    monkeypatch.setattr(triton_impl, "_kernel", Recorded())
    for tensors in (inputs(2, 197, 384, 4, lead=(2,)), inputs(2, 197, 384, 4, lead=(2,), dtype=torch.float16)):
        convolved(tensors)
    for (arguments, options), name in zip(launched, ("fp32", "fp16"), strict=True):
        (shipped,) = (each for each in triton_impl.SHIPPED if each.name == f"causal_conv1d_pair {name} 8x128")
        aligned = [value % 16 if isinstance(value, int) else value.data_ptr() % 16 for value in arguments]
        assert shipped.constants.items() <= options.items()
        assert (options["num_warps"], options["enable_fp_fusion"]) == (shipped.num_warps, shipped.fp_fusion)
        names = [each for each, kind in shipped.signature.items() if kind != "constexpr"]
        assert {names[i] for i in range(len(names)) if aligned[i] == 0} >= set(shipped.aligned)


def test_each_architecture_ships_each_launch_once():
    names = [(shipped.name, sm) for shipped in triton_impl.SHIPPED for sm in shipped.architectures]
    assert len(names) == len(set(names))
    assert {sm for _, sm in names} == set(launch.ARCHITECTURES)
