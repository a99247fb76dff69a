"""What the supervisor and the sampler process say to each other, as JSON lines."""

from typing import Literal

from msgspec import Struct

from benchd.daemon.records import Sample


class PowerSource(Struct, frozen=True, kw_only=True):
    """What one power or energy metric of a source stands for; the metric's samples carry `source` and `rail`.

    `energy_counter_j` counts up since some moment of its own; `power_w` is a power. `scope` names what is behind it in
    words for people ("module input VDD_IN", "GPU board", "CPU package"); `total` says that it is the whole of what its
    source sees, so that nothing may be added to it. The sensor renews its value every `period_s` and, where it
    averages, over the `averaging_s` before. A change is stamped up to `stamp_s` late, or up to a reading where that is
    null.
    """

    source: str
    rail: str
    metric: Literal["energy_counter_j", "power_w"]
    scope: str
    total: bool
    period_s: float
    averaging_s: float = 0.0
    stamp_s: float | None = None


class Command(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """To the sampler: follow this process from now on; send at once what is pending."""

    watch_pid: int | None = None
    flush: bool = False


class Batch(Struct, frozen=True, kw_only=True, tag="batch"):
    """From the sampler, about once a second: what it has read since its last batch, and how that went.

    `t_ns` is when the batch was made and `ticks_ns` when each reading began, both on CLOCK_MONOTONIC; `missed` counts
    the ticks that were left out because their time had passed. `cpu_s` is the CPU time of the process so far, and
    `flushes` the flush commands it has obeyed so far, this batch included. `failures` says by source what went wrong,
    and `power` what the power and energy of the sources that are available stand for.
    """

    samples: list[Sample]
    t_ns: int
    cpu_s: float
    ticks_ns: list[int]
    missed: int
    flushes: int
    failures: dict[str, str] = {}
    power: list[PowerSource] = []


class Refusal(Struct, frozen=True, tag="refusal"):
    """From the sampler, as its only line: why it cannot do what it was started for."""

    reason: str


Message = Batch | Refusal
