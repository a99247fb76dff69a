"""Counts the minimum work of each part of a forward pass, as a separate step.

A part reads its parameters and its inputs and writes its outputs once, in their own dtypes; from an embedding table it
reads as many rows as it writes, and a part that only passes on its input does not move any bytes. Products are counted
from the observed shapes, 2 per multiply-add, including taps on padding and scores hidden by a mask; neurons, norms and
the parts of Vision Mamba by the formulas of benchd.models.cost. Fused steps move less, so the floor of a model is below
the sum of its parts' floors.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import fields
from typing import Any

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode, flop_registry

from benchd.daemon.worker.profiling.calls import calls_through
from benchd.daemon.worker.profiling.segments import Path, Segments
from benchd.daemon.worker.structures import address
from benchd.models.cost import LIF, NORM, QUANTISER, SILU, ST_BIF, Cost
from benchd.models.snn_onepass import PooledLif
from benchd.models.stbif import FoldedNetwork, Quantiser, StBif
from benchd.models.vim import Mixer, RmsNorm, Vim

ELEMENTWISE = {PooledLif: LIF, StBif: ST_BIF, Quantiser: QUANTISER, RmsNorm: NORM}


def count(
    module: nn.Module, forward: Callable[[], object], batch_size: int, segments: Segments
) -> list[tuple[Path, Cost]]:
    """Return the cost of each call of a part in one forward pass; a call with other parts inside has no own cost.

    A fused operator replaces the parts of a layer and is then counted for that layer.
    """
    stands_for = (
        {synapses.module: synapses.layer for synapses in module.synapses()} if isinstance(module, FoldedNetwork) else {}
    )
    profiles: list[tuple[Path, Cost]] = []

    def call(part: nn.Module, run: Callable[..., Any], *inputs: Any, **options: Any) -> Any:
        before, ended = counter.get_total_flops(), len(profiles)
        output = run(*inputs, **options)
        if len(profiles) == ended:
            products = counter.get_total_flops() - before
            cost = _of(part, stands_for.get(part, part), [inputs, options], output, products)
            profiles.append((segments.modules[part], cost))
        return output

    with FlopCounterMode(display=False) as counter, calls_through(call, segments.modules):
        counter.flop_registry.update(_fused())
        forward()
    return [*profiles, *_vim(module, batch_size).items()] if isinstance(module, Vim) else profiles


def _fused() -> dict[object, Callable[..., int]]:
    """Return formulas for the products of each fused operator that torch's counter lacks, given its tensors."""
    aten = torch.ops.aten
    formulas: dict[str, Callable[..., int]] = {
        "_native_multi_head_attention": lambda query, *given, **_: _attention(query, given[4:8]),
        "_transformer_encoder_layer_fwd": lambda tokens, *given, **_: _attention(tokens, given[2:17]),
        "_scaled_dot_product_flash_attention_for_cpu": flop_registry[aten._scaled_dot_product_flash_attention],
        "mkldnn_rnn_layer": lambda steps, *given, **_: _projections(steps, given[:4]),
        "_cudnn_rnn": lambda steps, weights, *_, **__: _projections(steps, weights),
    }
    return {getattr(aten, name): formula for name, formula in formulas.items() if hasattr(aten, name)}


def _attention(tokens: torch.Tensor, weights: Iterable[object]) -> int:
    """Return the products of self-attention over (batch, length, width), nested if lengths differ."""
    return _projections(tokens, weights) + sum(4 * len(sequence) * sequence.numel() for sequence in tokens.unbind())


def _projections(tokens: torch.Tensor, weights: Iterable[object]) -> int:
    """Return the products of each token (..., width) with every matrix among the weights."""
    matrices = sum(weight.numel() for weight in weights if isinstance(weight, torch.Tensor) and weight.dim() == 2)
    return 2 * tokens.numel() // tokens.size(-1) * matrices


def total(costs: Iterable[Cost]) -> Cost:
    """Return the sum of these costs."""
    every = list(costs)
    return Cost(*(sum(getattr(cost, field.name) for cost in every) for field in fields(Cost)))


