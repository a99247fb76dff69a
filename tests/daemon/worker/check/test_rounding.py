"""Rounding at random: the numbers that a format holds, and what modules do with views and in place."""

import pytest
import torch

from benchd.daemon.worker.check.agreement import HOLDS
from benchd.daemon.worker.check.rounding import Rounding

CPU = torch.device("cpu")


def rounding(number_format="fp16", **fields):
    return Rounding(*HOLDS[number_format], 0, CPU, **fields)


@pytest.mark.parametrize(("number_format", "dtype"), [("fp16", torch.float16), ("bf16", torch.bfloat16)])
def test_each_number_becomes_one_of_the_two_nearest_that_the_format_holds(number_format, dtype):
    exact = torch.randn(1000, dtype=torch.float64) * torch.logspace(-9, 3, 1000, dtype=torch.float64)
    rounded = rounding(number_format).rounded(exact)
    torch.testing.assert_close(rounded.to(dtype).double(), rounded, rtol=0, atol=0)
    nearest = exact.to(dtype).double()
    assert ((rounded - exact).abs() <= exact.abs() * 2.0 ** (1 - HOLDS[number_format][0]) + 2.0**-24).all()
    assert 0.2 < (rounded == nearest).double().mean() < 0.9
    assert (rounding(number_format).rounded(nearest) == nearest).all()


def test_what_a_channel_of_a_softmax_holds_below_the_smallest_step_of_fp16_becomes_one_or_none():
    rounded = rounding().rounded(torch.full((10_000,), 1e-8, dtype=torch.float64))
    assert set(rounded.tolist()) == {0.0, 2.0**-24}
    assert rounded.mean().item() == pytest.approx(1e-8, rel=0.1)


def test_numbers_of_int8_are_as_far_apart_as_the_largest_ones():
    exact = torch.tensor([0.0, 1e-3, 0.3, 1.0], dtype=torch.float64)
    rounded = rounding("int8", floating=False).rounded(exact)
    assert (rounded * 128 == (rounded * 128).round()).all()


def test_a_sigmoid_of_float32_is_off_by_an_absolute_step():
    with rounding("fp32"):
        values = torch.sigmoid(torch.full((1000,), -16.0, dtype=torch.float64))
    assert set(values.tolist()) == {0.0, 2.0**-22}


def test_whole_numbers_views_and_operations_in_place_keep_their_meaning():
    with rounding(), torch.inference_mode():
        state = torch.zeros(4, dtype=torch.float64)
        half = state[:2].expand(3, 2)
        state += 1 / 3
        assert (half == state[:2]).all()
        assert 0 < (state - 1 / 3).abs().max() < 2**-11
        places = torch.tensor([3.0, 1.0], dtype=torch.float64).to(torch.int64)
    assert places.tolist() == [3, 1]
