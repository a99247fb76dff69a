"""Launches without a GPU: repeated by Triton's interpreter, of addresses as on one."""

import ctypes

import torch

from benchd.kernels import launch, plan


def interpreted(each, places, device):
    """Return what repeats a launch in the interpreter: addresses become tensors of the size that was recorded."""

    def again(addresses, stream):
        tensors = [
            None if tensor is None else at(addresses[which] + offset, tensor)
            for tensor, (which, offset) in zip(each.tensors, places, strict=True)
        ]
        each.kernel[each.grid](*tensors, *each.numbers, **each.constants)

    return again


def at(address, like):
    """Return the memory at an address as a tensor with the shape, strides and dtype of another."""
    count = 1 + sum((size - 1) * step for size, step in zip(like.shape, like.stride(), strict=True))
    if not like.numel():
        return like
    memory = (ctypes.c_uint8 * (count * like.element_size())).from_address(address)
    return torch.frombuffer(memory, dtype=like.dtype).as_strided(like.shape, like.stride())


def without_gpu(monkeypatch, repeated=interpreted):
    """Let ops have plans as on a GPU, each launch of which is repeated by what `repeated` returns."""
    monkeypatch.setattr(plan, "INTERPRETED", False)
    monkeypatch.setattr(launch, "repeated", repeated)
    monkeypatch.setattr(launch, "current_device", lambda: 0)
    monkeypatch.setattr(launch, "current_stream", lambda index: 0)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
