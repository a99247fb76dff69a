"""What fills a disk in a test, and a disk that fails."""

import fcntl
import os
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from itertools import count
from pathlib import Path

import pytest
from broker import program

SHUTDOWN, WITHOUT_THE_JOURNAL = 0x8004587D, b"\2\0\0\0"  # FS_IOC_SHUTDOWN, EXT4_GOING_FLAGS_NOLOGFLUSH


@contextmanager
def tmpfs(folder: Path, options: str) -> Iterator[Path]:
    """Mount a file system in memory on a new folder, such as one of `size=4m`; skip where that is not allowed."""
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", options, "tmpfs", folder]
    if subprocess.run(command, check=False, capture_output=True).returncode:
        pytest.skip("needs the right to mount a small tmpfs")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", folder], check=True)


@contextmanager
def failing_ext4(image: Path, folder: Path) -> Iterator[Callable[[str], int]]:
    """Mount an ext4 on the folder; the yielded function makes the kernel find an error, which makes it read-only."""
    with _ext4(image, folder):
        source = subprocess.run(["findmnt", "-no", "SOURCE", folder], check=True, capture_output=True, text=True).stdout
        yield Path("/sys/fs/ext4", Path(source.strip()).name, "trigger_fs_error").write_text


@contextmanager
def ext4_without_power(image: Path, folder: Path) -> Iterator[Callable[[], None]]:
    """Mount an ext4 on the folder; the yielded function loses what is not on the disk, and mounts the rest again."""

    def cut() -> None:
        descriptor = os.open(folder, os.O_RDONLY)
        fcntl.ioctl(descriptor, SHUTDOWN, WITHOUT_THE_JOURNAL)
        os.close(descriptor)
        subprocess.run(["umount", folder], check=True)
        subprocess.run(_mount(image, folder), check=True)

    with _ext4(image, folder):
        yield cut


@contextmanager
def _ext4(image: Path, folder: Path) -> Iterator[None]:
    folder.mkdir()
    with image.open("wb") as file:
        file.truncate(128 * 2**20)
    commands = ([program("mkfs.ext4"), "-q", image], _mount(image, folder))
    if any(subprocess.run(command, check=False).returncode for command in commands):
        pytest.skip("needs the right to mount an ext4")
    try:
        yield
    finally:
        subprocess.run(["umount", "--lazy", folder], check=True)


def _mount(image: Path, folder: Path) -> list[str | Path]:
    return ["mount", "-o", "loop,errors=remount-ro", image, folder]


def use_up_space(file: Path) -> None:
    """Fill the disk with one file."""
    with suppress(OSError), file.open("wb", buffering=0) as rest:
        while True:
            rest.write(bytes(4096))


def use_up_inodes(folder: Path) -> None:
    """Create empty files `small-N` until the disk takes no more; it has few inodes."""
    with suppress(OSError):
        for number in count():
            (folder / f"small-{number}").touch()
