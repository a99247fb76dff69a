"""What every op keeps to, whatever it computes: strides, empty batches, dtypes, gradients, compilers and refusals."""

import re
from functools import partial
from importlib.util import find_spec

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from benchd.kernels.add_rms_norm import add_rms_norm
from benchd.kernels.causal_conv1d import causal_conv1d, causal_conv1d_pair
from benchd.kernels.dispatch import Unavailable
from benchd.kernels.lif import lif, lif_pool
from benchd.kernels.selective_scan import bidirectional_scan, delta_projection, selective_scan, selective_scan_pair
from benchd.kernels.spike_conv2d import spike_conv2d
from benchd.kernels.stbif import max_pool_delta, stbif, stbif_block

GPU = "cuda" if torch.cuda.is_available() else "cpu"
LIMITS = {torch.float16: 4e-3, torch.bfloat16: 3e-2, torch.float64: 1e-9}
BATCH, ABSENT = 7, 0  # no other dimension is 7

LIF = {"decay": 0.95, "gain": 1.7, "threshold": 0.83}
STBIF = {"pos_max": 3, "neg_min": -1, "output": "values"}
OPTIONS = {
    lif: LIF,
    lif_pool: LIF | {"reset": "subtract"},
    stbif: STBIF,
    stbif_block: STBIF,
    max_pool_delta: {"kernel_size": 3, "stride": 2, "padding": 1},
    selective_scan: {"delta_softplus": True, "reverse": True},
    selective_scan_pair: {"delta_softplus": True},
    delta_projection: {},
    bidirectional_scan: {},
    causal_conv1d: {"reverse": True},
    causal_conv1d_pair: {},
    add_rms_norm: {"eps": 1e-3},
    spike_conv2d: {"stride": 2, "padding": 1},
}
# by letters: time, batch, channels, length, height, width, states, rank and taps
SHAPES = {
    lif: {"current": "tbchw"},
    lif_pool: {"current": "tbchw", "bias": "c"},
    stbif: {"current": "tbchw", "threshold": ""},
    stbif_block: {"current": "tbchw", "threshold": "", "bias": "tc", "residual": "tbchw"},
    max_pool_delta: {"values": "tbchw"},
    selective_scan: {
        "u": "blc", "delta": "blc", "A": "cn", "B": "bln", "C": "bln", "D": "c", "z": "blc", "delta_bias": "c"
    },
    selective_scan_pair: {
        "u": "2blc", "delta": "2blc", "A": "2cn", "B": "2bln", "C": "2bln", "D": "2c", "delta_bias": "2c"
    },
    delta_projection: {"low": "2blr", "weight": "2cr", "bias": "2c"},
    bidirectional_scan: {
        "u": "2blc", "low": "2blr", "weight": "2cr", "bias": "2c", "A": "2cn", "B": "2bln", "C": "2bln", "D": "2c",
        "z": "blc",
    },
    causal_conv1d: {"x": "blc", "weight": "ck", "bias": "c"},
    causal_conv1d_pair: {"x": "blc", "weight": "2ck", "bias": "2c"},
    add_rms_norm: {"hidden": "blc", "residual": "blc", "weight": "c"},
    spike_conv2d: {"x": "bchw", "weight": "ocij", "bias": "o"},
}  # fmt: skip
LEARNING = {stbif, stbif_block, max_pool_delta}  # in C and in Triton too
IMPLEMENTATIONS = ("torch", "native", *["triton"] * bool(find_spec("triton")))
KERNELS = IMPLEMENTATIONS[1:]
# C and Triton are kernels of one declared op: without a GPU the interpreter adds nothing to what torch sees of it
DECLARED = KERNELS if GPU == "cuda" else ("native",)


def over(*implementations):
    """Parametrize by an op and one of the implementations that it has."""
    there = [(op, name) for op in OPTIONS for name in implementations if (op, name) != (spike_conv2d, "triton")]
    ids = [f"{op.__name__} {name}" for op, name in there]
    return pytest.mark.parametrize(("op", "implementation"), there, ids=ids)


