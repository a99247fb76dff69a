"""What an instruction computes from its operands: arithmetic, comparisons, conversions and approximations.

Approximations are off by up to what the PTX manual allows, in either direction, by an amount that the operand alone
decides: a GPU's own error is somewhere within.
"""

from collections.abc import Callable
from functools import cache
from typing import NamedTuple

import numpy as np

DTYPES = {"pred": "?", "b8": "u1", "u8": "u1", "s8": "i1", "b16": "u2", "u16": "u2", "s16": "i2", "f16": "f2",
          "bf16": "u2", "b32": "u4", "u32": "u4", "s32": "i4", "f32": "f4", "b64": "u8", "u64": "u8", "s64": "i8",
          "f64": "f8", "f16x2": "u4", "bf16x2": "u4", "s16x2": "u4", "u16x2": "u4", "f32x2": "u8"}  # fmt: skip
_WIDER = {"s16": "s32", "u16": "u32", "s32": "s64", "u32": "u64"}
_FLOATS = {"f16", "f32", "f64"}


class Operation(NamedTuple):
    """The type of the result, those of the operands, and the function from the one to the other."""

    result: str
    operands: tuple[str, ...]
    compute: Callable[..., np.ndarray]


class NotExecuted(NotImplementedError):
    """The interpreter does not know this instruction."""


@cache
def operation(words: tuple[str, ...]) -> Operation:
    """Return what the opcode computes; raises NotExecuted for one that is not here."""
    name, kind = words[0], words[-1]
    if name == "cvt":
        return _conversion(words)
    if name in {"setp", "set"}:
        return Operation("pred", (kind, kind), _COMPARISONS[words[1]])
    if name == "selp":
        return Operation(kind, (kind, kind, "pred"), lambda a, b, p: np.where(p, a, b))
    if name in {"mul", "mad"} and kind in _WIDER | {"s64": "", "u64": ""}:
        return _product(words)
    if kind in _PACKED and name in _PACKED[kind][1]:
        half, table = _PACKED[kind]
        count, compute = table[name]
        return Operation(kind, (kind,) * count, _by_halves(compute, half, "ftz" in words))
    if words[-2:] in {("f32", "f16"), ("f32", "bf16")} and name in _WIDENED:
        return _widened(name, kind)
    for table in (_APPROXIMATE if "approx" in words or "full" in words else {}, _FLOAT if kind in _FLOATS else _WHOLE):
        if name in table:
            count, compute = table[name]
            compute = _flushing(compute) if "ftz" in words else compute
            return Operation(kind, (kind,) * count, compute)
    if name in _MIXED:
        types, compute = _MIXED[name]
        return Operation(kind, tuple(each or kind for each in types), compute(kind) if name == "bfe" else compute)
    raise NotExecuted(f"the interpreter has no {'.'.join(words)}")


def _flushing(compute: Callable[..., np.ndarray]) -> Callable[..., np.ndarray]:
    def flush(a: np.ndarray) -> np.ndarray:
        return np.where(np.abs(a) < np.finfo(a.dtype).tiny, np.copysign(a.dtype.type(0), a), a)

    return lambda *operands: flush(compute(*(flush(each) for each in operands)))


def _unordered(compare: Callable[..., np.ndarray]) -> Callable[..., np.ndarray]:
    return lambda a, b: compare(a, b) | np.isnan(a) | np.isnan(b)


_COMPARISONS = {
    "eq": np.equal,
    "ne": lambda a, b: (a < b) | (a > b) if a.dtype.kind == "f" else a != b,
    "lt": np.less,
    "le": np.less_equal,
    "gt": np.greater,
    "ge": np.greater_equal,
    "equ": _unordered(np.equal),
    "neu": np.not_equal,
    "ltu": _unordered(np.less),
    "leu": _unordered(np.less_equal),
    "gtu": _unordered(np.greater),
    "geu": _unordered(np.greater_equal),
    "num": lambda a, b: ~(np.isnan(a) | np.isnan(b)),
    "nan": lambda a, b: np.isnan(a) | np.isnan(b),
}


