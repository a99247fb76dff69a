"""The load that a deployed model must handle, and the server records that prove that it does; pure."""

from collections.abc import Iterable, Sequence

import msgspec
from msgspec import Struct

from benchd.daemon.records import PERCENTILE, Load, Record

RATE_SHARE = 0.02
"""The search for a server's highest rate ends when that rate is known to within this share."""

LEAST_SHARE = 1 / 64
"""The search ends without a rate below this share of the back-to-back throughput."""

MOST_TRIALS, TRIAL_SHARE, CONFIRMATIONS = 12, 0.1, 5
"""A search's maximum number of trials, the length of a trial as a share of a run, and the runs that confirm a rate."""


class Demand(Struct, frozen=True, kw_only=True):
    """Requests per second on `streams` streams, of which `percentile` percent must finish within the deadline."""

    rate_hz: float
    deadline_ms: float
    streams: int = 1
    percentile: float = PERCENTILE

    def __str__(self) -> str:
        streams = f" on {self.streams} streams" if self.streams > 1 else ""
        return (
            f"{self.rate_hz:.4g} requests per second{streams} within {self.deadline_ms:.4g} ms at p{self.percentile:g}"
        )

    @property
    def command(self) -> str:
        """Return the `bench-once` command that measures this load."""
        load = Load(rate_hz=self.rate_hz, deadline_ms=self.deadline_ms, percentile=self.percentile)
        streams = ["--streams", str(self.streams)] if self.streams > 1 else []
        return " ".join(["bench-once --scenario server", *streams, *load.options])


def answering(records: Iterable[Record], demand: Demand) -> list[Record]:
    """Return one record per case and place with these streams: the one at the lowest sufficient rate, else the newest.

    `records` are in order of time. A rate found by a search counts like a requested one; records measured with a
    neighbour are ignored.
    """
    chosen: dict[tuple[str, ...], Record] = {}
    for record in records:
        is_alone = record.case.streams == demand.streams and record.case.beside is None
        if record.case.scenario != "server" or record.requests is None or not is_alone:
            continue
        case = msgspec.structs.replace(record.case, load=None)
        key = (record.device_id, record.environment.device, record.environment.power_mode or "", case.case_id)
        best = chosen.get(key)
        if best is None or _rank(record, demand) <= _rank(best, demand):
            chosen[key] = record
    return list(chosen.values())


def _rank(record: Record, demand: Demand) -> tuple[bool, float]:
    """Return a sort key for a case's records: those that meet the demand come first, sorted by rate."""
    is_short = shortfall(record, demand) is not None
    return is_short, 0.0 if is_short or record.requests is None else record.requests.rate_hz


def shortfall(record: Record, demand: Demand) -> str | None:
    """Return why the record does not show that the demand is met, else None."""
    load, requests = record.case.load, record.requests
    if load is None or requests is None:
        return "was not measured as a server"
    if load.deadline_ms is None or load.deadline_ms > demand.deadline_ms or load.percentile < demand.percentile:
        goal = "no deadline" if load.deadline_ms is None else f"{load.deadline_ms:.4g} ms at p{load.percentile:g}"
        return f"was measured for {goal}, not for {demand.deadline_ms:.4g} ms at p{demand.percentile:g}"
    if not requests.met:
        return f"does not meet {load.deadline_ms:.4g} ms at {requests.rate_hz:.4g} requests per second"
    if requests.rate_hz < demand.rate_hz:
        return f"meets {load.deadline_ms:.4g} ms only up to the measured {requests.rate_hz:.4g} requests per second"
    return None


def missing(records: Sequence[Record], demand: Demand) -> str | None:
    """Return what to measure if there is no record of a server with `demand.streams` streams, else None."""
    if answering(records, demand):
        return None
    streams = "one stream" if demand.streams == 1 else f"{demand.streams} streams"
    return f"no record of a server with {streams}; measure one: {demand.command}"
