"""Records without what no report shows, for those that have to be in memory together."""

import sys
from typing import Any, TypeVar

import msgspec
from msgspec import structs

from benchd.daemon.records import Environment, ProcessResult, Record, Stages

T = TypeVar("T")

_NOTHING: dict[str, Any] = {}
_NO_STAGES = Stages()


class Essentials:
    """Returns the part of a record that rows, charts and decisions are made of; equal parts of records are one."""

    def __init__(self) -> None:
        self._shared: dict[bytes, Any] = {}

    def __call__(self, record: Record) -> Record:
        """Return the record with the samples, files and series of its processes left out."""
        found = [process.interference for process in record.processes if process.interference]
        is_disturbed = any(reasons for one in found for reasons in one.reasons)
        return structs.replace(
            record,
            **{name: sys.intern(getattr(record, name)) for name in ("suite_id", "device_id", "case_id", "boot_id")},
            case=self._one(record.case),
            environment=self._one(_lasting(record.environment)),
            model=self._one(record.model),
            telemetry={key: value for key, value in record.telemetry.items() if key.partition("@")[0] == "power_w"},
            clocks={key: value for key, value in record.clocks.items() if key in ("cpu_clock_hz", "gpu_clock_hz")},
            temperature=_NOTHING,
            parts=_NOTHING,
            limits=_NOTHING,
            missing=_NOTHING,
            artifacts=[],
            deadlines=[],
            runtime=None,
            occupancy=None,
            probes=None,
            processes=[_timed(process, is_disturbed=is_disturbed) for process in record.processes],
            flags=self._one(record.flags),
        )

    def _one(self, value: T) -> T:
        """Return the first value that was equal to this one."""
        found: T = self._shared.setdefault(msgspec.json.encode(value), value)
        return found


def _lasting(environment: Environment) -> Environment:
    """Return it without the state of the moment."""
    return structs.replace(environment, temperature_c=_NOTHING, cooling=_NOTHING, load=None, command="", affinity=None)


def _timed(process: ProcessResult, *, is_disturbed: bool) -> ProcessResult:
    """Return it without what is large."""
    return structs.replace(
        process,
        stages=_NO_STAGES,
        warm_up=None,
        parts=_NOTHING,
        blocks=None,
        window=process.window if process.energy else None,
        idle=[],
        memory=None,
        raw=_NOTHING,
        interference=process.interference if is_disturbed else None,
        telemetry=_NOTHING,
        sampler=None,
        probes=None,
        deadlines=[],
        beside=None,
        timeline=[],
    )
