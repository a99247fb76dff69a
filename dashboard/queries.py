"""The pages' queries to the store; each answer is a plain tuple."""

import itertools
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any, Literal, NamedTuple

import msgspec
from sqlalchemy import ColumnElement, Select, Subquery, exists, func, or_, select

from benchd.daemon.delivery.messages import DeployedFolder, Event, Health, Info, Latest
from benchd.daemon.records import PROFILED, Record, throttles
from benchd.daemon.verdicts.results import decoded
from benchd.daemon.verdicts.when import AHEAD_S, measured_s
from benchd.dashboard.limits import DAY_S, READ, SHOWN, day_s
from benchd.dashboard.messages import CLEARED, Result
from benchd.dashboard.schema import BODY, COLLECTOR, DEVICE, DOCUMENT, EVENT, RESULT, SPAN, TELEMETRY
from benchd.dashboard.store import Store, joined

STALE_S = 75.0  # a service reports its health every 30 s
LIVE_S = 5.0
NEWEST = 10_000  # number of results that can be paged through and searched
NEWEST_FIRST = (RESULT.c.measured_s.desc(), RESULT.c.arrived_s.desc())
PLACES = ("model", "variant", "case_id", "flags")  # columns that are searched for a text
UNCHECKED = "not checked"
MOST_MISSING = 1_000_000
NO_COLLECTOR = (
    "no collector is storing messages: start `benchd dashboard`, or one with --only collector; if one is running, its "
    "log says what prevents it, such as a full disk"
)
KNOWN_S = 7 * 86400.0  # a broker keeps a collector's messages for the same time

State = Literal["online", "silent", "unknown"]


class Device(NamedTuple):
    """A device as shown in the fleet. `age_s` is the time since its own last message, or None if there was none.

    `throttled` is None if no sensor has reported it recently.
    """

    device_id: str
    state: State
    age_s: float | None
    info: Info
    health: Health
    power_w: float | None
    temp_c: float | None
    throttled: bool | None


class Mark(NamedTuple):
    """An event of a device, or the start of a case; `at_s` is by the device's clock, if that can have been right."""

    at_s: float
    name: str
    detail: str


class CollectorState(NamedTuple):
    """A collector, the time when it last wrote, and what prevents it from storing more."""

    name: str
    seen_s: float
    problem: str | None


class Gap(NamedTuple):
    """Results or events of a device, by their numbers in one of its logs, that have not arrived."""

    device_id: str
    log: str
    first: int
    last: int


class Filter(NamedTuple):
    """A selection of results; an empty field matches all. `text` is searched in model, variant, case and flags.

    `device` is an id, `check` the verdict of the numerical check, or UNCHECKED; `since` and `until` are days in UTC.
    """

    device: str = ""
    model: str = ""
    variant: str = ""
    status: str = ""
    check: str = ""
    text: str = ""
    since: str = ""
    until: str = ""


class Page(NamedTuple):
    """A page of results, and the total number of matches, which is counted up to NEWEST."""

    results: list[Result]
    total: int


def fleet(store: Store, now_s: float, *, device_id: str = "") -> list[Device]:
    """Return the known devices by id, at most the READ most recently heard, or only the one with `device_id`."""
    page = _known(store)
    if device_id:
        page = select(DEVICE.c.device_id, DEVICE.c.seen_s).where(DEVICE.c.device_id == device_id)
    mine = select(page.subquery().c.device_id)
    with store.reading() as connection:
        known = connection.execute(page).all()
        kinds = DOCUMENT.c.kind.in_(("status", "info", "health"))
        wanted = select(DOCUMENT).where(kinds, DOCUMENT.c.device_id.in_(mine))
        documents = {(row.device_id, row.kind): row for row in connection.execute(wanted)}
        recent = (TELEMETRY.c.t_s.between(now_s - LIVE_S, now_s + AHEAD_S), TELEMETRY.c.device_id.in_(mine))
        live = connection.execute(select(TELEMETRY).where(*recent).order_by(TELEMETRY.c.t_s)).all()
    latest: dict[str, dict[str, float]] = defaultdict(dict)
    for row in live:
        latest[row.device_id] |= _values(row.body)
    return [_device(id_, seen_s, documents, latest[id_], now_s) for id_, seen_s in sorted(map(tuple, known))]


