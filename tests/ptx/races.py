"""Finds accesses to one memory that nothing orders: by two threads, at least one writing, with no barrier between them.

Every access of a launch is noted with how many barriers its block and its warp have passed, and all are compared when
the launch has ended: what the lockstep of the interpreter orders by chance counts for nothing. Threads that write the
same value to the same place, and read nothing there, are no race: Triton does that on purpose. Nor are those of a warp
that write by one instruction, of which a GPU lets one win: Triton's copies of a sum differ in the last bits, where each
adds a product of its own that it has not rounded.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

WARP = 32


@dataclass
class Access:
    """What some threads did at once: each has read or written `count` neighbouring grains from its own `first` on."""

    first: np.ndarray
    count: int
    thread: np.ndarray
    block_phase: np.ndarray
    warp_phase: np.ndarray
    values: np.ndarray | None
    text: str


@dataclass
class History:
    """All accesses to one memory, whose grains are the smallest numbers that anything moves there."""

    name: str
    grain_bytes: int
    threads: int
    shared: bool
    accesses: list[Access] = field(default_factory=list)

    def race(self) -> str | None:
        """Return a sentence about a race, or None where there is none."""
        if all(access.values is None for access in self.accesses):
            return None
        columns = [self._columns(number) for number in range(len(self.accesses))]
        grain, thread, block_phase, warp_phase, value, wrote, text = map(np.concatenate, zip(*columns, strict=True))
        block, warp = thread // self.threads, thread // WARP
        groups = [
            ((grain, block, block_phase), warp, value, "between two barriers"),
            ((grain, block, block_phase, warp, warp_phase), thread, text, "in one warp without a barrier between"),
        ]
        if not self.shared:
            groups.insert(0, ((grain,), block, value, "from two blocks"))
        for keys, who, alike, how in groups:
            at = _conflict(keys, who, wrote, [value, alike])
            if at is not None:
                first, last = (f"thread {thread[i] % self.threads} of block {block[i]}: {self.accesses[text[i]].text}"
                               for i in at)  # fmt: skip
                return f"race in {self.name} at byte {grain[at[0]] * self.grain_bytes} {how}: {first} | {last}"
        return None

    def _columns(self, number: int) -> Sequence[np.ndarray]:
        access = self.accesses[number]
        count = access.count
        grain = (access.first[:, None] + np.arange(count)).ravel()
        value, wrote = np.zeros(grain.size, np.uint64), np.full(grain.size, access.values is not None)
        if access.values is not None:
            value = access.values.view(f"u{self.grain_bytes}").ravel().astype(np.uint64)
        repeated = (np.repeat(each, count) for each in (access.thread, access.block_phase, access.warp_phase))
        return grain, *repeated, value, wrote, np.full(grain.size, number)


def _conflict(
    keys: tuple[np.ndarray, ...], who: np.ndarray, wrote: np.ndarray, alike: list[np.ndarray]
) -> tuple[int, int] | None:
    """Return two entries that share all `keys` and differ in `who`, one of which wrote, or None.

    Entries that all wrote, and agree in one of the columns `alike`, are none.
    """
    order = np.lexsort((wrote, who, *reversed(keys)))
    changes = np.zeros(order.size, bool)
    changes[0] = True
    for key in keys:
        changes[1:] |= np.diff(key[order]) != 0
    starts = np.flatnonzero(changes)

    def least_and_most(column: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        return np.minimum.reduceat(column[order], starts), np.maximum.reduceat(column[order], starts)

    first, last = least_and_most(who)
    only_writes, any_write = least_and_most(wrote)
    same = np.any([np.equal(*least_and_most(column)) for column in alike], 0)
    bad = np.flatnonzero((first != last) & any_write & ~(only_writes & same))
    if not bad.size:
        return None
    ends = np.append(starts[1:], order.size)
    return order[starts[bad[0]]], order[ends[bad[0]] - 1]
