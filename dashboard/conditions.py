"""What is wrong with each board, in one word: the worst comes first on Home and Fleet."""

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from typing import Literal, NamedTuple, get_args

import msgspec
from sqlalchemy import select

from benchd.daemon.delivery.messages import Latest
from benchd.dashboard import queries
from benchd.dashboard.answers import Choice
from benchd.dashboard.limits import READ
from benchd.dashboard.queries import Device
from benchd.dashboard.schema import DOCUMENT
from benchd.dashboard.store import Store
from benchd.dashboard.text import age, figure, percent

Condition = Literal["slower", "silent", "throttled", "failed check", "problem", "no status", "fine"]
CONDITIONS: tuple[Condition, ...] = get_args(Condition)
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
    """A device, the worst that is wrong with it, and what exactly."""

    device: Device
    condition: Condition
    detail: str

    @property
    def name(self) -> str:
        """Return the configured name, or the id."""
        return self.device.info.name or self.device.device_id


def boards(store: Store, choices: Mapping[str, Sequence[Choice]], now_s: float) -> list[BoardCondition]:
    """Return every known board, those in trouble first."""
    slower = _slower(store)
    fleet = [
        BoardCondition(device, *_worst(device, slower[device.device_id], choices.get(device.device_id, ())))
        for device in queries.fleet(store, now_s)
    ]
    return sorted(fleet, key=lambda board: (CONDITIONS.index(board.condition), board.name))


def counts(fleet: Sequence[BoardCondition]) -> dict[Condition, int]:
    """Return how many boards are in each condition, those in none left out, fine ones first."""
    number = Counter(board.condition for board in fleet)
    return {condition: number[condition] for condition in ("fine", *CONDITIONS[:-1]) if number[condition]}


def matches(board: BoardCondition, text: str) -> bool:
    """Return whether the name, id, site or a tag contains the text."""
    info = board.device.info
    return any(text.lower() in word.lower() for word in (info.name, board.device.device_id, info.site, *info.tags))


def looks(condition: Condition) -> str:
    """Return the class of a condition."""
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


def _worst(device: Device, slower: Sequence[Latest], choices: Sequence[Choice]) -> tuple[Condition, str]:
    silent = f"last data {age(device.age_s)}" if device.state in ("stale", "offline") else ""
    failed = [f"{choice.subject}: {', '.join(choice.failed)}" for choice in choices if choice.failed]
    reasons: dict[Condition, list[str]] = {
        "slower": [_than_baseline(one) for one in slower] + _since_setup(choices),
        "silent": [silent] if silent else [],
        "throttled": ["its clocks are held down"] if device.throttled else [],
        "failed check": failed,
        "problem": [device.health.problem] if device.health.problem else [],
        "no status": ["it has sent results, but no status"] if device.state == "unknown" else [],
        "fine": [""],
    }
    return next((condition, _first(found)) for condition, found in reasons.items() if found)


def _than_baseline(latest: Latest) -> str:
    return f"{latest.case_id}: {figure(latest.median_ms, 'ms')} against {figure(latest.baseline_ms, 'ms')}"


def _since_setup(choices: Sequence[Choice]) -> list[str]:
    return [
        f"{choice.subject} {choice.variant}: {percent(verdict.effect)} % since {choice.change.since}"
        for choice in choices
        if choice.change and (verdict := choice.change.verdict).answer == "slower" and verdict.effect
    ]


def _first(reasons: Sequence[str]) -> str:
    return reasons[0] + (f", and {len(reasons) - 1} more" if reasons[1:] else "")
