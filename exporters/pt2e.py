"""Post-training quantisation in torch with torchao: an exported graph whose products Inductor runs in int8 on x86.

Weights are symmetric per output channel; activations have one scale and zero point per tensor, from torchao's
histograms of the calibration images. The first and last layers stay in float32, as in a quantised file.
"""

import copy
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.fx import GraphModule, Node
from torch.utils import _pytree as pytree
from torchao.quantization.pt2e.observer import ObserverBase
from torchao.quantization.pt2e.quantize_pt2e import convert_pt2e, prepare_pt2e
from torchao.quantization.pt2e.quantizer import x86_inductor_quantizer as x86

from benchd.exporters import files
from benchd.exporters.calibrated import CannotQuantise, Quantised, agreement

_PRODUCTS = ("linear", "matmul", "mm", "bmm", "addmm", "baddbmm", "einsum", "scaled_dot_product_attention")
_COMPARED_IMAGES = 64


class PreparedModule:
    """A module exported for inputs of these shapes, with observers around the products to quantise.

    `layers` lists these products, and `left_fp32` the others with the reason. Raises CannotQuantise if the module
    cannot be exported or has nothing to quantise.
    """

    def __init__(self, module: nn.Module, inputs: Sequence[Tensor]) -> None:
        self._module = module
        self._graph, self.left_fp32 = _prepared(module, tuple(inputs))
        products = list(_products(self._graph))
        self.layers = [_name(node) for node in products if _is_observed(self._graph, node)]
        left_out = {_name(node) for node in products} - {*self.layers, *self.left_fp32}
        self.left_fp32 |= dict.fromkeys(sorted(left_out), "torchao does not quantise it")
        if not self.layers:
            raise CannotQuantise(f"torchao quantises none of its {len(products)} products (convolutions and linear)")

    def calibrate(self, path: Path, batches: Sequence[Sequence[Tensor]]) -> Quantised:
        """Write the activation ranges over these batches to `path`; return the result of quantising with them."""
        observing = copy.deepcopy(self._graph)
        try:
            with torch.no_grad():
                for batch in batches:
                    observing(*batch)
        except RuntimeError as error:  # raised for a histogram without bounds
            raise CannotQuantise(f"an activation has no range on the calibration images: {_line(error)}") from error
        ranges = {name: value.contiguous() for name, value in _ranges(observing)}
        ends = [value for name, value in ranges.items() if name.endswith(("min_val", "max_val"))]
        if not all(value.isfinite().all() for value in ends):
            raise CannotQuantise("an activation is not finite on the calibration images")
        save_file(ranges, path)
        return self._compared(self.converted(path), batches)

    def converted(self, path: Path) -> GraphModule:
        """Return the quantised graph with the ranges from this file, ready for torch.compile with freezing."""
        graph = copy.deepcopy(self._graph)
        for name, value in load_file(path).items():
            observer, _, buffer = name.rpartition(".")
            graph.get_submodule(observer).register_buffer(buffer, value)
        return convert_pt2e(graph)

    def _compared(self, graph: GraphModule, batches: Sequence[Sequence[Tensor]]) -> Quantised:
        """Return the errors of the quantised graph relative to the module on the first images."""
        some = batches[: -(-_COMPARED_IMAGES // len(batches[0][0]))]
        with torch.no_grad():
            exact, answers = (
                [pytree.tree_leaves(call(*batch))[0].double().numpy() for batch in some]
                for call in (self._module, graph)
            )
        return Quantised(
            layers=self.layers,
            left_fp32=self.left_fp32,
            exact=[],
            nodes=len(graph.graph.nodes),
            **agreement(exact, answers, len(batches[0][0])),
        )


def _prepared(module: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[GraphModule, dict[str, str]]:
    """Return the graph with observers, and the products excluded beforehand with the reasons.

    torchao finds its patterns by the modules in a strictly exported graph, but not every module supports strict export.
    """
    try:
        try:
            return _observed(module, inputs, strict=True)
        except CannotQuantise:
            raise
        except Exception:  # export and torchao may raise anything
            return _observed(module, inputs, strict=False)
    except CannotQuantise:
        raise
    except Exception as error:
        raise CannotQuantise(
            f"torch.export and torchao cannot prepare it: {type(error).__name__}: {_line(error)}"
        ) from error


def _observed(module: nn.Module, inputs: tuple[Tensor, ...], *, strict: bool) -> tuple[GraphModule, dict[str, str]]:
    with torch.no_grad():
        graph = torch.export.export(copy.deepcopy(module), inputs, strict=strict).module()
    left = _left_out(graph)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The input of ")  # says that pooling stays in float32
        return prepare_pt2e(graph, _quantizer()), left


def _quantizer() -> Any:
    config = x86.get_default_x86_inductor_quantization_config(reduce_range=files.overflows())
    quantizer = x86.X86InductorQuantizer().set_global(config)
    return quantizer.set_function_type_qconfig(torch.mul, None)  # multiplications of two activations stay in float32


def _left_out(graph: GraphModule) -> dict[str, str]:
    """Mark the products that stay in float32; return them with the reasons."""
    products = list(_products(graph))
    able = list(dict.fromkeys(_name(node) for node in products if _has_weight(node)))
    left = {_name(node): "neither of its inputs is constant" for node in products if not _has_weight(node)}
    if len(able) > 2:
        left |= {able[0]: "first layer", able[-1]: "last layer"}
    if not set(able[1:-1]):
        raise CannotQuantise(
            f"nothing to quantise: {len(products)} products (convolutions, linear), of which {len(able)} have constant "
            "weights, and the first and the last stay in float32"
        )
    for node in products:
        if _name(node) in left:
            node.meta["quantization_annotation"] = x86._X86InductorQuantizationAnnotation(_annotated=True)
    return left


def _products(graph: GraphModule) -> Iterator[Node]:
    for node in graph.graph.nodes:
        name = str(node.target).partition(".")[2].partition(".")[0]
        if node.op == "call_function" and (name in _PRODUCTS or name.startswith("conv")):
            yield node


def _has_weight(node: Node) -> bool:
    return len(node.args) > 1 and isinstance(node.args[1], Node) and _weight(node).op == "get_attr"


def _weight(node: Node) -> Node:
    """Return the constant that is the product's second argument, behind its observer."""
    weight = node.args[1]
    while isinstance(weight, Node) and weight.op == "call_module":
        weight = weight.args[0]
    return weight  # type: ignore[return-value]


def _name(node: Node) -> str:
    """Return a product's layer name: that of its weight's module, or of its node."""
    return str(_weight(node).target).removesuffix(".weight") if _has_weight(node) else node.name


def _is_observed(graph: GraphModule, node: Node) -> bool:
    return all(
        isinstance(given, Node)
        and given.op == "call_module"
        and isinstance(graph.get_submodule(str(given.target)), ObserverBase)
        for given in node.args[:2]
    )


def _ranges(graph: GraphModule) -> Iterator[tuple[str, Tensor]]:
    """Yield the ranges that the observers have seen, by observer and buffer."""
    for name, part in graph.named_modules():
        if isinstance(part, ObserverBase):
            for buffer, value in part.named_buffers(recurse=False):
                yield f"{name}.{buffer}", value


def _line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