def fused(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
    """Return a b + c of float32 numbers, rounded once."""
    product, addend = a.astype(np.float64) * b, c.astype(np.float64)  # the product is exact
    total = product + addend
    # a float64 in the middle between two float32 has been rounded to it, perhaps: then its last bit says from where
    middle = (total.view(np.uint64) & np.uint64(0x1FFFFFFF) == 0x10000000) | (np.abs(total) < 2.0**-126)
    if middle.any():
        part = total - product
        error = (product - (total - part)) + (addend - part)
        odd = (total.view(np.uint64) & np.uint64(1)).astype(bool)
        towards = np.where(error > 0, np.inf, -np.inf)
        total = np.where(middle & (error != 0) & ~odd & np.isfinite(total), np.nextafter(total, towards), total)
    return total.astype(np.float32)


def _fused_double(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
    """Return a b + c of float64 numbers, the product kept to twice their digits; the last bit may be off."""
    a_high, b_high = (each.astype(np.float32).astype(np.float64) for each in (a, b))
    product = a * b
    left = ((a_high * b_high - product) + a_high * (b - b_high) + (a - a_high) * b_high) + (a - a_high) * (b - b_high)
    total = product + c
    part = total - product
    rest = (product - (total - part)) + (c - part) + left
    return np.where(np.isfinite(rest), total + rest, total)


def _shift(compute: Callable[..., np.ndarray]) -> Callable[..., np.ndarray]:
    """Shift by more than the width as PTX does: everything leaves."""

    def shifted(a: np.ndarray, by: np.ndarray) -> np.ndarray:
        bits = 8 * a.dtype.itemsize
        if a.dtype.kind == "i":
            return compute(a, np.minimum(by, bits - 1).astype(a.dtype))
        return np.where(by < bits, compute(a, np.minimum(by, bits - 1).astype(a.dtype)), a.dtype.type(0))

    return shifted


def _quotient(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Return a / b towards zero; lanes that a mask hides may divide by zero."""
    b = np.where(b == 0, b.dtype.type(1), b)
    quotient = a // b
    return np.where((a % b != 0) & ((a < 0) != (b < 0)), quotient + quotient.dtype.type(1), quotient)


def _by_halves(compute: Callable[..., np.ndarray], half: str, is_flushing: bool) -> Callable[..., np.ndarray]:
    compute = _flushing(compute) if is_flushing else compute

    def computed(*operands: np.ndarray) -> np.ndarray:
        whole = np.broadcast_arrays(*operands)
        return compute(*(np.ascontiguousarray(each).view(half) for each in whole)).view(whole[0].dtype)

    return computed


_WHOLE = {
    "add": (2, np.add),
    "sub": (2, np.subtract),
    "neg": (1, np.negative),
    "not": (1, np.invert),
    "abs": (1, np.abs),
    "and": (2, np.bitwise_and),
    "or": (2, np.bitwise_or),
    "xor": (2, np.bitwise_xor),
    "min": (2, np.minimum),
    "max": (2, np.maximum),
    "div": (2, _quotient),
    "rem": (2, lambda a, b: a - _quotient(a, b) * b),
}
_FLOAT = {
    "add": (2, np.add),
    "sub": (2, np.subtract),
    "mul": (2, np.multiply),
    "div": (2, np.divide),
    "sqrt": (1, np.sqrt),
    "rcp": (1, np.reciprocal),
    "fma": (3, lambda a, b, c: fused(a, b, c) if c.dtype == np.float32 else _fused_double(a, b, c)),
    "neg": (1, np.negative),
    "abs": (1, np.abs),
    "min": (2, np.fmin),
    "max": (2, np.fmax),
}


# by the type of two numbers in one register: that of one, and what can be done
_PACKED = {"s16x2": ("u2", _WHOLE), "u16x2": ("u2", _WHOLE), "f32x2": ("f4", _FLOAT)}
# from sm_100 on: how many of the operands are half as wide as the others, which come last
_WIDENED = {"add": 1, "sub": 1, "fma": 2}


def _widened(name: str, kind: str) -> Operation:
    count, compute = _FLOAT[name]
    halves, widen = _WIDENED[name], _converter(kind, "f32", set())
    types = (kind,) * halves + ("f32",) * (count - halves)
    return Operation("f32", types, lambda *operands: compute(*map(widen, operands[:halves]), *operands[halves:]))


def _within(exact: Callable[..., np.ndarray], bound: float, absolute: bool = False) -> tuple[int, Callable]:
    """Return a function of float32 that is off by up to `bound`, except where the exact result is a float32."""

    def compute(*operands: np.ndarray) -> np.ndarray:
        result = exact(*(each.astype(np.float64) for each in operands))
        bits = sum(each.view(np.uint32) * np.uint32(2654435761) for each in operands)
        error = ((bits >> np.uint32(8)).astype(np.float64) / 2**23 - 1) * bound
        near = result + error if absolute else result * (1 + error)
        return np.where(result.astype(np.float32) == result, result, near).astype(np.float32)

    return 1, compute


_APPROXIMATE = {
    "ex2": _within(np.exp2, 2**-22.5),
    "lg2": _within(np.log2, 2**-22, absolute=True),
    "rcp": _within(np.reciprocal, 2**-23),
    "rsqrt": _within(lambda a: 1 / np.sqrt(a), 2**-22.4),
    "sqrt": _within(np.sqrt, 2**-23),
    "sin": _within(np.sin, 2**-20.5, absolute=True),
    "cos": _within(np.cos, 2**-20.5, absolute=True),
    "tanh": _within(np.tanh, 2**-11),
    "div": (2, _within(np.divide, 2**-22)[1]),
}


def _field(kind: str) -> Callable[..., np.ndarray]:
    """Return the function that takes `length` bits of `a` from `position` on, with a sign where the type has one."""

    def extract(a: np.ndarray, position: np.ndarray, length: np.ndarray) -> np.ndarray:
        bits = 8 * a.dtype.itemsize
        position, length = position & 255, np.minimum(length & 255, bits)
        wide = a.astype(np.int64) >> np.minimum(position, 63).astype(np.int64)
        field = wide & ((np.int64(1) << length.astype(np.int64)) - 1)
        sign = (field >> np.maximum(length.astype(np.int64) - 1, 0)) & 1
        return (field - (sign << length.astype(np.int64)) if kind[0] == "s" else field).astype(a.dtype)

    return extract


def _permuted(a: np.ndarray, b: np.ndarray, selector: np.ndarray) -> np.ndarray:
    wide = a.astype(np.uint64) | b.astype(np.uint64) << np.uint64(32)
    result = np.zeros(np.broadcast(a, b, selector).shape, np.uint64)
    for byte in range(4):
        choice = (selector >> np.uint32(4 * byte)) & np.uint32(15)
        picked = wide >> ((choice & 7) * 8).astype(np.uint64) & np.uint64(255)
        picked = np.where(choice & 8, np.where(picked & 128, np.uint64(255), np.uint64(0)), picked)
        result |= picked << np.uint64(8 * byte)
    return result.astype(np.uint32)


# operands of another type than the result's, which "" stands for
_MIXED = {
    "shl": (("", "u32"), _shift(np.left_shift)),
    "shr": (("", "u32"), _shift(np.right_shift)),
    "bfe": (("", "u32", "u32"), _field),
    "prmt": (("u32", "u32", "u32"), _permuted),
}


def _product(words: tuple[str, ...]) -> Operation:
    name, part, kind = words
    bits = 8 * np.dtype(DTYPES[kind]).itemsize
    if part == "hi" and bits == 64:
        raise NotExecuted(f"the interpreter has no {'.'.join(words)}")
    result = _WIDER[kind] if part == "wide" else kind

    def multiplied(a: np.ndarray, b: np.ndarray) -> np.ndarray:
        if part == "lo":
            return a * b
        wide = a.astype(DTYPES[_WIDER[kind]]) * b.astype(DTYPES[_WIDER[kind]])
        return wide if part == "wide" else (wide >> wide.dtype.type(bits)).astype(a.dtype)

    if name == "mul":
        return Operation(result, (kind, kind), multiplied)
    return Operation(result, (kind, kind, result), lambda a, b, c: multiplied(a, b) + c)


def _conversion(words: tuple[str, ...]) -> Operation:
    to, source, how = words[-2], words[-1], set(words[1:-2])
    if to in {"f16x2", "bf16x2"}:
        half = _converter(source, to[:-2], how)
        return Operation(to, (source, source), lambda a, b: _halves_joined(half(b), half(a)))
    compute = _converter(source, to, how)
    return Operation(to, (source,), _flushing(compute) if "ftz" in how else compute)


def _halves_joined(low: np.ndarray, high: np.ndarray) -> np.ndarray:
    return low.view(np.uint16).astype(np.uint32) | high.view(np.uint16).astype(np.uint32) << np.uint32(16)


def _converter(source: str, to: str, how: set[str]) -> Callable[[np.ndarray], np.ndarray]:
    """Return the function between two types; "rn" is what NumPy does."""
    if to == "bf16":
        return _to_bfloat16
    if source == "bf16":
        return lambda a: (a.astype(np.uint32) << np.uint32(16)).view(np.float32).astype(DTYPES[to])
    if source in _FLOATS and to not in _FLOATS:
        return lambda a: _to_whole(a, to, how)
    if to in _FLOATS and "rn" not in how and np.dtype(DTYPES[to]).itemsize <= np.dtype(DTYPES[source]).itemsize:
        raise NotExecuted(f"the interpreter rounds to the nearest only, not {sorted(how)}")
    return lambda a: a.astype(DTYPES[to])


def _to_bfloat16(a: np.ndarray) -> np.ndarray:
    bits = a.view(np.uint32)
    rounded = (bits + np.uint32(0x7FFF) + (bits >> np.uint32(16) & np.uint32(1))) >> np.uint32(16)
    return np.where(np.isnan(a), np.uint32(0x7FFF), rounded).astype(np.uint16)


_ROUNDINGS = {"rzi": np.trunc, "rni": np.rint, "rmi": np.floor, "rpi": np.ceil}


def _to_whole(a: np.ndarray, to: str, how: set[str]) -> np.ndarray:
    limits = np.iinfo(DTYPES[to])
    whole = _ROUNDINGS[next(iter(how & set(_ROUNDINGS)))](np.nan_to_num(a.astype(np.float64), nan=0.0))
    clipped = np.clip(whole, float(limits.min), float(limits.max))
    return np.where(clipped >= float(limits.max), limits.max, clipped.astype(np.int64)).astype(DTYPES[to])