def tensors_of(op, batch=2, channels=5, length=9):
    """Return the tensors of a call by name."""
    sizes = {"t": 3, "b": batch, "c": channels, "l": length, "h": length - 3, "w": length - 1, "n": 4, "r": 3, "k": 4}
    sizes |= {"o": 4, "i": 3, "j": 3, "2": 2}
    generator = torch.Generator().manual_seed(1)
    drawn = {
        name: torch.randn([sizes[letter] for letter in letters], generator=generator)
        for name, letters in SHAPES[op].items()
    }
    makers = {"A": lambda A: -1 - A.square(), "threshold": lambda _: torch.tensor(0.73)}
    return {name: makers.get(name, lambda tensor: tensor)(tensor) for name, tensor in drawn.items()}


def computed(op, implementation, tensors):
    """Return the results on the device that the implementation is for."""
    device = GPU if implementation == "triton" else "cpu"
    if op is spike_conv2d and implementation == "reference":
        implementation = "torch"  # conv2d is its equation
    results = op(**{name: t.to(device) for name, t in tensors.items()}, **OPTIONS[op], implementation=implementation)
    return results if isinstance(results, tuple) else (results,)


def assert_alike(results, wanted, limit):
    for result, want in zip(results, wanted, strict=True):
        largest = float(want.abs().max()) if want.numel() else 0.0
        torch.testing.assert_close(result.cpu().double(), want.cpu().double(), rtol=0, atol=limit * largest)


def in_dtype(tensors, dtype):
    return {name: tensor.to(dtype) for name, tensor in tensors.items()}


@over(*IMPLEMENTATIONS)
def test_strides_change_neither_the_result_nor_the_input(op, implementation):
    tensors = tensors_of(op)
    want = computed(op, "reference", tensors)
    gaps = {name: torch.stack((tensor, tensor + 1), -1)[..., 0] for name, tensor in tensors.items()}
    swapped = {name: tensor.mT.contiguous().mT if tensor.dim() > 1 else tensor for name, tensor in tensors.items()}
    for strided in (gaps, swapped):
        assert_alike(computed(op, implementation, strided), want, 4e-6)
        assert all(torch.equal(strided[name], tensors[name]) for name in tensors)


@over(*IMPLEMENTATIONS)
def test_an_empty_batch_gives_an_empty_result(op, implementation):
    full = computed(op, "torch", tensors_of(op, BATCH))
    for result, like in zip(computed(op, implementation, tensors_of(op, ABSENT)), full, strict=True):
        assert list(result.shape) == [ABSENT if size == BATCH else size for size in like.shape]
        assert result.dtype == like.dtype


@pytest.mark.parametrize("dtype", LIMITS, ids=str)
@over(*IMPLEMENTATIONS)
def test_the_result_is_the_reference_s_in_the_dtype_of_the_input(op, implementation, dtype):
    tensors = in_dtype(tensors_of(op), dtype)
    refuses = KERNELS if op not in {lif, lif_pool} else KERNELS[1:]
    if dtype == torch.float64 and op not in LEARNING and implementation in refuses:
        with pytest.raises(Unavailable, match=rf"{op.__name__}: .* computes in float32; use implementation='torch'"):
            computed(op, implementation, tensors)
        return
    results, wanted = (computed(op, name, tensors) for name in (implementation, "reference"))
    assert [result.dtype for result in results] == [want.dtype for want in wanted]
    assert results[0].dtype == dtype
    assert_alike(results, wanted, LIMITS[dtype])


@over(*IMPLEMENTATIONS)
def test_a_gradient_is_right_or_refused(op, implementation):
    tensors = tensors_of(op)
    if implementation in KERNELS and op not in LEARNING:
        for name in tensors:
            learning = tensors | {name: tensors[name].clone().requires_grad_()}
            words = rf"{op.__name__}: the (native|Triton) kernel has no gradient; use implementation='torch', or torch"
            with pytest.raises(Unavailable, match=words):
                computed(op, implementation, learning)
        with torch.no_grad():
            computed(op, implementation, learning)
        return
    got, want = (gradients(op, name, in_dtype(tensors, dtype)) for name, dtype in
                 ((implementation, torch.float32), ("torch", torch.float64)))  # fmt: skip
    assert all(gradient.any() for gradient in want)
    assert_alike(got, want, 2e-5)


