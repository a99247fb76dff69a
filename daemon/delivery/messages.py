"""The service's messages other than records, and a record as a flat object for readers that prefer one.

Every message includes its schema and all fields; readers ignore unknown fields of newer versions. docs/asyncapi.yaml
describes them, and a test checks real ones against it.
"""

from typing import Annotated, Literal

from msgspec import UNSET, Meta, Struct, UnsetType

from benchd.daemon.records import CheckVerdict, Environment, Record, Sample, ending
from benchd.daemon.verdicts.effects import Answer
from benchd.daemon.verdicts.rows import columns

# largest record; with its topic it still fits a 2 MiB packet, the most that a collector accepts
RESULT_BYTES = 2_000_000
Count = Annotated[int, Meta(ge=0, le=2**63 - 1)]  # the range of a database integer


class Status(Struct, frozen=True, kw_only=True):
    """Retained; the will contains the `offline` message.

    `session` is a random name for the connection: an `offline` whose session differs from the last `online` is a late
    will.
    """

    schema: str = "benchd.status/1"
    state: Literal["online", "offline"]
    session: str = ""
    boot_id: str = ""
    t_wall: str = ""


class SuiteInfo(Struct, frozen=True, kw_only=True):
    """A configured suite and its cases."""

    name: str
    when: str | None = None
    cases: list[str] = []


class Info(Struct, frozen=True, kw_only=True):
    """Retained: the device's identity and its configured suites."""

    schema: str = "benchd.info/1"
    device_id: str = ""
    boot_id: str = ""
    name: str = ""
    site: str = ""
    tags: list[str] = []
    tool_version: str = ""
    environment: Environment | None = None
    suites: list[SuiteInfo] = []
    catalogue_sha256: str = ""
    t_wall: str = ""


class Health(Struct, frozen=True, kw_only=True):
    """Retained, every 30 s and around each case: current activity, pending deliveries, problems.

    `problem` is null if there is none; `waiting_for` says why a run that is due has not started. `log` is the id of the
    results' log, given with its first and last available sequence numbers; `event_log` is the same for the events' log.
    """

    schema: str = "benchd.health/1"
    t_wall: str = ""
    uptime_s: float = 0.0
    rss_bytes: Count = 0
    activity: str = ""
    case_id: str | None = None
    cases_left: Count = 0
    next_suite: str | None = None
    next_suite_in_s: float | None = None
    waiting_for: str | None = None
    problem: str | None = None
    log: str = ""
    first_seq: Count = 1
    last_seq: Count = 0
    event_log: str = ""
    event_first_seq: Count = 1
    event_last_seq: Count = 0
    pending: Count = 0
    refused: Count = 0
    last_acknowledged_s: float | None = None
    telemetry_dropped: Count = 0
    disk_free_bytes: Count = 0


class Telemetry(Struct, frozen=True, kw_only=True):
    """Sent at most once per second while a case runs: the last sample of every series."""

    schema: str = "benchd.telemetry/1"
    case_id: str = ""
    samples: list[Sample]


class Judgement(Struct, frozen=True, kw_only=True):
    """The verdict on a case's results compared with its pinned runs; `*_ms` are the centres of each side's runs.

    `effect` is the result divided by the baseline, minus 1, with its interval; it is null if nothing was compared, and
    `reason` says why. For a regression, the runs of all slower results are listed.
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
    """An event: `event` is its name and `detail` describes it for human readers.

    Baseline events also contain the judgement, if there was one. `seq` is the event's number in the log `log`.
    """

    log: str | UnsetType = UNSET
    seq: int | UnsetType = UNSET
    schema: str = "benchd.event/1"
    event: str
    detail: str = ""
    t_wall: str = ""
    boot_id: str = ""
    judgement: Judgement | None = None


class Response(Struct, frozen=True, kw_only=True):
    """The answer to one command; `reason` says why the command was refused."""

    schema: str = "benchd.response/1"
    id: str = ""
    verb: str = ""
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
    case_id: str = ""
    status: str = ""
    run_id: str = ""
    t_wall: str = ""
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
    accuracy_metric: str | None = None
    accuracy_value: float | None = None
    accuracy_low: float | None = None
    accuracy_high: float | None = None
    accuracy_drop: float | None = None
    verdict: Answer | None = None
    verdict_reason: str | None = None
    baseline_ms: float | None = None


class DeployedFolder(Struct, frozen=True, kw_only=True):
    """Retained: what is deployed from a `benchd ship` folder, its promise, and the verdict of the last verification.

    `change` is the current time divided by the promised one, minus 1, with its 95 % interval; `since` is when the
    verdict began. `better` gives the variant that is ahead of the shipped one in the plan's results, and by how much.
    """

    schema: str = "benchd.deployed/1"
    name: str = ""
    case_id: str = ""
    verdict: Literal["kept", "slower", "faster", "inconclusive", "another_machine", "broken", "failed"]
    reason: str = ""
    since: str = ""
    t_wall: str = ""
    promised_ms: float | None = None
    promised_low_ms: float | None = None
    promised_high_ms: float | None = None
    now_ms: float | None = None
    change: float | None = None
    change_low: float | None = None
    change_high: float | None = None
    better: str = ""

    @property
    def is_broken(self) -> bool:
        """Return whether the promise is not kept."""
        return self.verdict in ("slower", "broken", "failed")

    @property
    def told(self) -> str:
        """Return the times, or why there are none."""
        if self.now_ms is None or self.promised_ms is None or self.change is None:
            return self.reason
        return f"{self.now_ms:.4g} ms, promised {self.promised_ms:.4g} ms, {self.change:+.1%}"


def latest(record: Record, judgement: Judgement | None = None) -> Latest:
    """Return the flat object for a record; energy is gross per inference, with the same relative error bar."""
    seconds = sum(process.window.seconds for process in record.processes if process.window)
    own = {
        "power_w": record.energy.energy_j / seconds if record.energy and seconds else None,
        "temp_max_c": max((summary.maximum for summary in ending(record.telemetry, "_temp_c").values()), default=None),
        "verdict": judgement.verdict if judgement else None,
        "verdict_reason": judgement.reason if judgement else None,
        "baseline_ms": judgement.baseline_ms if judgement else None,
    }
    return Latest(**columns(record, Latest.__struct_fields__) | own)
