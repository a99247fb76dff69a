"""Stores how much identical code differs on this machine, in A/A comparisons, and derives each case's noise floor.

The interval of a comparison already accounts for the variation among its own processes. The floor accounts for the
rest: how far identical code differed although a narrow interval excluded 0.
"""

import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import closing
from typing import TextIO

import msgspec
from msgspec import Struct

from benchd.daemon import journal
from benchd.daemon.errors import SchemaError
from benchd.daemon.machine import folders
from benchd.daemon.records import unix_s
from benchd.daemon.trigger import DAY_S
from benchd.daemon.verdicts.effects import LOOKS, SAME_MARGIN, Answer
from benchd.daemon.verdicts.statistics import percentile

FILE = "noise_floor.jsonl"
FEWEST = 5
"""The minimum number of A/A comparisons of a case for a floor: a single one may be due to chance."""

NEWEST_DAYS = 30
"""The number of days after which comparisons no longer count, because the disturbance may be gone."""

Case = tuple[str, str, str, bool]
"""The device id, `cpu` or `cuda`, the case id, and whether the processes of a pair were interleaved."""


class AaEffect(Struct, frozen=True, kw_only=True):
    """One comparison of a case with itself; `effect` is the second arm divided by the first, minus 1."""

    device_id: str
    device: str
    case_id: str
    effect: float
    effect_low: float | None = None
    effect_high: float | None = None
    answer: Answer
    pairs: int
    interleaved: bool = False
    t_wall: str

    @property
    def case(self) -> Case:
        """Return the case to which this noise belongs."""
        return self.device_id, self.device, self.case_id, self.interleaved

    @property
    def beyond_interval(self) -> float | None:
        """Return the size of the effect, 0 if its interval contains 0; None if the comparison is not precise enough.

        It is precise enough with at least as many pairs as at the first look, and an interval of at most 1 % either
        way.
        """
        low, high = self.effect_low, self.effect_high
        if low is None or high is None or high - low > 2 * SAME_MARGIN or self.pairs < LOOKS[0]:
            return None
        if not low <= self.effect <= high:
            return None
        return 0.0 if low <= 0.0 <= high else abs(self.effect)

    def is_within(self, days: int, now_s: float) -> bool:
        """Return whether it was measured in the last `days` days; False for a future or missing date."""
        when_s = unix_s(self.t_wall)
        return when_s is not None and 0.0 <= now_s - when_s <= days * DAY_S


class NoiseFloor(Struct, frozen=True, kw_only=True):
    """The noise floor of a case from `counted` of its `stored` comparisons; None while there are too few."""

    device_id: str
    device: str
    case_id: str
    interleaved: bool = False
    stored: int
    counted: int
    floor: float | None


def add(effect: AaEffect) -> None:
    """Append one effect to the stored ones, synced to disk."""
    with closing(journal.Journal(folders.state() / FILE)) as log:
        log.append(msgspec.json.encode(effect))


def stored() -> list[AaEffect]:
    """Return the stored effects, oldest first; raise SchemaError for a damaged line."""
    path = folders.state() / FILE
    if not path.exists():
        return []
    try:
        return [msgspec.json.decode(line, type=AaEffect) for line in journal.read(path)]
    except msgspec.DecodeError as error:
        raise SchemaError(
            f"{path}: {error}; remove the damaged line, or all with `benchd noise-floor --clear`"
        ) from error


def every() -> list[NoiseFloor]:
    """Return the noise floor of each case with stored effects."""
    by_case: dict[Case, list[AaEffect]] = {}
    for effect in stored():
        by_case.setdefault(effect.case, []).append(effect)
    return [_floor(effects) for effects in by_case.values()]


def _floor(effects: Sequence[AaEffect]) -> NoiseFloor:
    newest = [effect for effect in effects if effect.is_within(NEWEST_DAYS, time.time())]
    sizes = sorted(size for effect in newest if (size := effect.beyond_interval) is not None)
    device_id, device, case_id, interleaved = effects[0].case
    return NoiseFloor(
        device_id=device_id,
        device=device,
        case_id=case_id,
        interleaved=interleaved,
        stored=len(effects),
        counted=len(sizes),
        floor=percentile(sizes, 95) if len(sizes) >= FEWEST else None,
    )


def of_device(device_id: str, device: str, *, interleaved: bool = False) -> dict[str, float]:
    """Return the noise floors of this device (cpu or cuda) by case, for interleaved or consecutive processes."""
    wanted = (device_id, device, interleaved)
    return {
        device_floor.case_id: device_floor.floor
        for device_floor in every()
        if device_floor.floor and (device_floor.device_id, device_floor.device, device_floor.interleaved) == wanted
    }


def clear(case_id: str | None = None) -> int:
    """Delete the stored effects of a case, or all; return how many there were."""
    path = folders.state() / FILE
    if case_id is None:  # works even if the file is damaged
        with journal.explaining(path):
            count = len(path.read_bytes().splitlines()) if path.exists() else 0
            path.unlink(missing_ok=True)
        return count
    effects = stored()
    kept = [effect for effect in effects if effect.case_id != case_id]
    if len(kept) < len(effects):
        journal.replace(path, (msgspec.json.encode(effect) + b"\n" for effect in kept))
    return len(effects) - len(kept)


def report(floors: Mapping[str, float], case_ids: Iterable[str], asked: float, err: TextIO) -> None:
    """Print the smallest effect that counts, for each case whose noise floor exceeds the requested effect."""
    err.writelines(
        f"{case_id}: less than {100 * floors[case_id]:.2g} % does not count: identical code differs by that much here\n"
        for case_id in dict.fromkeys(case_ids)
        if floors.get(case_id, 0.0) > asked
    )
