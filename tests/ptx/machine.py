"""Executes a PTX program: every thread of some blocks at once, as arrays over threads.

Threads that part are masks that wait at different places; the rearmost go on first, and those that meet go on together.
Nothing relies on that order: what only it decides is a race, and found as one.
"""

import re
from collections.abc import Callable, Sequence
from functools import lru_cache

import numpy as np
import torch

from tests.ptx import matrices
from tests.ptx.memory import Fault, GlobalMemory, Lanes, SharedMemory
from tests.ptx.operations import DTYPES, NotExecuted, operation
from tests.ptx.program import BYTES, Instruction, Program, operand_list, parse
from tests.ptx.races import WARP

_SPECIAL = {f"%{name}.{axis}" for name in ("tid", "ntid", "ctaid", "nctaid") for axis in "xyz"} | {"%laneid"}
_MOST_THREADS = 2**16  # at once, for the size of their registers
_MOST_INSTRUCTIONS = 10**6  # of a thread: more is a loop that does not end

Step = Callable[["_Blocks", "np.ndarray | None"], None]
Argument = torch.Tensor | int | float | bool | None


def launch(ptx: str, grid: tuple[int, ...], arguments: Sequence[Argument], shared_bytes: int) -> None:
    """Run the kernel in `ptx` on all blocks of the grid, in place; raises Fault for what a GPU would not do.

    `arguments` are the kernel's parameters in their order, those that Triton adds at the end left out.
    """
    program, steps = _loaded(ptx)
    tensors = {f"argument {i}": each for i, each in enumerate(arguments) if isinstance(each, torch.Tensor)}
    memory = GlobalMemory(tensors, program.threads)
    parameters = _parameters(program, arguments, memory)
    size = (*grid, 1, 1)[:3]
    chosen = np.arange(size[0] * size[1] * size[2])
    most = max(1, _MOST_THREADS // program.threads)
    with np.errstate(all="ignore"):
        for first in range(0, chosen.size, most):
            blocks = chosen[first : first + most]
            running = _Blocks(program, steps, parameters, size, blocks, memory, shared_bytes)
            running.run()
            _no_race(program, running.shared.region.history)
    for region in memory.regions:
        _no_race(program, region.history)


def _no_race(program: Program, history) -> None:
    if race := history.race():
        raise Fault(f"{program.name}: {race}")


def _parameters(program: Program, arguments: Sequence[Argument], memory: GlobalMemory) -> dict[str, bytes]:
    values = [*arguments, *[None] * (len(program.parameters) - len(arguments))]
    parameters = {}
    for (kind, name), value in zip(program.parameters, values, strict=True):
        number = memory.address(value) if isinstance(value, torch.Tensor) else value or 0
        dtype = np.dtype(DTYPES[kind])
        whole = int(number) & (2 ** (8 * dtype.itemsize) - 1) if dtype.kind == "u" else number
        parameters[name] = np.array(whole, dtype).tobytes()
    return parameters


@lru_cache(maxsize=1024)
def _loaded(ptx: str) -> tuple[Program, tuple[Step, ...]]:
    program = parse(ptx)
    return program, tuple(_step(program, instruction) for instruction in program.instructions)


class _Registers(dict):
    """The registers by name; one that was never written is a pattern that nobody computes."""

    def __init__(self, program: Program, lanes: int) -> None:
        super().__init__()
        self._program, self._lanes = program, lanes

    def __missing__(self, name: str) -> np.ndarray:
        width = _width(self._program, name)
        dtype = "?" if name.startswith("%p") and width == 1 else f"u{width}"
        self[name] = np.frombuffer(b"\xcd" * (width * self._lanes), f"u{width}").astype(dtype)
        return self[name]


class _Blocks:
    """Some blocks of a launch: registers, memories and where each thread is."""

    def __init__(self, program, steps, parameters, grid, blocks, memory, shared_bytes) -> None:
        self.program, self.steps, self.parameters, self.memory = program, steps, parameters, memory
        self.count, self.lanes = blocks.size, blocks.size * program.threads
        self.shared = SharedMemory(blocks, shared_bytes, _least_shared(program), program.threads)
        self.registers = _Registers(program, self.lanes)
        thread = np.tile(np.arange(program.threads), blocks.size)
        block = np.repeat(blocks, program.threads)
        self.thread = block * program.threads + thread
        self.block_phase, self.warp_phase = np.zeros(self.lanes, np.int32), np.zeros(self.lanes, np.int32)
        places = {"tid": (thread, 0, 0), "ntid": (program.threads, 1, 1), "nctaid": grid}
        places["ctaid"] = (block % grid[0], block // grid[0] % grid[1], block // grid[0] // grid[1])
        for name, axes in places.items():
            for axis, value in zip("xyz", axes, strict=True):
                self.registers[f"%{name}.{axis}"] = np.broadcast_to(value, self.lanes).astype(np.uint32)
        self.registers["%laneid"] = (thread % WARP).astype(np.uint32)

    def run(self) -> None:
        """Run until every thread has returned."""
        targets = {
            self.program.labels[each.operands[0]] for each in self.program.instructions if each.words[0] == "bra"
        }
        self._at, self._waiting = {0: np.ones(self.lanes, bool)}, {}
        self._live = np.ones(self.lanes, bool)
        executed = 0
        while self._at or self._waiting:
            if not self._at:
                self._pass_barriers()
            place = min(self._at)
            mask = self._at.pop(place)
            while mask.any():
                executed += 1
                if executed > _MOST_INSTRUCTIONS:
                    raise Fault(f"{self.program.name}: a loop does not end")
                instruction = self.program.instructions[place]
                if instruction.words[0] in {"bra", "ret", "exit", "bar"} and instruction.words[1:2] != ("warp",):
                    self._turn(instruction, place, mask)
                    break
                self.steps[place](self, None if mask.all() else mask)
                place += 1
                if place in targets:
                    self._go_on(place, mask)
                    break

    def _go_on(self, place: int, mask: np.ndarray) -> None:
        if mask.any():
            self._at[place] = self._at[place] | mask if place in self._at else mask

    def _turn(self, instruction: Instruction, place: int, mask: np.ndarray) -> None:
        """Follow a branch, return or wait."""
        taken = mask & self.guard(instruction.guard) if instruction.guard else mask
        if instruction.words[0] == "bra":
            self._go_on(self.program.labels[instruction.operands[0]], taken)
        elif instruction.words[0] == "bar":
            if instruction.words != ("bar", "sync") or instruction.operands != ("0",) or instruction.guard:
                raise NotExecuted(f"the interpreter has no {instruction.text}")
            self._waiting[place] = self._waiting.get(place, False) | mask
            return
        else:
            self._live &= ~taken
        self._go_on(place + 1, mask & ~taken)

    def _pass_barriers(self) -> None:
        """Let on the blocks whose threads all wait at the same barrier; raises Fault where no block can go on."""
        passed = False
        for place, mask in list(self._waiting.items()):
            ready = (mask == self._live).reshape(self.count, -1).all(1) & mask.reshape(self.count, -1).any(1)
            through = np.repeat(ready, self.program.threads) & mask
            if through.any():
                passed = True
                self.block_phase = self.block_phase + through
                self._go_on(place + 1, through)
                rest = mask & ~through
                self._waiting[place] = rest
                if not rest.any():
                    del self._waiting[place]
        if not passed:
            raise Fault(f"{self.program.name}: the threads of a block wait at different barriers, for ever")

    def guard(self, name: str) -> np.ndarray:
        """Return which threads a guard lets do something."""
        return ~self.registers[name[1:]] if name.startswith("!") else self.registers[name]

    def active(self, mask: np.ndarray | None, text: str) -> tuple[np.ndarray | slice, Lanes]:
        """Return the threads of a mask, as an index and as what memory wants to know of them."""
        chosen = slice(None) if mask is None else np.flatnonzero(mask)
        return chosen, Lanes(self.thread[chosen], self.block_phase[chosen], self.warp_phase[chosen], text)

    def warps(self, mask: np.ndarray | None, instruction: Instruction) -> None:
        """Raise Fault where an instruction of whole warps is met by a part of one."""
        if mask is not None and (mask.reshape(-1, WARP).any(1) != mask.reshape(-1, WARP).all(1)).any():
            raise Fault(f"{self.program.name}: only some threads of a warp come to {instruction.text}")

    def write(self, name: str, value: np.ndarray, mask: np.ndarray | None) -> None:
        """Set a register of the threads of a mask; a narrower value is extended by its sign, if its type has one."""
        if not name.startswith("%"):  # _, or a name that inline assembly throws away
            return
        width = _width(self.program, name)
        if value.dtype.kind != "b":
            if value.itemsize < width:
                value = value.astype(f"{value.dtype.kind}{width}")
            value = value.view(f"u{width}")
        if value.size != self.lanes:
            value = np.broadcast_to(value, self.lanes)
        self.registers[name] = value if mask is None else np.where(mask, value, self.registers[name])


def _width(program: Program, name: str) -> int:
    return 4 if name in _SPECIAL else program.registers[name.rstrip("0123456789")]


def _least_shared(program: Program) -> int:
    """Return the bytes of the smallest number that the program moves in shared memory."""
    moves = [each.words for each in program.instructions if "shared" in each.words]
    return min((BYTES[words[-1]] for words in moves), default=4)


def _step(program: Program, instruction: Instruction) -> Step:
    """Return the function that executes an instruction for the threads of a mask, None being all."""
    kind = instruction.words[0]
    make = _FORMS.get(kind, _compute)
    execute = make(program, instruction)
    if not instruction.guard or kind in {"bra", "ret", "bar"}:
        return execute

    def guarded(blocks: _Blocks, mask: np.ndarray | None) -> None:
        allowed = blocks.guard(instruction.guard)
        both = allowed if mask is None else mask & allowed
        if both.any():
            execute(blocks, None if both.all() else both)

    return guarded


def _reader(program: Program, operand: str, kind: str) -> Callable[[_Registers], np.ndarray]:
    """Return the function that finds an operand as an array of its type, of one number for a constant."""
    dtype = np.dtype(DTYPES[kind])
    if not operand.startswith(("%", "!%")):
        constant = _constant(operand, dtype)
        return lambda registers: constant
    if operand.startswith("!"):
        return lambda registers: ~registers[operand[1:]]
    width = _width(program, operand)
    if dtype.kind == "b":
        return lambda registers: registers[operand]
    if dtype.itemsize == width:
        return lambda registers: registers[operand].view(dtype)
    return lambda registers: registers[operand].astype(f"u{dtype.itemsize}").view(dtype)


def _constant(text: str, dtype: np.dtype) -> np.ndarray:
    if dtype.kind == "b":
        return np.array([text not in {"0", "false"}])
    if match := re.fullmatch(r"0[fFdD]([0-9a-fA-F]+)", text):
        return np.array([int(match[1], 16)], f"u{len(match[1]) // 2}").view(dtype)
    number = (
        0 if re.fullmatch(r"[A-Za-z_$][\w$]*", text) else int(text.rstrip("U"), 0)
    )  # a name is that of all shared memory
    return np.array([number & (2 ** (8 * dtype.itemsize) - 1)], f"u{dtype.itemsize}").view(dtype)


def _address(program: Program, operand: str, kind: str) -> Callable[[_Registers], np.ndarray]:
    base, offset = re.fullmatch(r"\[\s*([%\w$.]+)\s*(?:\+\s*(-?\w+))?\s*\]", operand).groups()
    read = _reader(program, base, kind)
    add = _constant(offset or "0", np.dtype(DTYPES[kind]))
    return lambda registers: read(registers) + add


def _names(operand: str) -> list[str]:
    return operand_list(operand[1:-1]) if operand.startswith("{") else [operand]


def _compute(program: Program, instruction: Instruction) -> Step:
    result, kinds, compute = operation(instruction.words)
    target, *sources = instruction.operands
    if instruction.words[0] in {"min", "max"} and len(sources) == 3:  # from sm_100 on
        of_two, kinds = compute, (*kinds, kinds[0])
        compute = lambda a, b, c: of_two(of_two(a, b), c)  # noqa: E731
    readers = [_reader(program, source, kind) for source, kind in zip(sources, kinds, strict=True)]
    dtype = np.dtype(DTYPES[result])

    def execute(blocks: _Blocks, mask: np.ndarray | None) -> None:
        value = compute(*(read(blocks.registers) for read in readers))
        blocks.write(target, value.view(dtype) if value.itemsize == dtype.itemsize else value.astype(dtype), mask)

    return execute


def _move(program: Program, instruction: Instruction) -> Step:
    target, source = instruction.operands
    kind = instruction.words[-1]
    into, parts = _names(target), _names(source)
    width = BYTES[kind] // max(len(into), len(parts))
    part = kind if width == BYTES[kind] else f"b{8 * width}"
    readers = [_reader(program, each, kind if len(into) > 1 else part) for each in parts]

    def execute(blocks: _Blocks, mask: np.ndarray | None) -> None:
        values = [read(blocks.registers) for read in readers]
        if len(into) > 1:
            values = list(np.ascontiguousarray(values[0]).view(f"u{width}").reshape(-1, len(into)).T)
        elif len(values) > 1:
            values = [np.stack(np.broadcast_arrays(*values), 1).view(DTYPES[kind]).ravel()]
        for name, value in zip(into, values, strict=True):
            blocks.write(name, value, mask)

    return execute


def _load(program: Program, instruction: Instruction) -> Step:
    if "param" in instruction.words:
        return _load_parameter(program, instruction)
    into, dtype = _names(instruction.operands[0]), np.dtype(DTYPES[instruction.words[-1]])
    place, text = _placed(program, instruction, instruction.operands[1]), _said(instruction)

    def execute(blocks: _Blocks, mask: np.ndarray | None) -> None:
        chosen, lanes = blocks.active(mask, text)
        memory, address = place(blocks)
        loaded = memory.load(address[chosen], dtype.itemsize, len(into), lanes)
        for name, value in zip(into, loaded.T, strict=True):
            whole = np.zeros(blocks.lanes, dtype)
            whole[chosen] = value.view(dtype) if value.flags.c_contiguous else np.ascontiguousarray(value).view(dtype)
            blocks.write(name, whole, mask)

    return execute


def _load_parameter(program: Program, instruction: Instruction) -> Step:
    (target, source), dtype = instruction.operands, np.dtype(DTYPES[instruction.words[-1]])
    name, offset = re.fullmatch(r"\[(\w+)(?:\+(\d+))?\]", source).groups()

    def execute(blocks: _Blocks, mask: np.ndarray | None) -> None:
        blocks.write(target, np.frombuffer(blocks.parameters[name], dtype, 1, int(offset or 0)), mask)

    return execute


def _store(program: Program, instruction: Instruction) -> Step:
    kind = instruction.words[-1]
    readers = [_reader(program, each, kind) for each in _names(instruction.operands[1])]
    place, text = _placed(program, instruction, instruction.operands[0]), _said(instruction)

    def execute(blocks: _Blocks, mask: np.ndarray | None) -> None:
        chosen, lanes = blocks.active(mask, text)
        memory, address = place(blocks)
        values = [np.broadcast_to(read(blocks.registers), blocks.lanes)[chosen] for read in readers]
        memory.store(address[chosen], np.stack(values, 1).view(f"u{BYTES[kind]}"), lanes)

    return execute


def _placed(program: Program, instruction: Instruction, operand: str) -> Callable:
    """Return the function that gives the memory that an operand is in, and its address for each thread."""
    if not {"shared", "global"} & set(instruction.words):
        raise NotExecuted(f"the interpreter knows global and shared memory only: {instruction.text}")
    shared = "shared" in instruction.words
    address = _address(program, operand, "u32" if shared else "u64")
    return lambda blocks: (
        blocks.shared if shared else blocks.memory, np.broadcast_to(address(blocks.registers), blocks.lanes)
    )  # fmt: skip


def _said(instruction: Instruction) -> str:
    return f"{instruction.text} ({instruction.source})"


def _shuffle(program: Program, instruction: Instruction) -> Step:
    if instruction.words[1] != "sync" or instruction.operands[4] not in {"-1", "0xffffffff"}:
        raise NotExecuted(f"the interpreter shuffles whole warps only: {instruction.text}")
    target, predicate = (*instruction.operands[0].split("|"), "_")[:2]
    readers = [_reader(program, each, "u32") for each in instruction.operands[1:4]]

    def execute(blocks: _Blocks, mask: np.ndarray | None) -> None:
        blocks.warps(mask, instruction)
        value, by, limits = (np.broadcast_to(read(blocks.registers), blocks.lanes).reshape(-1, WARP).astype(np.int64)
                             for read in readers)  # fmt: skip
        lane = np.arange(WARP)
        segment, clamp = limits >> 8 & 31, limits & 31
        last, by = (lane & segment) | (clamp & ~segment), by & 31
        source = {
            "up": lane - by, "down": lane + by, "bfly": lane ^ by, "idx": (lane & segment) | (by & ~segment)
        }[instruction.words[2]]  # fmt: skip
        there = source >= last if instruction.words[2] == "up" else source <= last
        shuffled = np.take_along_axis(value, np.where(there, source, lane) & 31, 1)
        blocks.write(target, shuffled.astype(np.uint32).ravel(), mask)
        blocks.write(predicate, there.ravel(), mask)

    return execute


def _warp_barrier(program: Program, instruction: Instruction) -> Step:
    def execute(blocks: _Blocks, mask: np.ndarray | None) -> None:
        blocks.warps(mask, instruction)
        blocks.warp_phase = blocks.warp_phase + (1 if mask is None else mask)

    return execute


def _matrix_product(program: Program, instruction: Instruction) -> Step:
    product = matrices.product(instruction.words)
    d, a, b, c = map(_names, instruction.operands)
    readers = [[_reader(program, each, kind) for each in names] for names, kind in ((a, "b32"), (b, "b32"), (c, "f32"))]

    def execute(blocks: _Blocks, mask: np.ndarray | None) -> None:
        blocks.warps(mask, instruction)
        fragments = ([np.broadcast_to(read(blocks.registers), blocks.lanes).reshape(-1, WARP) for read in each]
                     for each in readers)  # fmt: skip
        for name, value in zip(d, product(*fragments), strict=True):
            blocks.write(name, value.ravel(), mask)

    return execute


def _matrix_load(program: Program, instruction: Instruction) -> Step:
    into, transposed = _names(instruction.operands[0]), "trans" in instruction.words
    place, text = _placed(program, instruction, instruction.operands[1]), _said(instruction)

    def execute(blocks: _Blocks, mask: np.ndarray | None) -> None:
        blocks.warps(mask, instruction)
        chosen, lanes = blocks.active(mask, text)
        memory, address = place(blocks)
        for number, name in enumerate(into):
            for half, offsets in enumerate(matrices.halves(address[chosen], number, transposed)):
                loaded = memory.load(offsets, 2, 1, lanes)[:, 0].astype(np.uint32)
                whole = np.zeros(blocks.lanes, np.uint32)
                whole[chosen] = loaded << np.uint32(16 * half)
                blocks.write(name, whole if half == 0 else whole | blocks.registers[name], mask)

    return execute


def _matrix_store(program: Program, instruction: Instruction) -> Step:
    sources = [_reader(program, each, "b32") for each in _names(instruction.operands[1])]
    transposed = "trans" in instruction.words
    place, text = _placed(program, instruction, instruction.operands[0]), _said(instruction)

    def execute(blocks: _Blocks, mask: np.ndarray | None) -> None:
        blocks.warps(mask, instruction)
        chosen, lanes = blocks.active(mask, text)
        memory, address = place(blocks)
        for number, read in enumerate(sources):
            value = np.broadcast_to(read(blocks.registers), blocks.lanes)[chosen]
            for half, offsets in enumerate(matrices.halves(address[chosen], number, transposed)):
                memory.store(offsets, (value >> np.uint32(16 * half)).astype(np.uint16)[:, None], lanes)

    return execute


def _nothing(program: Program, instruction: Instruction) -> Step:
    return lambda blocks, mask: None


_FORMS = {
    "mov": _move,
    "ld": _load,
    "st": _store,
    "shfl": _shuffle,
    "bar": _warp_barrier,
    "mma": _matrix_product,
    "ldmatrix": _matrix_load,
    "stmatrix": _matrix_store,
    "bra": _nothing,
    "ret": _nothing,
    "exit": _nothing,
}
