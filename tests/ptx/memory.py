"""The memories that a kernel sees, with the checks that a GPU makes, or should: bounds, alignment and races.

Global memory is the storage of CPU tensors. Each has its own address 2^40 bytes from the next, so an address that is
computed wrongly, or in 32 bits, lies in none of them.
"""

from dataclasses import dataclass

import numpy as np
import torch

from tests.ptx.races import Access, History

_REGION = 40


class Fault(AssertionError):
    """A kernel did what a GPU would not do, or what it does differently from one time to the next."""


@dataclass
class Lanes:
    """Threads that do something at once: `thread` counts them over all blocks of the launch."""

    thread: np.ndarray
    block_phase: np.ndarray
    warp_phase: np.ndarray
    text: str


class Region:
    """One piece of memory and who used it when."""

    def __init__(self, data: np.ndarray, size: int, history: History) -> None:
        self.data, self.size, self.history = data, size, history
        self._chance = np.random.default_rng(0)

    def view(self, word: int) -> np.ndarray:
        """Return the memory as words of so many bytes."""
        return self.data[: self.data.size // word * word].view(f"u{word}")

    def load(self, offset: np.ndarray, word: int, count: int, lanes: Lanes, at: np.ndarray) -> np.ndarray:
        """Return `count` words for each lane, which lie at `at` and are called `offset` when they are wrong."""
        self._check(offset, word * count, lanes)
        self._note(at, word * count, lanes, None)
        return self.view(word)[(at // word)[:, None] + np.arange(count)]

    def store(self, offset: np.ndarray, values: np.ndarray, lanes: Lanes, at: np.ndarray) -> None:
        """Write the words `values` of each lane; where two write the same place, any one counts, as on a GPU."""
        word, count = values.itemsize, values.shape[1]
        self._check(offset, word * count, lanes)
        self._note(at, word * count, lanes, np.ascontiguousarray(values))
        order = self._chance.permutation(at.size)
        self.view(word)[(at[order] // word)[:, None] + np.arange(count)] = values[order]

    def _check(self, offset: np.ndarray, size: int, lanes: Lanes) -> None:
        outside = (offset < 0) | (offset > self.size - size)
        for bad, what in ((offset % size != 0, "misaligned"), (outside, f"outside its {self.size} bytes")):
            if bad.any():
                i = int(bad.argmax())
                where = f"{self.history.name} at byte {offset[i]}, {size} bytes, {what}"
                raise Fault(f"{where}: thread {lanes.thread[i]} of the launch: {lanes.text}")

    def _note(self, at: np.ndarray, size: int, lanes: Lanes, values: np.ndarray | None) -> None:
        grain = self.history.grain_bytes
        access = Access(
            at // grain, max(1, size // grain), lanes.thread, lanes.block_phase, lanes.warp_phase, values, lanes.text
        )
        if values is not None and values.itemsize < grain:
            raise Fault(f"{self.history.name}: a part of a number is written: {lanes.text}")
        self.history.accesses.append(access)


class GlobalMemory:
    """The tensors of a launch by their addresses on the GPU, and the addresses by their tensors."""

    def __init__(self, tensors: dict[str, torch.Tensor], threads: int) -> None:
        self.regions: list[Region] = []
        self._numbers: dict[int, int] = {}
        for name, tensor in tensors.items():
            storage = tensor.untyped_storage()
            if storage.data_ptr() in self._numbers:
                continue
            self._numbers[storage.data_ptr()] = len(self.regions)
            data = torch.empty(0, dtype=torch.uint8).set_(storage).numpy()
            history = History(name, tensor.element_size(), threads, shared=False)
            self.regions.append(Region(data, storage.nbytes(), history))

    def address(self, tensor: torch.Tensor) -> int:
        """Return where the tensor begins; a storage begins at a multiple of 512 bytes, as on a GPU."""
        storage = tensor.untyped_storage()
        offset = tensor.data_ptr() - storage.data_ptr() if tensor.numel() else 0
        return ((self._numbers[storage.data_ptr()] + 1) << _REGION) + offset

    def load(self, address: np.ndarray, word: int, count: int, lanes: Lanes) -> np.ndarray:
        """Return `count` words for each lane."""
        result = np.empty((address.size, count), f"u{word}")
        for region, chosen, offset in self._regions(address, lanes):
            result[chosen] = region.load(offset, word, count, _some(lanes, chosen), offset)
        return result

    def store(self, address: np.ndarray, values: np.ndarray, lanes: Lanes) -> None:
        """Write the words `values` of each lane."""
        for region, chosen, offset in self._regions(address, lanes):
            region.store(offset, values[chosen], _some(lanes, chosen), offset)

    def _regions(self, address: np.ndarray, lanes: Lanes):
        number = (address.view(np.int64) >> _REGION) - 1
        offset = (address & np.uint64((1 << _REGION) - 1)).view(np.int64)
        for index in np.unique(number):
            if not 0 <= index < len(self.regions):
                i = int((number == index).argmax())
                raise Fault(f"no memory at {int(address[i]):#x}: thread {lanes.thread[i]} of the launch: {lanes.text}")
            chosen = number == index
            whole = slice(None) if chosen.all() else chosen
            yield self.regions[index], whole, offset[whole]


def _some(lanes: Lanes, chosen: slice | np.ndarray) -> Lanes:
    if isinstance(chosen, slice):
        return lanes
    return Lanes(lanes.thread[chosen], lanes.block_phase[chosen], lanes.warp_phase[chosen], lanes.text)


class SharedMemory:
    """The shared memory of some blocks of a launch, by rising number, full of NaN before anything is written."""

    def __init__(self, blocks: np.ndarray, size: int, grain_bytes: int, threads: int) -> None:
        self._stride, self._threads, self._blocks = -(-size // 16) * 16, threads, blocks
        history = History("shared memory", grain_bytes, threads, shared=True)
        self.region = Region(np.full(blocks.size * self._stride, 0xFF, np.uint8), size, history)

    def _at(self, offset: np.ndarray, lanes: Lanes) -> np.ndarray:
        return offset + np.searchsorted(self._blocks, lanes.thread // self._threads) * self._stride

    def load(self, address: np.ndarray, word: int, count: int, lanes: Lanes) -> np.ndarray:
        """Return `count` words for each lane."""
        offset = address.astype(np.int64)
        return self.region.load(offset, word, count, lanes, self._at(offset, lanes))

    def store(self, address: np.ndarray, values: np.ndarray, lanes: Lanes) -> None:
        """Write the words `values` of each lane."""
        offset = address.astype(np.int64)
        self.region.store(offset, values, lanes, self._at(offset, lanes))
