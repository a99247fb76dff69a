"""Text of a command line to typed values; what cannot be read is named with what was expected."""

import re
from collections.abc import Mapping, Sequence
from typing import TypeVar

from benchd.daemon.errors import UsageError, unknown
from benchd.daemon.measuring.protocol import ImageCount
from benchd.daemon.verdicts.recommend import OBJECTIVES, Requirements

T = TypeVar("T")


def whole_numbers(option: str, texts: Sequence[str]) -> list[int]:
    """Return whole numbers; raise UsageError that names the option."""
    try:
        return [int(text) for text in texts]
    except ValueError:
        raise UsageError(f"{option} {','.join(texts)}: expected whole numbers separated by commas") from None


def options(texts: Sequence[str]) -> dict[str, list[str]]:
    """Return the values of each `name=value[,value...]`; a name given twice gathers its values."""
    found: dict[str, list[str]] = {}
    for text in texts:
        name, equals, values = text.partition("=")
        if not equals or not name or not values:
            raise UsageError(f"--option {text}: expected NAME=VALUE[,VALUE...]")
        found.setdefault(name.strip(), []).extend(value.strip() for value in values.split(","))
    return found


_UNITS = {"": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}


def byte_count(option: str, text: str) -> int:
    """Return the bytes of `512MiB` or `2GiB`."""
    match = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?) ?([KMG]iB)?", text)
    if match is None:
        raise UsageError(f"{option} {text}: expected a size such as 512MiB or 2GiB")
    return int(float(match[1]) * _UNITS[match[2] or ""])


def batches(option: str, texts: Sequence[str]) -> list[int | None]:
    """Return batch sizes, None for `dynamic`."""
    sizes = [None if text == "dynamic" else whole_numbers(option, [text])[0] for text in texts]
    if any(size is not None and size < 1 for size in sizes):
        raise UsageError(f"{option} {','.join(texts)}: at least 1")
    return sizes


def choices(kind: str, texts: Sequence[str], known: Sequence[T]) -> list[T]:
    """Return the texts, all of them known; raise UsageError that names the closest."""
    by_text = {str(value): value for value in known}
    for text in texts:
        if text not in by_text:
            raise unknown(kind, text, by_text)
    return [by_text[text] for text in texts]


def quantity(option: str, text: str, units: Mapping[str, float]) -> float:
    """Return `33ms` times what `units` has for ms; raise UsageError that names the option and its units."""
    found = re.fullmatch(r"(\d+|\d*\.\d+) *([A-Za-z%]+)", text)
    if not found or found[2] not in units:
        raise UsageError(f"{option} {text}: expected a number with its unit, one of {', '.join(units)}")
    return float(found[1]) * units[found[2]]


def image_count(text: str) -> ImageCount:
    """Return `full`, or how many images; raise UsageError for anything else."""
    if text == "full":
        return "full"
    if not re.fullmatch(r"[1-9][0-9]{0,8}", text):
        raise UsageError(f"--accuracy {text}: expected full, or how many images, such as 1000")
    return int(text)


def accuracy_drop(text: str) -> float:
    """Return the share of `1%`; raise UsageError where nothing or everything would keep it."""
    share = -1.0 if text.startswith("-") else quantity("--max-accuracy-drop", text, {"%": 0.01})
    if not 0.0 < share <= 1.0:
        raise UsageError(f"--max-accuracy-drop {text}: expected more than 0 % and at most 100 %, such as 1%")
    return share


def requirements(
    max_latency: str | None,
    max_power: str | None,
    max_memory: str | None,
    min_agreement: float | None,
    objective: str,
    max_accuracy_drop: str | None = None,
) -> Requirements:
    """Return what a variant must keep to be shipped."""
    if objective not in OBJECTIVES:
        raise unknown("objective", objective, OBJECTIVES)
    if min_agreement is not None and not 0.0 < min_agreement <= 1.0:
        raise UsageError(f"--min-agreement {min_agreement:g}: expected a share above 0 and at most 1, such as 0.995")
    memory = {"GiB": 2**30, "MiB": 2**20, "GB": 1e9, "MB": 1e6}
    return Requirements(
        max_latency_ms=quantity("--max-latency", max_latency, {"ms": 1, "s": 1e3, "us": 1e-3}) if max_latency else None,
        max_power_w=quantity("--max-power", max_power, {"W": 1, "mW": 1e-3}) if max_power else None,
        max_memory_bytes=quantity("--max-memory", max_memory, memory) if max_memory else None,
        min_agreement=min_agreement,
        max_accuracy_drop=accuracy_drop(max_accuracy_drop) if max_accuracy_drop else None,
        objective=objective,
    )
