"""What the supervisor and the sampler process say to each other, as JSON lines."""

from msgspec import Struct

from benchd.daemon.records import Sample


class Command(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """To the sampler: follow this process from now on; send at once what is pending."""

    watch_pid: int | None = None
    flush: bool = False


class Batch(Struct, frozen=True, kw_only=True, tag="batch"):
    """From the sampler, about once a second: what it has read since its last batch, and how that went.

    `t_ns` is when the batch was made and `ticks_ns` when each reading began, both on CLOCK_MONOTONIC; `missed` counts
    the ticks that were left out because their time had passed. `cpu_s` is the CPU time of the process so far, and
    `flushes` the flush commands it has obeyed so far, this batch included. `failures` says by source what went wrong.
    """

    samples: list[Sample]
    t_ns: int
    cpu_s: float
    ticks_ns: list[int]
    missed: int
    flushes: int
    failures: dict[str, str] = {}


class Refusal(Struct, frozen=True, tag="refusal"):
    """From the sampler, as its only line: why it cannot do what it was started for."""

    reason: str


Message = Batch | Refusal
