"""The Triton kernels of ST-BIF against the reference and the plain gradients, on a GPU or in Triton's interpreter."""

import pytest
import torch
from fake_gpu import needs_a_driver
from pairs import pairs
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

pytest.importorskip("triton")

from benchd.kernels.stbif import max_pool_delta, stbif, stbif_block, triton_impl

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# the interpreter cuts the last bits of a bfloat16 off where a GPU rounds them
DTYPES = [torch.float64, torch.float32, torch.float16, *([torch.bfloat16] if DEVICE == "cuda" else [])]
# what a GPU rounds off a float32 exponential, which it takes to 22.5 bits, and the interpreter does not
ROUNDING = {torch.float32: 1e-5} if DEVICE == "cuda" else {}
NEURON = {"threshold": 0.731, "pos_max": 3, "neg_min": -1}
WINDOWS = {"kernel_size": 3, "stride": 2, "padding": 1}
CONVERTED = NEURON | {"neg_min": 0}  # as the nets have it
TIGHT = {"threshold": 0.5, "pos_max": 1, "neg_min": -1}


def draw(*shape, seed=0, dtype=torch.float32):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


def eighths(*shape, seed=0, dtype=torch.float32):
    """Return terms whose sums are not rounded, so that membranes meet 0 and the threshold of TIGHT themselves."""
    return (4 * draw(*shape, seed=seed)).round().div(8).to(dtype)


def far(*shape, seed=0, dtype=torch.float32):
    """Return terms so large that the surrogate of most membranes is 0."""
    return (1000 * draw(*shape, seed=seed)).to(dtype)


def channels_last(tensor):
    return tensor.flatten(0, 1).to(memory_format=torch.channels_last).unflatten(0, tensor.shape[:2])


# the last is of less memory than a block that reads without its mask
CURRENTS = (draw, (2, 9, 3, 5), NEURON), (eighths, (2, 9, 3, 5), TIGHT), (draw, (1, 9, 1, 2), CONVERTED)


@pairs(output=["codes", "values"], names=[[], ["bias"], ["residual"], ["bias", "residual"]], dtype=DTYPES)
def test_a_block_is_the_reference_bit_for_bit(dtype, names, output):
    for drawn, shape, neuron in CURRENTS:
        current, residual = (drawn(4, *shape, seed=seed, dtype=dtype) for seed in (0, 1))
        terms = {"bias": drawn(4, 9, seed=2, dtype=dtype), "residual": residual}
        terms = {name: terms[name] for name in names}
        # in other layouts none and both terms show what one alone would
        others = () if len(names) == 1 else (channels_last(current), current.mT.contiguous().mT)
        for layout in (current, *others):
            want = stbif_block(layout, **terms, **neuron, output=output, implementation="reference")
            got = stbif_block(layout, **terms, **neuron, output=output, implementation="triton")
            assert got.dtype == want.dtype
            assert torch.equal(got, want)
            assert want.unique().numel() == 3


@pytest.mark.parametrize("shape", [(1, 5), (3, 129), (2, 513), (9, 1), (4, 0, 3)], ids=str)
def test_any_size_and_one_step_are_served(shape):
    for current, neuron in (
        (2 * draw(*shape), NEURON),
        (eighths(*shape), TIGHT),
        (draw(shape[0], 2), CONVERTED),
    ):
        for output in ("codes", "values"):
            want = stbif(current, **neuron, output=output, implementation="reference")
            assert torch.equal(stbif(current, **neuron, output=output, implementation="triton"), want)


def test_a_full_device_and_wide_tracers_are_cut_otherwise(monkeypatch):
    monkeypatch.setattr(triton_impl, "_CUTS", {0: (0, *triton_impl._CUTS[0][1:])})
    current, residual = draw(3, 2, 130, 2, 2), draw(3, 2, 130, 2, 2, seed=1)
    arguments = {"bias": draw(3, 130), "residual": residual, "threshold": 0.25, "pos_max": 7, "neg_min": -8}
    want = stbif_block(current, **arguments, implementation="reference")
    assert torch.equal(stbif_block(current, **arguments, implementation="triton"), want)


