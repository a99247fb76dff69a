"""Text of a command line to typed values; what cannot be read is named with what was expected."""

import re
from collections.abc import Sequence
from typing import TypeVar

from benchd.daemon.errors import UsageError, unknown

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


def shape(text: str) -> list[int]:
    """Return the sizes of `3x224x224`."""
    sizes = whole_numbers("--input", text.split("x"))
    if min(sizes) < 1:
        raise UsageError(f"--input {text}: every size is at least 1")
    return sizes


def named_shape(text: str) -> tuple[str, list[int]]:
    """Return the name and the sizes of `images=1x3x224x224`."""
    name, equals, sizes = text.rpartition("=")
    if not equals or not name:
        raise UsageError(f"--input {text}: expected NAME=SIZExSIZE..., as in images=1x3x224x224")
    return name, shape(sizes)


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
