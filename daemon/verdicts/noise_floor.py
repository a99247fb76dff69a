"""By how much this machine calls identical code different: effects of A/A comparisons, and the floor made of them."""

from contextlib import closing
from typing import TextIO

import msgspec
from msgspec import Struct

from benchd.daemon import journal
from benchd.daemon.errors import SchemaError
from benchd.daemon.machine import folders
from benchd.daemon.verdicts.statistics import LOOKS, MIN_EFFECT, Answer, percentile

FILE = "noise_floor.jsonl"


class AaEffect(Struct, frozen=True, kw_only=True):
    """One comparison of a case with itself; `effect` is the second arm over the first, minus 1."""

    device_id: str
    device: str
    case_id: str
    effect: float
    answer: Answer
    pairs: int
    t_wall: str


def add(effect: AaEffect) -> None:
    """Keep one effect; a crash cannot take it back."""
    with closing(journal.Journal(folders.state() / FILE)) as kept:
        kept.append(msgspec.json.encode(effect))


def effects(device_id: str, device: str) -> list[AaEffect]:
    """Return what was kept of this device (cpu or cuda), the oldest first; raise SchemaError at a damaged line."""
    path = folders.state() / FILE
    if not path.exists():
        return []
    try:
        kept = [msgspec.json.decode(line, type=AaEffect) for line in journal.read(path)]
    except msgspec.DecodeError as error:
        raise SchemaError(f"{path}: {error}; remove the line that is not an effect") from error
    return [effect for effect in kept if (effect.device_id, effect.device) == (device_id, device)]


def floor(device_id: str, device: str) -> float | None:
    """Return the 95th percentile of the effects' sizes; None where no A/A comparison had as many pairs as a look.

    From fewer pairs the size of an effect is that of single processes.
    """
    sizes = sorted(abs(effect.effect) for effect in effects(device_id, device) if effect.pairs >= LOOKS[0])
    return percentile(sizes, 95) if sizes else None


def min_effect(device_id: str, device: str, asked: float = MIN_EFFECT) -> float:
    """Return the least effect that counts on this device: what was asked for, at least twice the floor."""
    return max(asked, 2 * (floor(device_id, device) or 0.0))


def report(least: float, asked: float, err: TextIO) -> None:
    """Print the smallest effect that counts if the noise floor raises it above the user's."""
    if least > asked:
        err.write(f"the smallest effect that counts is {100 * least:.2g} %, twice the noise floor of this device\n")