def _known(store: Store) -> Select[Any]:
    """Return the query for the devices to show, last heard first; devices with a cleared status have left."""
    mine = (DOCUMENT.c.device_id == DEVICE.c.device_id, DOCUMENT.c.kind == "status", DOCUMENT.c.body == CLEARED)
    known = select(DEVICE.c.device_id, DEVICE.c.seen_s).where(~exists().where(*mine))
    return known.order_by(DEVICE.c.seen_s.desc().nulls_last(), DEVICE.c.device_id).limit(READ)


def _device(
    device_id: str, seen_s: float | None, documents: dict[Any, Any], live: dict[str, float], now_s: float
) -> Device:
    status, info, health = (documents.get((device_id, kind)) for kind in ("status", "info", "health"))
    age_s = None if seen_s is None else max(now_s - seen_s, 0.0)
    reasons = [value for metric, value in live.items() if "throttle_reasons" in metric]
    return Device(
        device_id=device_id,
        state=presence(status.state if status else None, age_s),
        age_s=age_s,
        info=msgspec.json.decode(info.body, type=Info) if info else Info(),
        health=msgspec.json.decode(health.body, type=Health) if health else Health(),
        power_w=_highest(live, "power_w"),
        temp_c=_highest(live, "_temp_c"),
        throttled=any(map(throttles, reasons)) if reasons else None,
    )


def _values(body: bytes) -> dict[str, float]:
    """Return the values of a telemetry message by metric."""
    return msgspec.json.decode(body, type=dict[str, float])


def _highest(values: dict[str, float], ending: str) -> float | None:
    """Return the highest value of a kind of metric; powers are not summed, because a total exceeds its parts."""
    known = (value for metric, value in values.items() if metric.partition("@")[0].endswith(ending))
    return max(known, default=None)


def names(store: Store) -> dict[str, str]:
    """Return each known device's displayed name by id: the name with the id, or only the id."""
    mine = select(_known(store).subquery().c.device_id)
    ids = sorted(row.device_id for row in store.read(mine))
    wanted = select(DOCUMENT.c.device_id, DOCUMENT.c.body)
    infos = store.read(wanted.where(DOCUMENT.c.kind == "info", DOCUMENT.c.device_id.in_(mine)))
    named = {device_id: msgspec.json.decode(body, type=Info).name for device_id, body in infos}
    words = {device_id: named.get(device_id) or device_id for device_id in ids}
    return {device_id: name if name == device_id else f"{name} ({device_id})" for device_id, name in words.items()}


def devices(store: Store) -> int:
    """Return how many devices are known and have not left."""
    return int(store.read(select(func.count()).select_from(_known(store).limit(None).subquery()))[0][0])


def latest(store: Store, device_id: str) -> list[Latest]:
    """Return the device's verdict on the last result of each planned case, by case."""
    mine = (DOCUMENT.c.device_id == device_id, DOCUMENT.c.kind.startswith("latest/"))
    wanted = select(DOCUMENT.c.body).where(*mine).order_by(DOCUMENT.c.kind).limit(READ)
    return [msgspec.json.decode(body, type=Latest) for (body,) in store.read(wanted)]


class OnBoard(NamedTuple):
    """A shipped folder on a board, and when it was last verified, by the device's clock if that can have been right."""

    device_id: str
    found: DeployedFolder
    verified_s: float


def deployed(store: Store) -> list[OnBoard]:
    """Return every shipped folder in the fleet, sorted by name and then by board."""
    wanted = select(DOCUMENT.c.device_id, DOCUMENT.c.body, DOCUMENT.c.arrived_s).where(
        DOCUMENT.c.kind.startswith("shipped/"), DOCUMENT.c.state.is_not(None)
    )
    return [_on_board(*row) for row in store.read(wanted.order_by(DOCUMENT.c.kind, DOCUMENT.c.device_id).limit(READ))]


