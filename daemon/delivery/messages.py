"""What the service publishes beside records, and what is made of a record for readers that want one flat object.

Every message names its schema. docs/asyncapi.yaml describes them, and a test holds real ones against it.
"""

from datetime import datetime, timezone
from typing import Literal

from msgspec import Struct

from benchd.daemon.records import CheckVerdict, Environment, Record, Sample
from benchd.daemon.verdicts.recommend import energy_error_share
from benchd.daemon.verdicts.statistics import Answer


def wall_now() -> str:
    """Return the time as a label: UTC in RFC 3339."""
    return datetime.now(timezone.utc).isoformat(timespec="milliseconds").replace("+00:00", "Z")


class Status(Struct, frozen=True, kw_only=True):
    """Retained, and with `offline` the will: `session` counts connections, so that a late will is known as such.

    `instance` tells two machines with one device id apart, and `held_s`, how long this one is connected, which stays.
    """

    schema: str = "benchd.status/1"
    state: Literal["online", "offline"]
    session: int
    boot_id: str
    instance: str
    held_s: float
    t_wall: str


class SuiteInfo(Struct, frozen=True, kw_only=True):
    """One suite of the configuration and its cases."""

    name: str
    when: str | None
    cases: list[str]


class Info(Struct, frozen=True, kw_only=True):
    """Retained: who the device is and what it would measure."""

    schema: str = "benchd.info/1"
    device_id: str
    boot_id: str
    name: str
    site: str
    tags: list[str]
    tool_version: str
    environment: Environment
    suites: list[SuiteInfo]
    catalogue_sha256: str
    t_wall: str


class Health(Struct, frozen=True, kw_only=True):
    """Retained, every 30 s and around each case: what the service does, what waits for delivery, what is wrong.

    `problem` is null while nothing is; `waiting_for` says why a pass that is due has not begun.
    """

    schema: str = "benchd.health/1"
    t_wall: str
    uptime_s: float
    rss_bytes: int
    activity: str
    case_id: str | None
    cases_left: int
    next_suite: str | None
    next_suite_in_s: float | None
    waiting_for: str | None
    problem: str | None
    outbox_pending: int
    outbox_unstored: int
    outbox_refused: int
    outbox_bytes: int
    last_acknowledged_s: float | None
    telemetry_dropped: int
    disk_free_bytes: int


class Telemetry(Struct, frozen=True, kw_only=True):
    """At most once a second while a case runs: the last sample of every series."""

    schema: str = "benchd.telemetry/1"
    case_id: str
    samples: list[Sample]


class Judgement(Struct, frozen=True, kw_only=True):
    """What is said of results of a case against the runs that it is pinned to: the medians of the process medians.

    `effect` is the result over the baseline minus 1, with its interval; null, with the reason, where nothing was
    compared. A regression has the runs of both results that were slower.
    """

    case_id: str
    verdict: Answer
    reason: str | None = None
    median_ms: float | None = None
    baseline_ms: float | None = None
    effect: float | None = None
    effect_low: float | None = None
    effect_high: float | None = None
    run_ids: list[str] = []
    baseline_run_ids: list[str] = []


class Event(Struct, frozen=True, kw_only=True):
    """Something that happened; `event` names it and `detail` is for people.

    The events of a baseline have the judgement too, where there was one.
    """

    schema: str = "benchd.event/1"
    event: str
    detail: str
    t_wall: str
    boot_id: str
    judgement: Judgement | None = None


class Response(Struct, frozen=True, kw_only=True):
    """The answer to one command; `reason` says why it was refused."""

    schema: str = "benchd.response/1"
    id: str
    verb: str
    accepted: bool
    reason: str | None = None
    suite_id: str | None = None
    cases: list[str] = []
    suites: list[SuiteInfo] = []
    rows: int | None = None
    health: Health | None = None


class Latest(Struct, frozen=True, kw_only=True):
    """Retained, flat and small: the last result of a case, for Telegraf, Grafana and Home Assistant."""

    schema: str = "benchd.latest/1"
    case_id: str
    status: str
    run_id: str
    t_wall: str
    median_ms: float | None = None
    low_ms: float | None = None
    high_ms: float | None = None
    p99_ms: float | None = None
    throughput_per_s: float | None = None
    energy_mj: float | None = None
    energy_err_mj: float | None = None
    power_w: float | None = None
    temp_max_c: float | None = None
    check: CheckVerdict | None = None
    accuracy_top1: float | None = None
    accuracy_low: float | None = None
    accuracy_high: float | None = None
    accuracy_drop: float | None = None
    verdict: Answer | None = None
    verdict_reason: str | None = None
    baseline_ms: float | None = None


def latest(record: Record, judgement: Judgement | None = None) -> Latest:
    """Return the flat object of a record; energy is gross per inference, its error bar the same share of it."""
    timing, energy, accuracy = record.timing, record.energy, record.accuracy
    gross_mj = energy.gross_per_inference_j * 1e3 if energy else None
    share = energy_error_share(energy)
    windows = [process.window.seconds for process in record.processes if process.window]
    return Latest(
        case_id=record.case_id,
        status=record.status,
        run_id=record.run_id,
        t_wall=record.t_wall,
        median_ms=timing.median_ms if timing else None,
        low_ms=timing.low_ms if timing else None,
        high_ms=timing.high_ms if timing else None,
        p99_ms=timing.p99_ms if timing else None,
        throughput_per_s=record.throughput_per_s,
        energy_mj=gross_mj,
        energy_err_mj=gross_mj * share if gross_mj is not None and share is not None else None,
        power_w=energy.energy_j / sum(windows) if energy and windows else None,
        temp_max_c=max((summary.maximum for summary in record.temperature.values()), default=None),
        check=record.check.verdict if record.check else None,
        accuracy_top1=accuracy.top1 if accuracy else None,
        accuracy_low=accuracy.low if accuracy else None,
        accuracy_high=accuracy.high if accuracy else None,
        accuracy_drop=accuracy.drop if accuracy else None,
        verdict=judgement.verdict if judgement else None,
        verdict_reason=judgement.reason if judgement else None,
        baseline_ms=judgement.baseline_ms if judgement else None,
    )