def gradients(op, implementation, tensors):
    """Return those of all tensors."""
    leaves = {name: tensor.clone().requires_grad_() for name, tensor in tensors.items()}
    results = [result for result in computed(op, implementation, leaves) if result.requires_grad]
    generator = torch.Generator().manual_seed(2)
    sums = [(result * torch.randn(result.shape, generator=generator).to(result)).sum() for result in results]
    return torch.autograd.grad(sum(sums), list(leaves.values()))


class Module(torch.nn.Module):
    def __init__(self, op, implementation):
        super().__init__()
        self.computed = partial(computed, op, implementation)

    def forward(self, **tensors):
        return self.computed(tensors)


@over(*DECLARED)  # those of torch are traced with the models
def test_a_compiler_and_an_exporter_trace_it_whole(op, implementation):
    module, tensors = Module(op, implementation), tensors_of(op)
    want = module(**tensors)
    torch._dynamo.reset()  # all of these share a forward, which is compiled eight times at most
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    assert_alike(compiled(**tensors), want, 2e-6)
    exported = torch.export.export(module, (), tensors, strict=False).module()
    assert_alike(exported(**tensors), want, 2e-6)


class Called(TorchDispatchMode):
    """The ops of ours that are called, with their arguments."""

    def __init__(self):
        super().__init__()
        self.calls = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "benchd":
            self.calls.append((func, args))
        return func(*args, **(kwargs or {}))


@pytest.mark.filterwarnings("ignore:The .grad attribute")  # opcheck reads it of its own copies
@over(*DECLARED)
def test_its_ops_are_registered_as_torch_wants(op, implementation):
    tensors = tensors_of(op, 1, 2, 5)
    last = {name: channels_last(tensor) for name, tensor in in_dtype(tensors, torch.float16).items()}
    shapes = {"test_utils": ("test_schema", "test_faketensor")}  # what strides and types can change
    for given, some in ((tensors, {}), (last, shapes)):
        with Called() as called:
            if op in LEARNING:
                gradients(op, implementation, given)
            else:
                computed(op, implementation, given)
        assert called.calls
        for func, args in called.calls:
            detached = [each.detach() if isinstance(each, torch.Tensor) else each for each in args]
            torch.library.opcheck(func, detached, **some)
    if op in LEARNING:
        func, args = called.calls[0]
        leaves = [each.detach().float().requires_grad_() if isinstance(each, torch.Tensor) else each for each in args]
        torch.library.opcheck(func, leaves)


def channels_last(tensor):
    """Return pictures (T, B, C, H, W) with the channels innermost in memory, anything else as it is."""
    if tensor.dim() != 5:
        return tensor
    return tensor.flatten(0, 1).to(memory_format=torch.channels_last).unflatten(0, tensor.shape[:2])


@over("native")
def test_the_number_of_threads_changes_no_bit(op, implementation):
    before, results = torch.get_num_threads(), []
    for count in (1, 2):
        torch.set_num_threads(count)
        results.append(computed(op, implementation, tensors_of(op, 3, 70)))
    torch.set_num_threads(before)
    assert all(map(torch.equal, *results))


@over(*KERNELS)
def test_a_kernel_says_where_it_runs(op, implementation):
    tensors = {name: tensor.to("meta") for name, tensor in tensors_of(op).items()}
    reasons = {
        "native": "the native kernel is for CPU tensors, not meta",
        "triton": "the Triton kernel cannot run on meta: it is for CUDA tensors",
    }
    name = "stbif" if op is stbif_block else op.__name__
    with pytest.raises(Unavailable, match=f"{name}: {reasons[implementation]}"):
        op(**tensors, **OPTIONS[op], implementation=implementation)


@over("torch")
def test_what_is_no_argument_is_refused(op, implementation):
    tensors = tensors_of(op)
    with pytest.raises(ValueError, match="unknown implementation 'fast'; choose one of torch, triton, native, auto"):
        computed(op, "fast", tensors)
    first, *others = (name for name in tensors if name != "threshold")
    others = [] if op is stbif_block else others  # bias and residual are converted
    for name in (first, *others):
        with pytest.raises(TypeError, match=r"floating point, not torch\.int64"):
            computed(op, implementation, tensors | {name: tensors[name].long()})
    for name in others:
        with pytest.raises(ValueError, match=f"{name} must be on cpu as {first} is, not on meta"):
            op(**tensors | {name: tensors[name].to("meta")}, **OPTIONS[op], implementation=implementation)


