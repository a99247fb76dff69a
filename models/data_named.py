"""Parses `--data` and `--labels` without torch: scheme and folder of a data set, a file of labels."""

import re
from pathlib import Path

from benchd.models import demo

SCHEMES = ("cifar10", "imagefolder")
_LINE = re.compile(r"(.*\S)\s*[\t, ]\s*(\d+)")


class DataError(ValueError):
    """The requested images are not available; the message says what to do."""


def parse(spec: str, labels: str | Path | None = None) -> tuple[str, str]:
    """Return the scheme and folder of `imagefolder:DIR`; `demo`, the included digits, has no folder.

    Raises DataError for an unknown scheme, a missing folder, or `labels` for a set that has its own.
    """
    expected = f"{demo.DEMO}, {' or '.join(f'{name}:DIR' for name in SCHEMES)}"
    if spec == demo.DEMO and not labels:
        return demo.DEMO, ""
    scheme, _, folder = spec.partition(":")
    if scheme not in SCHEMES or not folder:
        raise DataError(f"unknown data {spec!r}: use {expected}")
    if not Path(folder).is_dir():
        raise DataError(f"{folder} is not a folder: give the folder of the images, as {expected}")
    if labels and scheme != "imagefolder":
        raise DataError(f"--labels is only for imagefolder:DIR; {scheme} has its own labels")
    return scheme, folder


def read_labels(path: str | Path) -> dict[str, int]:
    """Return the class index of each image by its path inside the data set's folder, in the order of the lines.

    A line contains a path and a non-negative class index, separated by a tab, comma or space; empty lines are skipped.
    Raises DataError with the file and the line.
    """
    try:
        lines = Path(path).read_text(encoding="utf-8-sig").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"cannot read the labels {path}: {error}") from error
    labels: dict[str, int] = {}
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        name, label = _entry(path, number, line)
        if name in labels:
            raise DataError(f"{path}:{number}: {name} already has a label")
        labels[name] = label
    if not labels:
        raise DataError(f"{path} contains no labels: each line must be a path and a class index, as in cat/1.png 0")
    return labels


def read_listed(folder: str, labels: str | Path) -> dict[str, int]:
    """Return the result of `read_labels`; also raise DataError if the folder lacks one of the images."""
    named = read_labels(labels)
    missing = next((name for name in named if not Path(folder, name).is_file()), None)
    if missing is not None:
        raise DataError(f"{labels} lists {missing}, which is not a file in {folder}")
    return named


def _entry(path: str | Path, number: int, line: str) -> tuple[str, int]:
    match = _LINE.fullmatch(line.strip())
    if match is None or len(match[2]) > 9:
        raise DataError(f"{path}:{number}: {line[:60]!r}: expected a path and a class index, as in cat/1.png 0")
    name = match[1].rstrip(", ")
    if Path(name).is_absolute() or ".." in Path(name).parts:
        raise DataError(f"{path}:{number}: {name}: expected a path inside the folder of --data, without ..")
    return name, int(match[2])