def _on_board(device_id: str, body: bytes, arrived_s: float) -> OnBoard:
    """Return the content of a retained document, which arrives again at every connection."""
    deployed = msgspec.json.decode(body, type=DeployedFolder)
    return OnBoard(device_id, deployed, measured_s(deployed.t_wall, arrived_s) or arrived_s)


def presence(said: str | None, age_s: float | None) -> State:
    """Return a device's last reported state, unless that report is too old to be reliable."""
    if said == "offline":
        return "silent"
    if said is None or age_s is None:
        return "unknown"
    return "silent" if age_s > STALE_S else "online"


def results(store: Store, which: Filter, sort: str, descending: bool, offset: int, limit: int) -> Page:
    """Return `limit` results from `offset` on, ordered by a column of Result; results without a value come last.

    Any order other than newest first applies only to the NEWEST matches, and so does a text search, so that no query
    reads every result.
    """
    name = sort if sort in Result._fields else "measured_s"
    if name == "measured_s" and descending and not which.text:
        source: Any = RESULT
        conditions = _conditions(which)
    else:
        source = _newest(which, columns(RESULT))
        conditions = _contains(source, which.text)
    column = source.c[name]
    # no index defines the order of NULLs
    order: list[ColumnElement[Any]] = [column.is_(None)] if column.nullable else []
    order += [
        sort_key.desc() if descending else sort_key.asc() for sort_key in (column, source.c.arrived_s, source.c.id)
    ]
    with store.reading() as connection:
        total: int = connection.execute(_count(which)).scalar_one()
        wanted = select(*columns(source)).where(*conditions).order_by(*order).offset(offset).limit(limit)
        return Page([Result(*row) for row in connection.execute(wanted)], total)


def after(store: Store, which: Filter, id_: int, limit: int) -> dict[int, Result]:
    """Return the first `limit` matching results after an id, by id in order of arrival."""
    mine = [*_conditions(which), *_contains(RESULT, which.text)]
    wanted = select(RESULT.c.id, *columns(RESULT)).where(RESULT.c.id > id_, *mine).order_by(RESULT.c.id).limit(limit)
    return {number: Result(*row) for number, *row in store.read(wanted)}


def _newest(which: Filter, selected: Sequence[Any]) -> Subquery:
    """Return the newest results that match all but the text, with their ids and these columns.

    They include the columns for searching and sorting, because PostgreSQL would read every result for a second look-up.
    """
    order = (*NEWEST_FIRST, RESULT.c.id.desc())
    return select(RESULT.c.id, *selected).where(*_conditions(which)).order_by(*order).limit(NEWEST).subquery()


def _count(which: Filter) -> Select[Any]:
    places = [RESULT.c[name] for name in PLACES] if which.text else []
    newest = _newest(which, places)
    return select(func.count()).select_from(newest).where(*_contains(newest, which.text))


def _conditions(which: Filter) -> list[ColumnElement[bool]]:
    exact = {"device_id": which.device, "model": which.model, "variant": which.variant, "status": which.status}
    checked = RESULT.c.checked.is_(None) if which.check == UNCHECKED else RESULT.c.checked == which.check
    conditions = [RESULT.c[name] == value for name, value in exact.items() if value]
    conditions += [checked] if which.check else []
    since_s, until_s = day_s(which.since), day_s(which.until)
    conditions += [] if since_s is None else [RESULT.c.measured_s >= since_s]
    return conditions + ([] if until_s is None else [RESULT.c.measured_s < until_s + DAY_S])


def _contains(table: Any, text: str) -> list[ColumnElement[bool]]:
    return [or_(*(table.c[name].icontains(text, autoescape=True) for name in PLACES))] if text else []


def columns(table: Any) -> list[Any]:
    """Return the columns that make up a Result."""
    return [table.c[name] for name in Result._fields]


def choices(store: Store, column: str) -> list[str]:
    """Return the sorted values of an indexed column of the results, finding each from the previous one."""
    value = RESULT.c[column]
    values = select(func.min(value).label("value")).cte(recursive=True)
    later = select(func.min(value)).where(value > values.c.value).scalar_subquery()
    values = values.union_all(select(later).select_from(values).where(values.c.value.is_not(None)))
    wanted = select(values.c.value).where(values.c.value.is_not(None)).limit(READ)
    return [row for (row,) in store.read(wanted)]