@pytest.mark.parametrize("windows", [(3, 2, 1), (5, 3, 2)], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_deltas_are_the_reference_s_bit_for_bit(dtype, windows):
    sizes = dict(zip(WINDOWS, windows, strict=True))
    for shape in ((2, 5, 6, 5), (1, 5, 2, 2)):
        values = draw(4, *shape, dtype=dtype)
        for layout in (values, channels_last(values)):
            want = max_pool_delta(layout, **sizes, implementation="reference")
            got = max_pool_delta(layout, **sizes, implementation="triton")
            assert got.dtype == dtype
            assert torch.equal(got, want)


def gradients(current, s, terms, weights, implementation, neuron=NEURON):
    leaves = [tensor.detach().requires_grad_() for tensor in (current, s, *terms.values())]
    arguments = {**neuron, "threshold": leaves[1], "implementation": implementation}
    values = stbif_block(leaves[0], **dict(zip(terms, leaves[2:], strict=True)), **arguments)
    return values.detach(), *torch.autograd.grad((values * weights).sum(), leaves)


CHARGES = {
    "many": (draw, (2, 7, 3, 4), NEURON),
    "on the threshold": (eighths, (2, 7, 3, 4), TIGHT),
    "few and far": (far, (1, 7, 1, 2), NEURON),
}


@pairs(names=[[], ["bias", "residual"]], dtype=[torch.float64, torch.float32, torch.float16], charges=list(CHARGES))
def test_the_gradients_are_the_plain_ones_in_double(dtype, names, charges):
    drawn, shape, neuron = CHARGES[charges]
    current, residual, weights = (drawn(5, *shape, seed=seed, dtype=dtype) for seed in range(3))
    terms = {"bias": drawn(5, 7, seed=3, dtype=dtype), "residual": residual}
    terms = {name: terms[name] for name in names}
    s = torch.tensor(neuron["threshold"], dtype=torch.promote_types(dtype, torch.float32), device=DEVICE)
    double = {name: term.double() for name, term in terms.items()}
    wanted = gradients(current.double(), s.double(), double, weights.double(), "torch", neuron)
    for layout in (current, channels_last(current)):
        for got, want in zip(gradients(layout, s, terms, weights, "triton", neuron), wanted, strict=True):
            # a threshold and a bias collect from many neurons; that of a half tensor's threshold is in float32
            limit = ROUNDING.get(got.dtype, 32 * torch.finfo(got.dtype).eps) * (current.numel() / want.numel()) ** 0.5
            torch.testing.assert_close(got.double(), want, rtol=limit, atol=limit)


@pytest.mark.parametrize("windows", [(3, 2, 1), (2, 2, 0)], ids=str)
def test_a_pool_hands_its_gradient_to_the_first_of_equals(windows):
    for shape in ((2, 7, 6, 5), (1, 7, 2, 2)):
        values = draw(5, *shape).round().clamp(-1, 1) / 2
        sizes, results = dict(zip(WINDOWS, windows, strict=True)), []
        # torch sums in no fixed order on a GPU, and refuses to where it has to
        for implementation, device in (("torch", "cpu"), ("triton", DEVICE)):
            leaf = values.detach().to(device).requires_grad_()
            out = max_pool_delta(leaf, **sizes, implementation=implementation)
            results += torch.autograd.grad((out * draw(*out.shape, seed=1).to(device)).sum(), leaf)
        assert results[0].any()
        torch.testing.assert_close(results[1].cpu(), results[0], rtol=0, atol=1e-5)


class Called(TorchDispatchMode):
    """The operators that are called."""

    def __init__(self):
        super().__init__()
        self.operators = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.operators.append(func)
        return func(*args, **(kwargs or {}))


@pytest.mark.skipif(needs_a_driver(), reason="this torch has fake CUDA tensors only beside a CUDA driver")
@pytest.mark.parametrize("implementation", ["torch", "triton"])
@pytest.mark.parametrize("output", ["codes", "values"])
def test_a_number_as_threshold_is_made_on_the_device(implementation, output):
    """A copy of it from the host would wait for the device in each call, and no CUDA graph could hold it."""
    with FakeTensorMode(), Called() as called:  # a GPU is not needed to see what it would be asked
        current = torch.empty(4, 2, 9, 3, device="cuda")
        stbif(current, **NEURON, output=output, implementation=implementation)
    assert torch.ops.aten._to_copy.default not in called.operators