REFUSED = [
    (add_rms_norm, {"hidden": ()}, "hidden must be (..., dim), dim at least 1, not ()"),
    (add_rms_norm, {"hidden": (2, 0)}, "hidden must be (..., dim), dim at least 1, not (2, 0)"),
    (add_rms_norm, {"residual": (3,)}, "residual must be (2, 9, 5), not (3,)"),
    (add_rms_norm, {"weight": (4,)}, "weight must be (5,), not (4,)"),
    (causal_conv1d, {"x": (2, 3)}, "x must be (batch, length, channels), not (2, 3)"),
    (causal_conv1d, {"weight": (5, 1, 4)}, "weight must be (5, width), not (5, 1, 4)"),
    (causal_conv1d, {"weight": (4, 4)}, "weight must be (5, width), not (4, 4)"),
    (causal_conv1d, {"bias": (4,)}, "bias must be (5,), not (4,)"),
    (causal_conv1d, {"activation": "relu"}, "activation must be 'silu' or None, not 'relu'"),
    (causal_conv1d_pair, {"x": (2, 3)}, "x must be (batch, length, channels), not (2, 3)"),
    (causal_conv1d_pair, {"weight": (5, 4)}, "weight must be (2, 5, width), not (5, 4)"),
    (causal_conv1d_pair, {"weight": (2, 5, 0)}, "weight must be (2, 5, width), not (2, 5, 0)"),
    (causal_conv1d_pair, {"bias": (3,)}, "bias must be (2, 5), not (3,)"),
    (causal_conv1d_pair, {"activation": "relu"}, "activation must be 'silu' or None, not 'relu'"),
    (lif, {"current": ()}, "(T, ...) with T at least 1"),
    (lif, {"current": (0, 3)}, "not (0, 3)"),
    (lif, {"reset": "hard"}, "'zero' or 'subtract', not 'hard'"),
    (lif_pool, {"current": (2, 3, 4, 4)}, "(T, B, C, H, W), H and W at least 2"),
    (lif_pool, {"current": (2, 1, 1, 1, 4)}, "(T, B, C, H, W), H and W at least 2"),
    (lif_pool, {"bias": (1,)}, "bias must be (5,), not (1,)"),
    (lif_pool, {"bias": (5, 1)}, "bias must be (5,), not (5, 1)"),
    (lif_pool, {"output": "sum"}, "'mean' or 'counts', not 'sum'"),
    (stbif, {"current": ()}, "(T, ...) with T at least 1"),
    (stbif, {"current": (0, 3)}, "not (0, 3)"),
    (stbif, {"threshold": 0.0}, "positive, not 0.0"),
    (stbif, {"threshold": (2,)}, "one element, not shape (2,)"),
    (stbif, {"pos_max": 0, "neg_min": 0}, "neg_min <= 0 < pos_max, not 0 and 0"),
    (stbif, {"neg_min": 1}, "neg_min <= 0 < pos_max, not 1 and 3"),
    (stbif, {"output": "spikes"}, "'codes' or 'values', not 'spikes'"),
    (stbif_block, {"bias": (2, 4)}, "bias must be (T, C), not (2, 4)"),
    (stbif_block, {"current": (3, 1), "bias": (3,)}, "bias must be (T, C), not (3,)"),
    (stbif_block, {"residual": (2, 1, 3, 2)}, "residual must be (3, 2, 5, 6, 8)"),
    (max_pool_delta, {"values": (2, 3, 4, 4)}, "(T, B, C, H, W)"),
    (max_pool_delta, {"padding": 2}, "padding <= kernel_size/2"),
    (max_pool_delta, {"stride": 0}, "stride >= 1"),
    (max_pool_delta, {"values": (2, 1, 3, 1, 4), "kernel_size": 2, "padding": 0}, "no window of 2 fits into (1, 4)"),
    (selective_scan, {"u": (2, 3)}, "u must be (batch, length, channels), not (2, 3)"),
    (selective_scan, {"delta": (1, 2, 4)}, "delta must be (2, 9, 5), not (1, 2, 4)"),
    (selective_scan, {"A": (4, 4)}, "A must be (5, state), not (4, 4)"),
    (selective_scan, {"B": (2, 9, 5)}, "B must be (2, 9, 4), not (2, 9, 5)"),
    (selective_scan, {"C": (2, 4)}, "C must be (2, 9, 4), not (2, 4)"),
    (selective_scan, {"D": (4,)}, "D must be (5,), not (4,)"),
    (selective_scan, {"z": (1, 1, 3)}, "z must be (2, 9, 5)"),
    (selective_scan, {"delta_bias": (1,)}, "delta_bias must be (5,)"),
    (selective_scan_pair, {"u": (2, 9, 5)}, "u must be (2, batch, length, channels), not (2, 9, 5)"),
    (selective_scan_pair, {"D": (5,)}, "D must be (2, 5), not (5,)"),
    (bidirectional_scan, {"u": (1, 2, 9, 5)}, "u must be (2, batch, length, channels), not (1, 2, 9, 5)"),
    (bidirectional_scan, {"low": (2, 2, 3, 2)}, "low must be (2, 2, 9, 2), not (2, 2, 3, 2)"),
    (bidirectional_scan, {"weight": (2, 5, 4)}, "weight must be (2, 5, 3), not (2, 5, 4)"),
    (bidirectional_scan, {"bias": (5,)}, "bias must be (2, 5), not (5,)"),
    (bidirectional_scan, {"A": (5, 4)}, "A must be (2, 5, state), not (5, 4)"),
    (bidirectional_scan, {"z": (2, 2, 9, 5)}, "z must be (2, 9, 5), not (2, 2, 9, 5)"),
    (bidirectional_scan, {"low": (2, 2, 9, 0)}, "rank of at least 1), not (2, 2, 9, 0)"),
    (delta_projection, {"low": (2, 9, 3)}, "low must be (2, batch, length, rank of at least 1), not (2, 9, 3)"),
    (delta_projection, {"low": (2, 2, 9, 0)}, "rank of at least 1), not (2, 2, 9, 0)"),
    (delta_projection, {"weight": (2, 5, 1)}, "weight must be (2, channels, 3), not (2, 5, 1)"),
    (delta_projection, {"bias": (5,)}, "bias must be (2, 5), not (5,)"),
    (spike_conv2d, {"x": (5, 6, 8)}, "x must be (N, C, H, W)"),
    (spike_conv2d, {"x": (2, 0, 6, 8), "weight": (4, 0, 3, 3)}, "with nonempty images"),
    (spike_conv2d, {"weight": (4, 1, 3, 3)}, "weight must be (O, 5, kh, kw), not (4, 1, 3, 3)"),
    (spike_conv2d, {"bias": (3,)}, "bias must be (4,), not (3,)"),
    (spike_conv2d, {"stride": 0}, "stride >= 1 and padding >= 0, not 0 and 1"),
    (spike_conv2d, {"padding": -1}, "stride >= 1 and padding >= 0, not 2 and -1"),
    (spike_conv2d, {"x": (2, 5, 6, 2), "padding": 0}, "a window (3, 3) does not fit in (6, 2)"),
    (spike_conv2d, {"packed": (7,)}, "packed must be pack(weight)"),
    (spike_conv2d, {"packed": torch.zeros(720).half()}, "packed must be pack(weight)"),
]


@pytest.mark.parametrize(("op", "changes", "words"), REFUSED)
def test_a_wrong_argument_is_named_with_what_was_expected(op, changes, words):
    arguments = tensors_of(op) | OPTIONS[op]
    arguments |= {name: torch.zeros(each) if isinstance(each, tuple) else each for name, each in changes.items()}
    with pytest.raises(ValueError, match=re.escape(words)):
        op(**arguments, implementation="torch")


def test_who_has_no_such_kernel_says_what_to_use():
    with pytest.raises(Unavailable, match="no 'triton' implementation: on a GPU use implementation='torch'"):
        spike_conv2d(**tensors_of(spike_conv2d), implementation="triton")
    for op in (selective_scan, selective_scan_pair, bidirectional_scan):
        with pytest.raises(ValueError, match="form must be 'serial' or 'two_level', not 'parallel'"):
            op(**tensors_of(op), form="parallel")