def result(store: Store, key: str) -> Result | None:
    """Return a result, or None if the key is unknown."""
    rows = store.read(select(*columns(RESULT)).where(RESULT.c.key == key))
    return Result(*rows[0]) if rows else None


def body(store: Store, key: str) -> bytes | None:
    """Return the original bytes of a record, or None if the key is unknown."""
    rows = store.read(select(BODY.c.body).where(BODY.c.key == key))
    return bytes(rows[0].body) if rows else None


def record(store: Store, key: str) -> Record | None:
    """Return a whole record, or None if the key is unknown."""
    stored = body(store, key)
    return None if stored is None else decoded(stored)


def history(store: Store, device_id: str, case_id: str, limit: int) -> list[Result]:
    """Return the newest measured results of a case on a device, oldest first, by time of measurement."""
    measured = (RESULT.c.median_ms > 0, ~RESULT.c.flags.contains(PROFILED))
    mine = (RESULT.c.device_id == device_id, RESULT.c.case_id == case_id, *measured)
    wanted = select(*columns(RESULT)).where(*mine).order_by(*NEWEST_FIRST).limit(limit)
    return [Result(*row) for row in reversed(store.read(wanted))]


def last_of_each_case(store: Store, since_s: float, limit: int) -> list[Result]:
    """Return the last result, even a failed one, of each case on each device, newest first, without profiles.

    It is limited to cases measured since `since_s` that the device has not cleared, as it does when a case leaves its
    plan; other results are not read.
    """
    mine = RESULT.alias()
    first = select(func.min(mine.c.case_id)).where(mine.c.device_id == DEVICE.c.device_id).scalar_subquery()
    cases = select(DEVICE.c.device_id, first.label("case_id")).cte(recursive=True)
    beyond = (mine.c.device_id == cases.c.device_id, mine.c.case_id > cases.c.case_id)
    later = select(func.min(mine.c.case_id)).where(*beyond).scalar_subquery()
    cases = cases.union_all(select(cases.c.device_id, later).where(cases.c.case_id.is_not(None)))
    same = (RESULT.c.device_id == cases.c.device_id, RESULT.c.case_id == cases.c.case_id)
    measured = select(RESULT.c.id).where(*same, ~RESULT.c.flags.contains(PROFILED))
    last = measured.order_by(*NEWEST_FIRST).limit(1).correlate(cases).scalar_subquery()
    topic = (DOCUMENT.c.device_id == cases.c.device_id, DOCUMENT.c.kind == "latest/" + cases.c.case_id)
    is_cleared = exists().where(*topic, DOCUMENT.c.body == CLEARED)
    ids = select(last).select_from(cases).where(cases.c.case_id.is_not(None), ~is_cleared)
    wanted = select(*columns(RESULT)).where(RESULT.c.id.in_(ids), RESULT.c.measured_s > since_s)
    return [Result(*row) for row in store.read(wanted.order_by(*NEWEST_FIRST).limit(limit))]


def series(store: Store, device_id: str, since_s: float) -> dict[str, list[tuple[float, float]]]:
    """Return pairs (Unix time, value) by metric, in order, for at most SHOWN metrics."""
    mine = select(TELEMETRY).where(TELEMETRY.c.device_id == device_id, TELEMETRY.c.t_s >= since_s)
    by_metric: dict[str, list[tuple[float, float]]] = {}
    for row in store.read(mine.order_by(TELEMETRY.c.t_s)):
        for metric, value in _values(row.body).items():
            if metric in by_metric or len(by_metric) < SHOWN:
                by_metric.setdefault(metric, []).append((row.t_s, value))
    return by_metric


