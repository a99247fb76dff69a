"""The messages between the supervisor and the sampler process, as JSON lines."""

from typing import Literal

from msgspec import Struct

from benchd.daemon.records import Sample


class PowerSource(Struct, frozen=True, kw_only=True):
    """The meaning of one power or energy metric of a source; its samples carry the same `source` and `rail`.

    `energy_counter_j` counts up from an arbitrary start; `power_w` is a power. `scope` describes the measured hardware
    ("module input VDD_IN", "GPU board", "CPU package"); `total` is set if it includes everything that its source sees,
    so that nothing may be added to it. The sensor updates its value every `period_s` and, if it averages, over the
    previous `averaging_s`. A change is stamped up to `stamp_s` late, or up to one reading late if that is null.
    """

    source: str
    rail: str
    metric: Literal["energy_counter_j", "power_w"]
    scope: str
    total: bool
    period_s: float
    averaging_s: float = 0.0
    stamp_s: float | None = None


class FollowRequest(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """To the sampler: follow these processes from now on; send pending samples at once."""

    watch_pids: list[int] = []
    flush: bool = False


class Batch(Struct, frozen=True, kw_only=True, tag="batch"):
    """From the sampler, about once per second: the readings since the last batch, and any failures.

    `t_ns` is when the batch was made and `ticks_ns` when each reading began, both on CLOCK_MONOTONIC; `cpu_s` is the
    CPU time of the process so far, and `flushes` counts the flush commands executed so far, including this batch's.
    `failures` contains the failures by source, and `power` describes the power and energy metrics of the available
    sources.
    """

    samples: list[Sample]
    t_ns: int
    cpu_s: float
    ticks_ns: list[int]
    flushes: int
    failures: dict[str, str] = {}
    power: list[PowerSource] = []


class Refusal(Struct, frozen=True, tag="refusal"):
    """From the sampler, as its only line: why it cannot work."""

    reason: str


Message = Batch | Refusal
