"""What fills a disk in a test."""

from contextlib import suppress
from itertools import count
from pathlib import Path


def use_up_inodes(folder: Path) -> None:
    """Create empty files `small-N` until the disk takes no more; it has few inodes."""
    with suppress(OSError):
        for number in count():
            (folder / f"small-{number}").touch()
