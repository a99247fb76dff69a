"""Finds each board's condition, in one word; the worst come first on Home and Fleet."""

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Literal, NamedTuple, get_args

import msgspec
from sqlalchemy import select

from benchd.daemon.delivery.messages import Event, Latest
from benchd.daemon.verdicts.when import measured_s
from benchd.dashboard import queries
from benchd.dashboard.answers import Choice
from benchd.dashboard.changes import Change, extent
from benchd.dashboard.limits import READ
from benchd.dashboard.queries import Device
from benchd.dashboard.schema import DOCUMENT, EVENT
from benchd.dashboard.store import Store
from benchd.dashboard.text import age, figure

Condition = Literal["slower", "silent", "throttled", "failed check", "problem", "no status", "fine"]
CONDITIONS: tuple[Condition, ...] = get_args(Condition)
TROUBLES = CONDITIONS[:-2]  # conditions in which a board needs help
SHAPES: dict[Condition, str] = {
    "slower": "▲",
    "silent": "○",
    "throttled": "◆",
    "failed check": "✕",
    "problem": "■",
    "no status": "◌",
    "fine": "●",
}


class BoardCondition(NamedTuple):
    """A device, its worst problem, details, and since when it has been slower, if known."""

    device: Device
    condition: Condition
    detail: str
    since_s: float | None = None

    @property
    def name(self) -> str:
        """Return the configured name, or the id."""
        return self.device.info.name or self.device.device_id

    @property
    def words(self) -> str:
        """Return the condition with its sign and details."""
        return f"{SHAPES[self.condition]} {self.condition}{f': {self.detail}' if self.detail else ''}"


def boards(
    store: Store, choices: Mapping[str, Sequence[Choice]], now_s: float, changes: Iterable[Change] = ()
) -> list[BoardCondition]:
    """Return every known board, those in trouble first; `changes` tell how much slower their cases became."""
    slower, changed = _slower(store), defaultdict[str, list[Change]](list)
    regressed_s = _regressed_s(store, slower)
    for change in changes:
        changed[change.device_id].append(change)
    fleet = []
    for device in queries.fleet(store, now_s):
        id_ = device.device_id
        condition, detail = _worst(device, slower[id_], choices.get(id_, ()), changed[id_])
        began_s = [at_s for latest in slower[id_] if (at_s := regressed_s.get((id_, latest.case_id)))]
        began_s = began_s or [change.first_s for change in changed[id_] if change.verdict.answer == "slower"]
        since_s = min(began_s, default=None) if condition == "slower" else None
        fleet.append(BoardCondition(device, condition, detail, since_s))
    return sorted(fleet, key=lambda board: (CONDITIONS.index(board.condition), board.name))


def counts(fleet: Sequence[BoardCondition]) -> dict[Condition, int]:
    """Return how many boards are in each condition, from well to worst, without empty conditions."""
    number = Counter(board.condition for board in fleet)
    return {condition: number[condition] for condition in ("fine", *CONDITIONS[:-1]) if number[condition]}


def matches(device: Device, text: str) -> bool:
    """Return whether the name, id, site or a tag contains the text."""
    info = device.info
    return any(text.lower() in word.lower() for word in (info.name, device.device_id, info.site, *info.tags))


def looks(condition: Condition) -> str:
    """Return the CSS class of a condition."""
    return f"is-{condition.replace(' ', '-')}"


def _slower(store: Store) -> dict[str, list[Latest]]:
    """Return the cases that are slower than their baseline, by device."""
    wanted = select(DOCUMENT.c.device_id, DOCUMENT.c.body).where(
        DOCUMENT.c.kind.startswith("latest/"), DOCUMENT.c.state == "slower"
    )
    by_device: dict[str, list[Latest]] = defaultdict(list)
    for device_id, body in store.read(wanted.limit(10 * READ)):
        by_device[device_id].append(msgspec.json.decode(body, type=Latest))
    return by_device


def _regressed_s(store: Store, devices: Collection[str]) -> dict[tuple[str, str], float]:
    """Return when each case of these devices last became slower than its baseline, by device and case."""
    if not devices:
        return {}
    wanted = select(EVENT.c.device_id, EVENT.c.arrived_s, EVENT.c.body)
    wanted = wanted.where(EVENT.c.name == "regression", EVENT.c.device_id.in_(devices))
    regressed_s: dict[tuple[str, str], float] = {}
    for device_id, arrived_s, body in store.read(wanted.order_by(EVENT.c.arrived_s.desc()).limit(READ)):
        event = msgspec.json.decode(body, type=Event)
        if event.judgement:
            at_s = measured_s(event.t_wall, arrived_s) or arrived_s
            regressed_s.setdefault((device_id, event.judgement.case_id), at_s)
    return regressed_s


def _worst(
    device: Device, slower: Sequence[Latest], choices: Sequence[Choice], changes: Sequence[Change]
) -> tuple[Condition, str]:
    silent = f"last data {age(device.age_s)}" if device.state == "silent" else ""
    failed = [f"{choice.subject}: {', '.join(choice.failed)}" for choice in choices if choice.failed]
    reasons: dict[Condition, list[str]] = {
        "slower": [_than_baseline(latest) for latest in slower] + _since_setup(choices, changes),
        "silent": [silent] if silent else [],
        "throttled": ["its clocks are throttled"] if device.throttled else [],
        "failed check": failed,
        "problem": [device.health.problem] if device.health.problem else [],
        "no status": ["it has sent results, but no status"] if device.state == "unknown" else [],
        "fine": [""],
    }
    return next((condition, _first(details)) for condition, details in reasons.items() if details)


def _than_baseline(latest: Latest) -> str:
    return f"{latest.case_id}: {figure(latest.median_ms, 'ms')} against {figure(latest.baseline_ms, 'ms')}"


def _since_setup(choices: Sequence[Choice], changes: Sequence[Change]) -> list[str]:
    """Return how many cases became slower, by the kind of change, if any of them ships."""
    if not any(choice.change and choice.change.verdict.answer == "slower" for choice in choices):
        return []
    slower: dict[str, list[Change]] = defaultdict(list)
    for change in changes:
        if change.verdict.answer == "slower":
            slower[change.since].append(change)
    return [f"{extent(alike, len(changes))} since {since}" for since, alike in slower.items()]


def _first(reasons: Sequence[str]) -> str:
    return reasons[0] + (f", and {len(reasons) - 1} more" if reasons[1:] else "")
