"""What every op keeps to, whatever it computes: strides, empty batches, dtypes, gradients, compilers and refusals."""

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
WITHOUT_GRADIENT = {lif, lif_pool, *LEARNING}  # as "reference"
IMPLEMENTATIONS = ("reference", "torch", "native", *["triton"] * bool(find_spec("triton")))
KERNELS = IMPLEMENTATIONS[2:]
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
    made = {"A": lambda A: -1 - A.square(), "threshold": lambda _: torch.tensor(0.73)}
    return {name: made.get(name, lambda tensor: tensor)(tensor) for name, tensor in drawn.items()}


def computed(op, implementation, tensors):
    """Return the results on the device that the implementation is for."""
    device = GPU if implementation == "triton" else "cpu"
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
@over(*IMPLEMENTATIONS[1:])
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
    if implementation == "reference" and op in WITHOUT_GRADIENT:
        assert got is None
    else:
        assert all(gradient.any() for gradient in want)
        assert_alike(got, want, 2e-5)


def gradients(op, implementation, tensors):
    """Return those of all tensors, None if the results have none."""
    leaves = {name: tensor.clone().requires_grad_() for name, tensor in tensors.items()}
    results = [result for result in computed(op, implementation, leaves) if result.requires_grad]
    generator = torch.Generator().manual_seed(2)
    sums = [(result * torch.randn(result.shape, generator=generator).to(result)).sum() for result in results]
    return torch.autograd.grad(sum(sums), list(leaves.values())) if sums else None


class Module(torch.nn.Module):
    def __init__(self, op, implementation):
        super().__init__()
        self.computed = partial(computed, op, implementation)

    def forward(self, **tensors):
        return self.computed(tensors)


@over("torch", *DECLARED)
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
    with pytest.raises(ValueError, match="unknown implementation 'fast'; choose one of reference, torch, triton, nat"):
        computed(op, "fast", tensors)
    first = next(iter(tensors))
    with pytest.raises(TypeError, match=r"floating point, not torch\.int64"):
        computed(op, implementation, tensors | {first: tensors[first].long()})
