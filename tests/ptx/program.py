"""Reads the PTX of one kernel: its parameters, the widths of its registers and its instructions."""

import re
from dataclasses import dataclass
from functools import lru_cache

_KINDS = {
    1: "pred b8 u8 s8",
    2: "b16 u16 s16 f16 bf16",
    4: "b32 u32 s32 f32 f16x2 bf16x2 s16x2 u16x2",
    8: "b64 u64 s64 f64",
}
BYTES = {kind: size for size, kinds in _KINDS.items() for kind in kinds.split()}


@dataclass(frozen=True)
class Instruction:
    """One instruction: `words` are its opcode split at the dots, `guard` the predicate that must hold ("!%p1")."""

    text: str
    words: tuple[str, ...]
    operands: tuple[str, ...]
    guard: str
    source: str


@dataclass(frozen=True)
class Program:
    """A kernel. `labels` give the position of an instruction, `registers` the bytes of each prefix ("%rd")."""

    name: str
    parameters: tuple[tuple[str, str], ...]
    threads: int
    registers: dict[str, int]
    instructions: tuple[Instruction, ...]
    labels: dict[str, int]


@lru_cache(maxsize=4096)
def parse(ptx: str) -> Program:
    """Return the one kernel in `ptx`; raises ValueError where there is none."""
    match = re.search(r"\.entry (\S+)\((.*?)\)(.*?)\n\{(.*?)\n\}", ptx, re.DOTALL)
    if match is None:
        raise ValueError("this PTX has no kernel")
    name, parameters, limits, body = match.groups()
    threads = re.search(r"\.(?:req|max)ntid (\d+)", limits)
    instructions, labels, registers, source = [], {}, {}, ""
    for line in body.splitlines():
        code, _, comment = line.partition("//")
        for statement in _statements(code):
            if statement.startswith(".loc"):
                source = comment.strip()
            elif declared := re.match(r"\.reg \.(\w+)\s+(%[a-z]+)<", statement):
                registers[declared[2]] = BYTES[declared[1]]
            elif statement.endswith(":"):
                labels[statement[:-1]] = len(instructions)
            elif not statement.startswith("."):
                instructions.append(_instruction(statement, source))
    kinds = tuple(re.findall(r"\.param \.(\w+)[^,]*?(\w+)(?:,|$)", re.sub(r"\s+", " ", parameters).strip()))
    return Program(name, kinds, int(threads[1]) if threads else 32, registers, tuple(instructions), labels)


def _statements(code: str) -> list[str]:
    label = re.match(r"\s*([\w$]+:)(.*)", code)
    pieces = [label[1], *label[2].split(";")] if label else code.split(";")
    # braces around inline assembly only hold names of its own
    stripped = (re.sub(r"^\{(?=\s*(?:\.|$))|^\}$", "", piece.strip()).strip() for piece in pieces)
    return [piece for piece in stripped if piece]


def _instruction(statement: str, source: str) -> Instruction:
    guard, opcode, operands = re.fullmatch(r"(?:@(!?%\w+)\s+)?([\w.:]+)\s*(.*)", statement, re.DOTALL).groups()
    words = tuple(opcode.replace("::cta", "").split("."))
    return Instruction(" ".join(statement.split()), words, tuple(operand_list(operands)), guard or "", source)


def operand_list(text: str) -> list[str]:
    """Return the operands in `text`: a vector in braces and an address in brackets are one each."""
    return [each.strip() for each in re.findall(r"\{[^}]*\}|\[[^\]]*\]|[^,\s][^,]*", text)]