def marks(store: Store, device_id: str, since_s: float) -> list[Mark]:
    """Return a device's last events and the ends of its cases, in order."""
    mine = (EVENT.c.device_id == device_id, EVENT.c.arrived_s >= since_s)
    newest = (EVENT.c.arrived_s.desc(), EVENT.c.id.desc())
    events = store.read(select(EVENT.c.arrived_s, EVENT.c.body).where(*mine).order_by(*newest).limit(SHOWN))
    ended = (RESULT.c.device_id == device_id, RESULT.c.measured_s >= since_s)
    rows = select(RESULT.c.measured_s, RESULT.c.case_id, RESULT.c.status, RESULT.c.checked).where(*ended)
    cases = store.read(rows.order_by(RESULT.c.measured_s.desc()).limit(READ))
    timed_events = [(arrived_s, msgspec.json.decode(body, type=Event)) for arrived_s, body in events]
    marks = [
        Mark(measured_s(event.t_wall, arrived_s) or arrived_s, event.event, event.detail)
        for arrived_s, event in timed_events
    ]
    marks += [
        Mark(at_s, "failed check" if checked == "failed" else f"case {status}", case_id)
        for at_s, case_id, status, checked in cases
    ]
    return sorted(mark for mark in marks if mark.at_s >= since_s)


def collectors(store: Store, now_s: float) -> list[CollectorState]:
    """Return the collectors that have run in the last seven days."""
    mine = [COLLECTOR.c[name] for name in CollectorState._fields]
    wanted = select(*mine).where(COLLECTOR.c.seen_s > now_s - KNOWN_S).order_by(COLLECTOR.c.name).limit(READ)
    return [CollectorState(*row) for row in store.read(wanted)]


def gaps(store: Store, *, online: bool = False) -> list[Gap]:
    """Return what has not arrived although devices sent it, by their last health; optionally only of those `online`.

    Messages that a device has still to send are not a gap, and neither is an implausibly large range.
    """
    status = DOCUMENT.alias()
    is_online = exists().where(
        status.c.device_id == DOCUMENT.c.device_id, status.c.kind == "status", status.c.state == "online"
    )
    known = select(DOCUMENT.c.device_id, DOCUMENT.c.body).where(DOCUMENT.c.kind == "health", *[is_online] * online)
    ranges: dict[tuple[str, str], list[tuple[int, int]]] = defaultdict(list)
    with store.reading() as connection:
        healths = connection.execute(known.order_by(DOCUMENT.c.device_id)).all()
        for row in connection.execute(select(SPAN.c.device_id, SPAN.c.log, SPAN.c.first, SPAN.c.last)):
            ranges[row.device_id, row.log].append((row.first, row.last))
    gaps = []
    for device_id, body in healths:
        health = msgspec.json.decode(body, type=Health)
        is_sent = health.pending <= health.refused
        logs = (health.log, health.first_seq, health.last_seq)
        event_logs = (health.event_log, health.event_first_seq, health.event_last_seq)
        for log, first, last in (logs, event_logs):
            stored = joined(ranges[device_id, log])
            end = last if is_sent else stored[-1][1] if stored else 0
            gaps += [Gap(device_id, log, *missing) for missing in _between(stored, first, end)]
    return [gap for gap in gaps if gap.last - gap.first < MOST_MISSING]


def _between(stored: Sequence[tuple[int, int]], first: int, last: int) -> Iterator[tuple[int, int]]:
    """Yield the ranges between `first` and `last` that are not in the sorted ranges `stored`."""
    for before, after in itertools.pairwise([(0, first - 1), *stored, (last + 1, last + 1)]):
        begin, end = max(before[1] + 1, first), min(after[0] - 1, last)
        if begin <= end:
            yield begin, end


def problems(store: Store, now_s: float) -> list[str]:
    """Return, in sentences, what prevents data from arriving here; empty if nothing does."""
    alive = [row for row in collectors(store, now_s) if now_s - row.seen_s < STALE_S]
    problems = [f"collector {row.name}: {row.problem}" for row in alive if row.problem]
    return problems if alive else [NO_COLLECTOR]


def newest(store: Store) -> tuple[int, int]:
    """Return numbers that change when a result or an event arrives."""
    last = (select(func.max(table.c.id)).scalar_subquery() for table in (RESULT, EVENT))
    ((result_id, event_id),) = store.read(select(*last))
    return result_id or 0, event_id or 0
