"""Text of a command line to typed values; what cannot be read is named with what was expected."""

from collections.abc import Sequence

from benchd.daemon.errors import UsageError, unknown


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


def choices(kind: str, texts: Sequence[str], known: Sequence[str]) -> list[str]:
    """Return the texts, all of them known; raise UsageError that names the closest."""
    for text in texts:
        if text not in known:
            raise unknown(kind, text, known)
    return list(texts)
