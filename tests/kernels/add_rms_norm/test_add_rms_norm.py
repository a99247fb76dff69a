"""The sum and its root mean square norm against the equation in float64."""

import pytest
import torch
from pairs import pairs

from benchd.kernels.add_rms_norm import add_rms_norm
from benchd.kernels.dispatch import Unavailable

IMPLEMENTATIONS = ("torch", "native", "triton")
GPU = "cuda" if torch.cuda.is_available() else "cpu"
HALVES = {torch.float16: 1e-3, torch.bfloat16: 8e-3}


def inputs(*shape, dtype=torch.float32, residual=True, seed=0):
    generator = torch.Generator().manual_seed(seed)
    hidden, stream = (torch.randn(shape, generator=generator) for _ in range(2))
    weight = torch.rand(shape[-1], generator=generator) + 0.5
    return hidden.to(dtype), stream if residual else None, weight.to(dtype)


def equation(hidden, residual, weight, eps=1e-5):
    """Return (normed, residual') in float64."""
    tensors = (None if tensor is None else tensor.double() for tensor in (hidden, residual, weight))
    return add_rms_norm(*tensors, eps=eps, implementation="reference")


def computed(implementation, hidden, residual, weight, **options):
    """Return what the op does, on a GPU where the implementation is for one."""
    device = GPU if implementation == "triton" else "cpu"
    tensors = (None if tensor is None else tensor.to(device) for tensor in (hidden, residual, weight))
    return [result.cpu() for result in add_rms_norm(*tensors, **options, implementation=implementation)]


def assert_right(results, want, limit=2e-6):
    for result, expected in zip(results, want, strict=True):
        torch.testing.assert_close(result.double(), expected, rtol=0, atol=limit * float(expected.abs().max()))


@pairs(
    implementation=IMPLEMENTATIONS,
    residual=[True, False],
    shape=[(3, 1), (3, 6), (2, 5, 192), (3, 130), (2, 1, 2, 600), (5000,), (2, 7000)],
)
def test_float32_agrees_with_the_equation(implementation, shape, residual):
    for more in range(4):  # the end of a row at each of the places that a thread has
        tensors = inputs(*shape[:-1], shape[-1] + more, residual=residual)
        normed, total = computed(implementation, *tensors)
        assert normed.dtype == total.dtype == torch.float32
        assert_right((normed, total), equation(*tensors))


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("residual", [True, False], ids=["residual", "none"])
@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_halves_keep_the_residual_in_float32(implementation, residual, dtype):
    tensors = inputs(3, 48, dtype=dtype, residual=residual)
    normed, total = computed(implementation, *tensors)
    assert (normed.dtype, total.dtype) == (dtype, torch.float32)
    want_normed, want_total = equation(*tensors)
    assert_right((normed,), (want_normed,), HALVES[dtype])
    assert_right((total,), (want_total,), 1e-7)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_the_norm_is_in_the_dtype_of_the_weight(implementation):
    hidden, residual, weight = inputs(3, 48)
    tensors = hidden.half(), residual.half(), weight
    normed, total = computed(implementation, *tensors)
    assert normed.dtype == total.dtype == torch.float32
    assert_right((normed, total), equation(*tensors))


@pytest.mark.parametrize("wide", ["hidden", "residual", "both"])
def test_float64_stays_float64(wide):
    hidden, residual, weight = inputs(3, 48, dtype=torch.float64)
    tensors = (
        hidden if wide != "residual" else hidden.float(),
        residual.double() if wide != "hidden" else residual,
        weight,
    )
    normed, total = computed("torch", *tensors)
    assert normed.dtype == total.dtype == torch.float64
    assert_right((normed, total), equation(*tensors), 1e-14)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_eps_counts_where_a_row_is_small(implementation):
    hidden, residual, weight = inputs(3, 48)
    hidden[0], residual[0] = 0, 0
    hidden[1], residual[1] = hidden[1] * 1e-3, residual[1] * 1e-3
    for eps in (1e-5, 1e-2):
        results = computed(implementation, hidden, residual, weight, eps=eps)
        for row in range(3):
            assert_right((results[0][row],), (equation(hidden, residual, weight, eps)[0][row],))
    assert not results[0][0].any()


@pytest.mark.parametrize("implementation", ["native", "triton"])
def test_a_nan_spoils_its_own_row_only(implementation):
    hidden, residual, weight = inputs(3, 40)
    hidden[1, 7] = torch.nan
    normed, total = computed(implementation, hidden, residual, weight)
    assert normed.isnan().any(1).tolist() == [False, True, False]
    assert normed[1].isnan().all()
    assert total.isnan().sum() == 1


@pytest.mark.parametrize("implementation", ["native", "triton"])
def test_without_a_residual_the_sum_is_memory_of_its_own(implementation):
    device = GPU if implementation == "triton" else "cpu"
    hidden, _, weight = (None if each is None else each.to(device) for each in inputs(2, 20, residual=False))
    _, total = add_rms_norm(hidden, None, weight, implementation=implementation)
    assert torch.equal(total, hidden)
    assert total.data_ptr() != hidden.data_ptr()


@pytest.mark.parametrize("residual", [True, False], ids=["residual", "none"])
def test_gradients_are_those_of_finite_differences(residual):
    hidden, stream, weight = inputs(2, 3, dtype=torch.float64, residual=residual)
    tensors = [tensor.double().requires_grad_() for tensor in (hidden, weight, stream) if tensor is not None]

    def op(hidden, weight, *stream):
        return add_rms_norm(hidden, stream[0] if stream else None, weight, implementation="torch")

    assert torch.autograd.gradcheck(op, tensors)


def test_triton_refuses_a_row_that_it_cannot_hold():
    with pytest.raises(Unavailable, match="at most 8192 per row, not 8193"):
        computed("triton", *inputs(1, 8193))
