"""How different this machine finds identical code: effects of A/A comparisons, and the noise floor from them."""

from contextlib import closing
from typing import TextIO

import msgspec
from msgspec import Struct

from benchd.daemon import journal
from benchd.daemon.errors import SchemaError
from benchd.daemon.machine import folders
from benchd.daemon.verdicts.effects import LOOKS, MIN_EFFECT, Answer
from benchd.daemon.verdicts.statistics import percentile

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
    """Store one effect, safe against a crash."""
    with closing(journal.Journal(folders.state() / FILE)) as kept:
        kept.append(msgspec.json.encode(effect))


def effects(device_id: str, device: str) -> list[AaEffect]:
    """Return the stored effects of this device (cpu or cuda), oldest first; raise SchemaError at a damaged line."""
    path = folders.state() / FILE
    if not path.exists():
        return []
    try:
        kept = [msgspec.json.decode(line, type=AaEffect) for line in journal.read(path)]
    except msgspec.DecodeError as error:
        raise SchemaError(f"{path}: {error}; remove the damaged line") from error
    return [effect for effect in kept if (effect.device_id, effect.device) == (device_id, device)]


def floor(device_id: str, device: str) -> float | None:
    """Return the 95th percentile of the effects' sizes; None if no A/A comparison had enough pairs for a look.

    With fewer pairs an effect reflects the noise of single processes, not that of a comparison.
    """
    sizes = sorted(abs(effect.effect) for effect in effects(device_id, device) if effect.pairs >= LOOKS[0])
    return percentile(sizes, 95) if sizes else None


def min_effect(device_id: str, device: str, asked: float = MIN_EFFECT) -> float:
    """Return the smallest effect that counts on this device: the user's, but at least twice the noise floor."""
    return max(asked, 2 * (floor(device_id, device) or 0.0))


def report(least: float, asked: float, err: TextIO) -> None:
    """Print the smallest effect that counts if the noise floor raises it above the user's."""
    if least > asked:
        err.write(f"the smallest effect that counts is {100 * least:.2g} %, twice the noise floor of this device\n")
