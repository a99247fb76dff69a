"""The fused parts of a Vim layer against what they are made of in float64, in the interpreter where there is no GPU."""

import pytest
import torch

from benchd.kernels import vim_layer
from benchd.kernels.dispatch import Unavailable
from benchd.kernels.vim_layer import in_conv, out_norm, steps

launch = pytest.importorskip("benchd.kernels.launch", reason="needs triton")

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
LIMITS = {torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
# batch, tokens, dim and channels; tokens around a tile's edges, dims and channels that are no multiple of a tile
SHAPES = [(2, 27, 24, 40), (1, 52, 192, 70), (1, 1, 70, 64), (1, 26, 64, 130)]


def normal(*shape, dtype, seed):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator).to(DEVICE, dtype)


def arguments(op, shape, dtype, states=5, rank=3):
    batch, length, dim, inner = shape
    if op is in_conv:
        return {
            "normed": normal(batch, length, dim, dtype=dtype, seed=1),
            "weight": normal(2 * inner, dim, dtype=dtype, seed=2) * dim**-0.5,
            "taps": normal(2, inner, 4, dtype=dtype, seed=3) / 2,
            "shift": normal(2, inner, dtype=dtype, seed=4),
        }
    if op is steps:
        columns = 2 * states + rank + 2
        weight = normal(2, inner, columns, dtype=dtype, seed=2) * inner**-0.5
        weight[..., -2:] = torch.nan  # columns beyond are not read
        return {
            "u": normal(2, batch, length, inner, dtype=dtype, seed=1),
            "weight": weight,
            "dt_weight": normal(2, inner, rank, dtype=dtype, seed=3),
            "dt_bias": normal(2, inner, dtype=dtype, seed=4) - 3,
            "states": states,
        }
    return {
        "y": normal(2, batch, length, inner, dtype=dtype, seed=1),
        "z": normal(batch, length, inner, dtype=dtype, seed=2),
        "weight": normal(dim, inner, dtype=dtype, seed=3) * inner**-0.5,
        "residual": normal(batch, length, dim, dtype=torch.float32, seed=4),
        "norm": normal(dim, dtype=dtype, seed=5),
    }


def wide(given):
    return {name: each.double() if isinstance(each, torch.Tensor) else each for name, each in given.items()}


def assert_agree(op, given, limit):
    results, wanted = op(**given, implementation="triton"), op(**wide(given), implementation="torch")
    for result, want in zip(results, wanted, strict=True):
        assert result.shape == want.shape
        error = (result.double() - want).abs().max() / want.abs().max()
        assert float(error) < limit


OPS = pytest.mark.parametrize("op", [in_conv, steps, out_norm])


@OPS
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", LIMITS, ids=str)
def test_triton_halves_agree_with_the_equation(op, shape, dtype):
    if dtype == torch.bfloat16 and launch.architecture(torch.device(DEVICE)) < 80:
        pytest.skip("neither Triton's interpreter nor an sm_75 multiplies bfloat16")
    assert_agree(op, arguments(op, shape, dtype), LIMITS[dtype])


@OPS
def test_triton_agrees_with_vim_s_states_and_rank_and_a_tile_of_many_rows(op, monkeypatch):
    monkeypatch.setattr("benchd.kernels.vim_layer.triton_impl._MANY", 33)
    assert_agree(op, arguments(op, (1, 37, 96, 64), torch.float16, 16, 12), LIMITS[torch.float16])


def test_triton_gated_tokens_may_lie_anywhere():
    """Such as the class token alone, which each direction reaches elsewhere."""
    given = arguments(out_norm, (2, 9, 24, 40), torch.float16)
    y, z, residual = given["y"], given["z"], given["residual"]
    both = y.as_strided((2, 2, 1, 40), (y.stride(0) - 3 * 40, *y.stride()[1:]), 3 * 40)
    assert torch.equal(both[0], y[0, :, 3:4])
    assert torch.equal(both[1], y[1, :, 0:1])
    alone = given | {"y": both, "z": z[:, 3:4], "residual": residual[:, 3:4]}
    assert_agree(out_norm, alone, LIMITS[torch.float16])


@OPS
def test_it_is_an_op_that_torch_takes(op):
    given = arguments(op, SHAPES[0], torch.float16)
    ops = {in_conv: "in_conv_op", steps: "steps_op", out_norm: "out_norm_op"}
    values = [*given.values(), *([1e-5] if op is out_norm else [])]
    torch.library.opcheck(getattr(vim_layer.ops, ops[op])["triton"], values)


@OPS
def test_what_no_kernel_takes_is_refused_with_what_to_use(op):
    given = arguments(op, SHAPES[0], torch.float16)
    with pytest.raises(Unavailable, match=r"supports float16 or bfloat16, not torch\.float32"):
        op(**{name: each.float() if isinstance(each, torch.Tensor) else each for name, each in given.items()},
           implementation="triton")  # fmt: skip
    with pytest.raises(Unavailable, match="no 'native' implementation"):
        op(**given, implementation="native")
    first = next(iter(given))
    with pytest.raises(TypeError, match="floating point"):
        op(**given | {first: given[first].long()}, implementation="torch")


@pytest.mark.parametrize(
    ("op", "changes", "words"),
    [
        (in_conv, {"taps": (2, 40, 3)}, r"taps must be \(2, 40, 4\), not \(2, 40, 3\)"),
        (in_conv, {"weight": (80, 23)}, r"weight must be \(80, 24\)"),
        (steps, {"weight": (2, 40, 12)}, "weight must have 13 columns or more, not 12"),
        (steps, {"dt_bias": (40,)}, r"dt_bias must be \(2, 40\)"),
        (out_norm, {"y": (1, 2, 27, 40)}, r"y must be \(2, 2, 27, 40\)"),
        (out_norm, {"residual": (2, 27, 23)}, r"residual must be \(2, 27, 24\)"),
    ],
)
def test_a_wrong_shape_is_named(op, changes, words):
    given = arguments(op, SHAPES[0], torch.float32) | {name: torch.zeros(shape) for name, shape in changes.items()}
    with pytest.raises(ValueError, match=words):
        op(**given, implementation="torch")


def test_a_token_too_long_for_a_tile_is_refused():
    given = arguments(out_norm, (1, 1, 1025, 2), torch.float16)
    with pytest.raises(Unavailable, match="at most 1024 numbers per token, not 1025"):
        out_norm(**given, implementation="triton")