def _of(part: nn.Module, layer: nn.Module, inputs: object, output: object, products: int) -> Cost:
    """Return the cost of one call; `layer` has the part's weights, and `products` are the products counted by torch."""
    # distinct tensors, because attention gets the same one as query, key and value
    given = list(dict.fromkeys(_tensors(inputs)))
    results = list(_tensors(output))
    elementwise = ELEMENTWISE.get(type(part))
    tables = {module.weight for module in part.modules() if isinstance(module, nn.Embedding)}
    parameters = sum(_bytes(tensor) for tensor in [*part.parameters(), *part.buffers()] if tensor not in tables)
    rows = results if tables else []
    moved = [] if _passes_on(part, given, results) and not parameters else [*given, *rows, *results]
    if isinstance(layer, nn.Conv2d | nn.Linear):  # torch's counter cannot see our kernels
        products = 2 * results[0].numel() * layer.weight[0].numel()
    return Cost(
        matrix_flops=products,
        elementwise_flops=elementwise * given[0].numel() if elementwise else 0,
        exponentials=0,
        bytes=parameters + sum(map(_bytes, moved)),
        parameters_bytes=parameters,
    )


def _passes_on(part: nn.Module, given: list[torch.Tensor], results: list[torch.Tensor]) -> bool:
    """Return whether a part only passes on its input, as Dropout does outside training."""
    in_place = any(getattr(module, "inplace", False) for module in part.modules())
    # under the counter of torch 2.9, Dropout copies its input
    is_off = isinstance(part, nn.Dropout | nn.Dropout1d | nn.Dropout2d | nn.Dropout3d) and not part.training
    return is_off or (bool(results) and not in_place and set(map(address, results)) <= set(map(address, given)))


def _tensors(value: object) -> Iterator[torch.Tensor]:
    """Yield the tensors in a value and in its lists, tuples and dictionaries."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, list | tuple | dict):
        for item in value.values() if isinstance(value, dict) else value:
            yield from _tensors(item)


def _bytes(tensor: torch.Tensor) -> int:
    # values repeated by a view are read once
    return min(tensor.numel() * tensor.element_size(), tensor.untyped_storage().nbytes())


def _vim(module: Vim, batch_size: int) -> dict[Path, Cost]:
    """Return the costs of the parts of layers that are not modules; the last layer processes a single token."""
    blocks = module.blocks()
    tokens = module.pos_embed.shape[1]
    costs: dict[Path, Cost] = {}
    for number, block in enumerate(blocks):
        last = number == len(blocks) - 1
        scanned, gated = (tokens + 1, 1) if last else (2 * tokens, tokens)
        layer = f"layers.{number}"
        parts = _mixer(block.mixer, batch_size * tokens, batch_size * scanned, batch_size * gated)
        costs |= {(layer, f"{layer}.{part}"): cost for part, cost in parts.items()}
    return costs


def _mixer(mixer: Mixer, tokens: int, scanned: int, gated: int) -> dict[str, Cost]:
    """Return the costs of a layer on `tokens` tokens, of which the scans read `scanned` and `gated` leave the gate."""
    inner, dim = mixer.in_proj.weight.shape[0] // 2, mixer.in_proj.weight.shape[1]
    states, taps, rank, size = mixer.A_log.shape[1], mixer.conv1d.weight.shape[2], mixer.rank, mixer.D.element_size()
    low = rank + 2 * states

    def cost(matrix: int, elementwise: int, exponentials: int, weights: int, moved: int) -> Cost:
        return Cost(matrix, elementwise, exponentials, size * (weights + moved), size * weights)

    tap_flops, scan_flops = 2 * taps + SILU, 6 * states + 5
    return {
        "in_proj": cost(
            2 * dim * inner * (tokens + gated), 0, 0, 2 * dim * inner, tokens * (dim + inner) + gated * inner
        ),
        "conv1d": cost(
            0, inner * scanned * tap_flops, inner * scanned, 2 * inner * (taps + 1), inner * (tokens + scanned)
        ),
        "x_proj": cost(2 * inner * scanned * low, 0, 0, 2 * inner * low, scanned * (inner + low)),
        "scan": cost(
            2 * inner * scanned * rank,
            inner * (scanned * scan_flops + gated * (SILU + 2)),
            inner * (scanned * (states + 2) + gated),
            2 * inner * (rank + states + 2),
            scanned * (inner + low) + 2 * gated * inner,
        ),
        "out_proj": cost(2 * dim * inner * gated, 0, 0, dim * inner, gated * (inner + dim)),
    }
