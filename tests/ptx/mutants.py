"""Changes of a PTX text, each of which a test of the kernel should notice: another opcode, operand, mask or offset.

A mutant is drawn in two steps, a kind and then one of the lines that it applies to, so that the few barriers and masks
of a kernel come as often as its arithmetic.
"""

import random
import re
from collections.abc import Callable
from typing import NamedTuple

_SWAPPED = {
    "add.": "sub.", "sub.": "add.", "mul.f32": "add.f32", "mul.rn.f32": "add.rn.f32", "and.b": "or.b", "or.b": "and.b",
    "xor.b32": "and.b32", "shl.b": "shr.u", "shr.u": "shl.b", "shr.s": "shl.b", "setp.lt": "setp.le",
    "setp.ge": "setp.gt", "setp.gt": "setp.ge", "setp.eq": "setp.ne", "setp.ne": "setp.eq", "max.f32": "min.f32",
    "ex2.approx": "rcp.approx", "rsqrt.approx": "rcp.approx", "div.full.f32": "mul.f32", "div.s32": "rem.s32",
    "rem.s32": "div.s32", "and.pred": "or.pred", "shfl.sync.bfly": "shfl.sync.up", "shfl.sync.up": "shfl.sync.bfly",
    "mul.lo.s32": "add.s32", "neg.": "not.", "abs.f32": "neg.f32", "cvt.rn.f32.s32": "cvt.rn.f32.u32",
}  # fmt: skip


_CONSTANT_GUARD = r"mov\.pred\s+(%p\d+), (0|-1);"


class Mutant(NamedTuple):
    """A line of a PTX text and what stands there instead; an empty `after` removes it."""

    kind: str
    line: int
    before: str
    after: str

    def of(self, ptx: str) -> str:
        """Return the changed text."""
        lines = ptx.splitlines()
        lines[self.line] = lines[self.line].replace(self.before, self.after, 1)
        return "\n".join(lines) + "\n"


def draw(ptx: str, chance: random.Random) -> Mutant:
    """Return one change of the kernel in `ptx`."""
    start, end = ptx.index(".entry"), ptx.index("\n}\n")
    first, last = ptx.count("\n", 0, start), ptx.count("\n", 0, end)
    code = [_as_guarded(line.partition("//")[0], dict(re.findall(_CONSTANT_GUARD, ptx))) for line in ptx.splitlines()]
    for kind in chance.sample(sorted(_KINDS), len(_KINDS)):
        lines = list(range(first, last + 1))
        chance.shuffle(lines)
        for number in lines:
            for changed in _KINDS[kind](code[number], chance):
                return Mutant(kind, number, *changed)
    raise ValueError("nothing in this PTX can be changed")


def _as_guarded(line: str, constants: dict[str, str]) -> str:
    """Return the line without a guard that is always open, and nothing where it is always shut."""
    found = re.match(r"(\s+)@(%p\d+) ", line)
    if found is None or found[2] not in constants:
        return line
    return "" if constants[found[2]] == "0" else line.replace(f"@{found[2]} ", "", 1)


def _opcode(line: str, chance: random.Random):
    for before, after in _SWAPPED.items():
        if re.match(rf"\s+(@!?%p\d+ )?{re.escape(before)}", line):
            yield before, after


def _operand(line: str, chance: random.Random):
    """Take another register of the same class, or the next number.

    A mask of bits loses its lowest one, and a shuffle reaches twice as far: the next number may change nothing there.
    """
    found = re.match(r"\s+(add|sub|mul|mad|fma|selp|setp|shfl|and|or|shl|bfe|max)[\w.]*\s+[^,]+,(.*);", line)
    if found is None:
        return
    registers = re.findall(r"%[a-z]+\d+", found[2])
    numbers = [each for each in re.findall(r"(?<![\w%.])\d+(?!\w)", found[2]) if each != "31"]
    if len(set(registers)) > 1:
        other = next(each for each in registers if each != registers[0])
        yield found[2], re.sub(rf"{registers[0]}(?!\d)", other, found[2], count=1)
    elif numbers:
        number = int(numbers[0])
        changed = {"and": number & (number - 1), "shfl": 2 * number}.get(found[1], number + 1)
        yield found[2], re.sub(rf"(?<![\w%.]){numbers[0]}(?!\w)", str(changed), found[2], count=1)


def _mask(line: str, chance: random.Random):
    """Let a guarded access be made by everyone, or by those who should not."""
    found = re.match(r"\s+@(%p\d+) (ld|st)", line)
    if found:
        yield chance.choice([(f"@{found[1]} ", ""), (f"@{found[1]} ", f"@!{found[1]} ")])


def _offset(line: str, chance: random.Random):
    """Move an access by two bytes, or by the size of its numbers."""
    found = re.search(r"\b(?:ld|st)\.(?:global|shared)\S*\.b(\d+)\b.*?(\[\s*%\w+)( \+ \d+)?", line)
    if found:
        by = chance.choice([2, int(found[1]) // 8])
        number = int((found[3] or " + 0")[3:])
        yield found[2] + (found[3] or ""), f"{found[2]} + {number + by}"


def _barrier(line: str, chance: random.Random):
    if re.match(r"\s+bar\.(sync|warp\.sync)", line):
        yield line.strip(), ""


_KINDS: dict[str, Callable] = {
    "opcode": _opcode, "operand": _operand, "mask": _mask, "offset": _offset, "barrier": _barrier
}  # fmt: skip
