"""Counts the work of a module without a formula: the products that it executes, and the bytes that it must move."""

from collections.abc import Callable
from math import prod
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry, sdpa_flop_count

from benchd.daemon.records import WorkCount
from benchd.daemon.worker.structures import Batch, tensors, values

_ATEN = torch.ops.aten


def _pair(left: Tensor, right: Tensor, *_: Any) -> int:
    """Return the operations of `mv`, `dot` and integer products."""
    return 2 * left.numel() * (right.shape[-1] if right.dim() > 1 else 1)


def _added_pair(_: Tensor, left: Tensor, right: Tensor, *others: Any) -> int:
    return _pair(left, right, *others)


def _attention(query: Tensor, key: Tensor, value: Tensor, *_: Any) -> int:
    return int(sdpa_flop_count(query.shape, key.shape, value.shape))


def _recurrent(steps: Tensor, into: Tensor, again: Tensor, *_: Any) -> int:
    """Return the operations of one layer and direction of an LSTM; `steps` is (T, B, features)."""
    return 2 * prod(steps.shape[:2]) * (into.numel() + again.numel())


def _distances(left: Tensor, right: Tensor, *_: Any) -> int:
    return 2 * left.numel() * right.shape[-2]


# operations that torch's own counter lacks on a CPU
_MORE: dict[str, Callable[..., int]] = {
    "aten::_scaled_dot_product_flash_attention_for_cpu": _attention,
    "aten::mv": _pair,
    "aten::dot": _pair,
    "aten::_int_mm": _pair,
    "aten::addmv": _added_pair,
    "aten::mkldnn_rnn_layer": _recurrent,
    "aten::_cdist_forward": _distances,
}
# operations without products that are neither pointwise nor views
_NO_PRODUCTS_NAMES = """
_adaptive_avg_pool2d _adaptive_avg_pool3d _embedding_bag _fused_rms_norm _local_scalar_dense _log_softmax
_native_batch_norm_legit _native_batch_norm_legit_no_training _pack_padded_sequence _pad_packed_sequence _safe_softmax
_softmax _to_copy _unique2 _unsafe_index _unsafe_index_put _unsafe_view _upsample_bilinear2d_aa _weight_norm_interface
adaptive_max_pool1d adaptive_max_pool2d adaptive_max_pool3d all amax amin aminmax any arange argmax argmin argsort
as_strided as_strided_copy avg_pool1d avg_pool2d avg_pool3d bernoulli bincount cat cauchy channel_shuffle clone col2im
constant_pad_nd contiguous copy count_nonzero cumprod cumsum diag_embed embedding empty empty_like empty_strided
exponential eye fill fill_diagonal flip floor_divide full full_like gather geometric glu grid_sampler_2d
grid_sampler_3d hardsigmoid hardswish im2col index index_add index_copy index_put index_select isin item kthvalue
lift_fresh lift_fresh_copy linspace log_normal logsumexp masked_fill masked_scatter masked_select max
max_pool2d_with_indices max_pool3d_with_indices mean median min mode multinomial native_batch_norm native_dropout
native_group_norm native_layer_norm new_empty new_empty_strided new_full new_ones new_zeros nms nonzero norm normal
one_hot ones ones_like pixel_shuffle pixel_unshuffle prod rand rand_like randint randn randn_like random randperm
reflection_pad1d reflection_pad2d repeat repeat_interleave replication_pad1d replication_pad2d resize roll rot90 rsub
scalar_tensor scatter scatter_add scatter_reduce searchsorted slice_scatter sort stack std std_mean sum topk tril triu
unfold_copy uniform unique_consecutive unique_dim unsafe_chunk unsafe_split unsafe_split_with_sizes upsample_bicubic2d
upsample_bilinear2d upsample_linear1d upsample_nearest1d upsample_nearest2d upsample_trilinear3d var var_mean zero
zeros zeros_like
"""
_NO_PRODUCTS = frozenset(_NO_PRODUCTS_NAMES.split())


class _Counter(TorchDispatchMode):
    """Adds up the products of each operation, using torch's formulas and `_MORE`, and lists operations without one."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.matrix_flops, self.convolved_flops = 0, 0
        self.uncounted: dict[str, None] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the operation and count it."""
        out = func(*args, **(kwargs or {}))
        operation = _out_of_place(func)
        packet, name = operation._overloadpacket, operation._schema.name
        if packet in flop_registry:
            flops = int(flop_registry[packet](*args, **(kwargs or {}), out_val=out))
            self.matrix_flops += flops
            self.convolved_flops += flops if packet == _ATEN.convolution else 0
        elif name in _MORE:
            self.matrix_flops += _MORE[name](*args)
        elif not (func.is_view or torch.Tag.pointwise in operation.tags or _plain(name) in _NO_PRODUCTS):
            self.uncounted[name.removeprefix("aten::")] = None
        return out


def _out_of_place(func: Any) -> Any:
    """Return the operation whose result an in-place one writes, or the operation itself; their arguments are equal."""
    namespace, _, name = func._schema.name.partition("::")
    packet = getattr(getattr(torch.ops, namespace), name[:-1], None) if name.endswith("_") else None
    return getattr(packet, func._overloadname, func)


def _plain(name: str) -> str:
    """Return an operation's name without the namespace and the suffix of the in-place form."""
    return name.rpartition("::")[2].rstrip("_")


def count(module: nn.Module, example: Batch) -> WorkCount:
    """Return the work of one run of `module` on `example`, both on the CPU in float32.

    For a module that cannot run in this way, only bytes are counted, and its error is in `uncounted`.
    """
    if own := getattr(module, "count", None):  # an ONNX file's work is counted from the file
        return cast(WorkCount, own(values(example)))
    counter, fast = _Counter(), torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)  # there are no formulas for the fused layers
    output_bytes = 0
    try:
        with torch.no_grad(), counter:
            output = module(*values(example))
        output_bytes = sum(value.nbytes for value in tensors(output).values())
    except Exception as error:  # the mode may break anything in the user's code; only the count is lost
        counter.uncounted[f"after {type(error).__name__}"] = None
    finally:
        torch.backends.mha.set_fastpath_enabled(fast)
    parameters_bytes = sum(parameter.nbytes for parameter in module.parameters())
    return WorkCount(
        matrix_flops=counter.matrix_flops,
        bytes=parameters_bytes + sum(value.nbytes for value in values(example)) + output_bytes,
        parameters_bytes=parameters_bytes,
        is_convolved=2 * counter.convolved_flops > counter.matrix_flops,
        uncounted=list(counter.uncounted),
    )
