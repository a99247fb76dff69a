"""Room on the disk: a reserve on a disk that is really full, and old raw times that make room."""

import gzip
import hashlib
import os
import subprocess

import pytest

from benchd.daemon.delivery.outbox import Full, Outbox
from benchd.daemon.delivery.room import Reserve, tidy

SIZE = 2**20


@pytest.fixture
def small_disk(tmp_path):
    """A file system of 4 MiB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", folder], check=False, capture_output=True
    )
    if mounted.returncode:
        pytest.skip("needs the right to mount a small tmpfs")
    yield folder
    subprocess.run(["umount", folder], check=True)


def fill(outbox):
    for number in range(100):
        outbox.add(str(number), "t", 1, b"x" * 100_000)


def test_a_full_disk_takes_one_more_result_once_the_reserve_is_let_go(small_disk):
    reserve = Reserve(small_disk / "reserve", SIZE)
    assert reserve.hold()
    assert (small_disk / "reserve").stat().st_blocks * 512 >= SIZE
    with Outbox(small_disk / "outbox.db") as outbox:
        with pytest.raises(Full, match="is full; free some space"):
            fill(outbox)
        taken = outbox.counts().pending
        assert taken > 3
        reserve.release()
        outbox.add("last", "t", 1, b"y" * 100_000)
        assert [row.key for row in outbox.pending(100)] == [*map(str, range(taken)), "last"]
        assert not reserve.hold()
        assert not (small_disk / "reserve").exists()


def test_a_reserve_that_is_held_stays(tmp_path):
    reserve = Reserve(tmp_path / "reserve", SIZE)
    assert reserve.hold()
    assert reserve.hold()
    assert (tmp_path / "reserve").stat().st_size == SIZE
    reserve.release()
    reserve.release()


def raw(folder, name, age_s, content):
    path = folder / "raw" / name
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(content)
    os.utime(path, (1000.0 - age_s, 1000.0 - age_s))
    return path


def test_raw_times_are_compressed_and_keep_their_hash_and_age(tmp_path):
    content = b"\1\0\0\0\0\0\0\0" * 1000
    path = raw(tmp_path, "a.i64", 100.0, content)
    tidy(tmp_path, 1000.0)
    assert not path.exists()
    packed = path.with_name("a.i64.gz")
    assert packed.stat().st_size < len(content) / 10
    assert packed.stat().st_mtime == 900.0
    assert hashlib.sha256(gzip.decompress(packed.read_bytes())).digest() == hashlib.sha256(content).digest()
    tidy(tmp_path, 1000.0)
    assert [entry.name for entry in (tmp_path / "raw").iterdir()] == ["a.i64.gz"]


def test_the_old_and_then_the_oldest_beyond_the_size_go(tmp_path):
    for name, age_s in (("d", 500.0), ("c", 300.0), ("b", 200.0), ("a", 100.0)):
        raw(tmp_path, name, age_s, os.urandom(1000))
    tidy(tmp_path, 1000.0, keep_s=400.0, keep_bytes=2500)
    assert sorted(entry.name for entry in (tmp_path / "raw").iterdir()) == ["a.gz", "b.gz"]
