"""The reasons to doubt the times of records, and the words for them next to the figures; pure."""

from collections.abc import Container, Iterable

from benchd.daemon.records import Record

NOT_OF_TIME = {
    "clock_not_set",
    "device_memory_of_all",
    "faster_than_floor",
    "mqtt",
    "profiled",
    "reference_fp32",
    "rss_peak_since_start",
    "service",
    "usage_error",
}
"""Flags that do not affect the time; the `ship:` line lists all others."""

NOT_OF_GROSS = {"no_idle_baseline"}
"""Energy flags that do not affect the gross joules, by which variants are ranked."""

BUSY = {
    "busy_machine": "busy machine",
    "cpu_quota_throttled": "CPU quota used up",
    "foreign_gpu_process": "GPU used by other processes",
    "steal": "CPU taken by other virtual machines",
}
"""Flags that mark times as possibly inflated, by any factor, by other programs."""

PLAIN = BUSY | {
    "clock_below_range": "clock below 75 % of its maximum",
    "correlated_blocks": "drifting times",
    "files_changed": "files changed between processes",
    "low_clock": "low clock",
    "major_faults": "memory read from disk",
    "one_in_flight": "one run at a time",
    "other_threads": "number of threads set by the model",
    "probes_moved": "device speed changed",
    "repeated_input_untested": "not tested for cached answers",
    "shared_cpus": "more threads than CPUs",
    "throttled": "clocks throttled",
    "two_levels": "jumps between two speeds",
    "warm_up_not_steady": "not warmed up",
    "wide_interval": "an interval wider than the time itself",
}
"""The wording of flags that are not shown by name."""

SLOWED = {*BUSY, "low_clock", "throttled"}
"""Flags of times that are longer than the machine's own at full clocks."""

SHORT = {
    "busy": (BUSY.keys(), "other programs ran, so the time may be far too long"),
    "jumps": ({"two_levels"}, "the time jumps between two levels"),
    "drifts": ({"correlated_blocks"}, "the time drifts, so the interval may be too narrow"),
    "not warm": ({"warm_up_not_steady"}, "the time was still changing when the warm-up had to end"),
}
"""The words beside a time in a table, worst doubt first: the flags that each stands for, and its meaning."""


def of(record: Record, *, joules: bool = False) -> list[str]:
    """Return the flags that put the time of a record in doubt and, if `joules` is set, also its energy."""
    of_energy = record.energy.flags if joules and record.energy else []
    return sorted({*record.flags} - NOT_OF_TIME | {flag.partition(":")[0] for flag in of_energy} - NOT_OF_GROSS)


def words(flags: Iterable[str]) -> str:
    """Return flags as text for human readers."""
    return ", ".join(PLAIN.get(flag, flag.replace("_", " ")) for flag in flags)


def busy(records: Iterable[Record]) -> list[str]:
    """Return the flags that say that other programs inflated the times of these records."""
    return [flag for flag in BUSY if any(flag in record.flags for record in records)]


def mark(records: Iterable[Record]) -> str:
    """Return the suffix for a figure or verdict from these records, which is empty if they were not disturbed."""
    flags = busy(list(records))
    return f" ({words(flags)})" if flags else ""


def short(*records: Record) -> str:
    """Return the word beside a time in a table for the worst doubt about its records; empty if there is none."""
    raised = {flag for record in records for flag in record.flags}
    return next((word for word, (flags, _) in SHORT.items() if flags & raised), "")


def meanings(words: Container[str]) -> list[str]:
    """Return a line for each of these words that is beside a time in a table."""
    return [f"{word}: {meaning}" for word, (_, meaning) in SHORT.items() if word in words]


def warning(records: Iterable[Record]) -> str | None:
    """Return the line to print above the figures of these records if other programs disturbed them, else None."""
    disturbed = [record for record in records if busy([record])]
    if not disturbed:
        return None
    models = ", ".join(dict.fromkeys(record.case.model for record in disturbed))
    flags = words(busy(disturbed))
    return f"BUSY MACHINE: other processes slowed {models} ({flags}): times may be far too long (--quiet-for 30s waits)"
