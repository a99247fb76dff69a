"""The search for the batch size of the best throughput: where the doubling of `offline` ends; pure."""

from collections.abc import Sequence

import msgspec

from benchd.daemon.records import Case, Record

LEAST_RISE = 0.02
"""What a doubled batch has to bring for the next one to be worth its time."""

MEMORY_SHARE = 0.8
"""Twice the peak may take this share of the machine's memory: beyond it the kernel kills, and not only us."""


def is_over(case: Case, measured: Sequence[Record]) -> bool:
    """Say whether the smaller batches of this case show that its own need not be measured."""
    smaller = [record for record in measured if _but_for_its_batch(record.case) == _but_for_its_batch(case)]
    if not smaller:
        return False
    *before, last = smaller
    if last.throughput_per_s is None or last.memory is None:
        return True
    if 2 * last.memory.rss_peak_bytes > MEMORY_SHARE * last.environment.memory_bytes:
        return True
    best = max((record.throughput_per_s or 0.0 for record in before), default=0.0)
    return last.throughput_per_s < (1 + LEAST_RISE) * best


def _but_for_its_batch(case: Case) -> Case:
    return msgspec.structs.replace(case, batch_size=0)
