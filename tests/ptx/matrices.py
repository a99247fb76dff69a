"""How a warp holds matrices: the fragments of `mma`, and the 8x8 tiles of 16-bit numbers that move at once."""

import re
from collections.abc import Callable, Iterator

import numpy as np

from tests.ptx.memory import Fault
from tests.ptx.operations import NotExecuted
from tests.ptx.races import WARP

_GROUP, _PLACE = np.arange(WARP) // 4, np.arange(WARP) % 4

Fragments = list[np.ndarray]


def product(words: tuple[str, ...]) -> Callable[[Fragments, Fragments, Fragments], Fragments]:
    """Return the function from the fragments of a, b and c, each (warps, 32), to those of a b + c in float32."""
    shape = re.fullmatch(r"m16n8k(8|16)", words[3])
    if shape is None or words[4:6] != ("row", "col") or words[6] != "f32" or words[7] not in {"f16", "bf16"}:
        raise NotExecuted(f"the interpreter has no {'.'.join(words)}")
    numbers = _float16 if words[7] == "f16" else _bfloat16

    def multiply(a: Fragments, b: Fragments, c: Fragments) -> Fragments:
        warps, k = a[0].shape[0], int(shape[1])
        left, right, total = np.zeros((warps, 16, k)), np.zeros((warps, k, 8)), np.zeros((warps, 16, 8))
        for i, register in enumerate(a):
            for half, value in enumerate(numbers(register)):
                left[:, _GROUP + 8 * (i % 2), 2 * _PLACE + 8 * (i // 2) + half] = value
        for i, register in enumerate(b):
            for half, value in enumerate(numbers(register)):
                right[:, 2 * _PLACE + 8 * i + half, _GROUP] = value
        for i, value in enumerate(c):
            total[:, _GROUP + 8 * (i // 2), 2 * _PLACE + i % 2] = value
        total += left @ right
        return [total[:, _GROUP + 8 * (i // 2), 2 * _PLACE + i % 2].astype(np.float32) for i in range(4)]

    return multiply


def _float16(register: np.ndarray) -> Iterator[np.ndarray]:
    for half in (0, 16):
        yield (register >> np.uint32(half)).astype(np.uint16).view(np.float16)


def _bfloat16(register: np.ndarray) -> Iterator[np.ndarray]:
    for half in (16, 0):
        yield ((register << np.uint32(half)) & np.uint32(0xFFFF0000)).view(np.float32)


def halves(address: np.ndarray, number: int, transposed: bool) -> Iterator[np.ndarray]:
    """Yield where the lower and the upper half lie of each thread's register of an 8x8 tile.

    The eight threads from 8 `number` on know where the tile's rows begin, which are 16 bytes each.
    """
    rows = address.reshape(-1, WARP)[:, 8 * number : 8 * number + 8]
    if (rows % 16).any():
        raise Fault(f"a row of a tile begins at byte {int(rows[rows % 16 != 0][0])} of shared memory, misaligned")
    for half in (0, 1):
        row, column = (2 * _PLACE + half, _GROUP) if transposed else (_GROUP, 2 * _PLACE + half)
        yield (rows[:, row] + np.uint32(2) * column.astype(np.uint32)).ravel()
