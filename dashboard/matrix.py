"""Arranges the choices as a matrix of models by boards, or by kinds of board if there are many; pure functions."""

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from benchd.dashboard.answers import Choice, Kind, Outcome

MOST_BOARDS = 24  # maximum number shown individually; more boards are grouped by kind


class MatrixRow(NamedTuple):
    """A board, with its id, or a kind of board, without one, of which `boards` have a choice."""

    device_id: str
    kind: Kind
    boards: int


class Cell(NamedTuple):
    """The choice of a row's boards, `device_ids`, for a model: `lead` has the median time among those `agreeing`.

    `range_ms` is their smallest and largest median, or None for a single board. `failed` contains variants and the
    number of boards on which they fail their check; `slower` is the number of boards that became slower since their
    last setup.
    """

    lead: Choice
    agreeing: int
    device_ids: frozenset[str]
    range_ms: tuple[float, float] | None
    others: tuple[str, ...]
    failed: tuple[tuple[str, int], ...]
    slower: int

    @property
    def boards(self) -> int:
        """Return how many boards there are."""
        return len(self.device_ids)


class Matrix(NamedTuple):
    """The models, sorted by the number of boards that have them, the rows, and the known cells."""

    subjects: list[str]
    rows: list[MatrixRow]
    cells: dict[tuple[str, MatrixRow], Cell]


def matrix(choices: Iterable[Choice], order: Sequence[str], *, by_kind: bool) -> Matrix:
    """Return the matrix of these choices, with boards in this `order` of ids, or the most common kinds first."""
    known = list(choices)
    boards: dict[tuple[str, Kind], set[str]] = defaultdict(set)
    for choice in known:
        boards[_key(choice, by_kind)].add(choice.device_id)
    rows = {key: MatrixRow(*key, len(ids)) for key, ids in boards.items()}
    groups: dict[tuple[str, MatrixRow], list[Choice]] = defaultdict(list)
    for choice in known:
        groups[choice.subject, rows[_key(choice, by_kind)]].append(choice)
    place = {device_id: number for number, device_id in enumerate(order)}
    ordered = sorted(rows.values(), key=lambda row: (-row.boards, place.get(row.device_id, 0), row.kind))
    spread = Counter(choice.subject for choice in known)
    subjects = sorted(spread, key=lambda subject: (-spread[subject], subject))
    return Matrix(subjects, ordered, {where: _cell(group) for where, group in groups.items()})


def _key(choice: Choice, by_kind: bool) -> tuple[str, Kind]:
    return ("" if by_kind else choice.device_id), choice.kind


def _cell(group: Sequence[Choice]) -> Cell:
    tally = Counter((choice.outcome, choice.variant) for choice in group)
    (usual, agreeing), *rest = tally.most_common()
    same = sorted((choice for choice in group if (choice.outcome, choice.variant) == usual), key=_time_ms)
    return Cell(
        lead=same[len(same) // 2],
        agreeing=agreeing,
        device_ids=frozenset(choice.device_id for choice in group),
        range_ms=(_time_ms(same[0]), _time_ms(same[-1])) if len(group) > 1 and same[0].result else None,
        others=tuple(f"{number} {_other(*choice)}" for choice, number in rest),
        failed=tuple(sorted(Counter(name for choice in group for name in choice.failed).items())),
        slower=sum(choice.change is not None and choice.change.verdict.answer == "slower" for choice in group),
    )


def _other(outcome: Outcome, variant: str) -> str:
    return variant + (" inconclusive" if outcome == "inconclusive" else "") if variant else "nothing to ship"


def _time_ms(choice: Choice) -> float:
    return (choice.result.median_ms or 0.0) if choice.result else 0.0
