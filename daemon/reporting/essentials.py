"""Records without what no report shows, for those that have to be in memory together."""

import sys
from typing import Any, TypeVar

import msgspec
from msgspec import Struct, structs

from benchd.daemon.records import Environment, ProcessResult, Record

T = TypeVar("T")


def _defaults(kind: type[Struct], names: str) -> dict[str, Any]:
    """Return the defaults of these fields: one object for all records, since a container for each takes memory."""
    fields = {field.name: field for field in structs.fields(kind)}
    found = [fields[name] for name in names.split()]
    return {one.name: one.default_factory() if one.default is msgspec.NODEFAULT else one.default for one in found}


_DROPPED = _defaults(Record, "temperature parts limits missing artifacts deadlines runtime occupancy probes")
_MOMENTARY = _defaults(Environment, "temperature_c cooling load command affinity")
_OF_PROCESS = "stages warm_up parts blocks idle memory raw telemetry sampler probes deadlines beside timeline"
_LARGE = _defaults(ProcessResult, _OF_PROCESS)


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
            **_DROPPED,
            **{name: sys.intern(getattr(record, name)) for name in ("suite_id", "device_id", "case_id", "boot_id")},
            case=self._one(record.case),
            environment=self._one(structs.replace(record.environment, **_MOMENTARY)),
            model=self._one(record.model),
            telemetry={key: value for key, value in record.telemetry.items() if key.partition("@")[0] == "power_w"},
            clocks={key: value for key, value in record.clocks.items() if key in ("cpu_clock_hz", "gpu_clock_hz")},
            processes=[
                structs.replace(
                    process,
                    **_LARGE,
                    window=process.window if process.energy else None,
                    interference=process.interference if is_disturbed else None,
                )
                for process in record.processes
            ],
            flags=self._one(record.flags),
        )

    def _one(self, value: T) -> T:
        """Return the first value that was equal to this one."""
        found: T = self._shared.setdefault(msgspec.json.encode(value), value)
        return found
