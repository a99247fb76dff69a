"""What fills a disk in a test, and a disk that fails."""

import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from itertools import count
from pathlib import Path

import pytest


@contextmanager
def failing_ext4(image: Path, folder: Path) -> Iterator[Callable[[str], int]]:
    """Mount an ext4 on the folder; the yielded function makes the kernel find an error, which makes it read-only."""
    folder.mkdir()
    with image.open("wb") as file:
        file.truncate(128 * 2**20)
    mount = ["mount", "-o", "loop,errors=remount-ro", image, folder]
    if any(subprocess.run(command, check=False).returncode for command in (["mkfs.ext4", "-q", image], mount)):
        pytest.skip("needs the right to mount an ext4")
    source = subprocess.run(["findmnt", "-no", "SOURCE", folder], check=True, capture_output=True, text=True).stdout
    try:
        yield Path("/sys/fs/ext4", Path(source.strip()).name, "trigger_fs_error").write_text
    finally:
        subprocess.run(["umount", "--lazy", folder], check=True)


def use_up_inodes(folder: Path) -> None:
    """Create empty files `small-N` until the disk takes no more; it has few inodes."""
    with suppress(OSError):
        for number in count():
            (folder / f"small-{number}").touch()
