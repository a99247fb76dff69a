"""Whether the disk takes one more case, and old raw times that make room."""

import errno
import gzip
import hashlib
import os
import shutil
import subprocess
import time

import pytest
from disks import ext4_without_power, tmpfs, use_up_inodes

from benchd.daemon.delivery import disk as module
from benchd.daemon.delivery.disk import file_time_s, lacks, tidy
from benchd.daemon.machine.folders import sync
from benchd.daemon.verdicts.when import EARLIEST_S

NO_SPACE = os.strerror(errno.ENOSPC)
NOW_S = EARLIEST_S + 1e8
YEAR_S = 365 * 86400.0


def eat(folder, left=0):
    """Fill the disk but for so many bytes, and return the file that does."""
    filler = folder / "filler"
    with filler.open("wb") as file:
        os.posix_fallocate(file.fileno(), 0, shutil.disk_usage(folder).free - left)
    return filler


def test_a_disk_with_too_little_for_a_case_says_so(small_disk, monkeypatch):
    monkeypatch.setattr(module, "CASE_BYTES", 2**20)
    assert lacks(small_disk) is None
    eat(small_disk, left=2**20 - 4096)
    assert lacks(small_disk) == f"{NO_SPACE}: less than 1 MiB are free"


@pytest.fixture
def few_files(tmp_path):
    """A file system of 200 inodes."""
    with tmpfs(tmp_path / "few", "nr_inodes=200") as folder:
        yield folder


def test_no_case_starts_without_free_inodes(few_files, monkeypatch):
    monkeypatch.setattr(module, "CASE_BYTES", 0)
    assert lacks(few_files) is None
    use_up_inodes(few_files)
    assert lacks(few_files) == "too few free inodes; delete small files"


def test_a_disk_that_became_read_only_or_is_gone_takes_no_case(small_disk, monkeypatch):
    monkeypatch.setattr(module, "CASE_BYTES", 0)
    subprocess.run(["mount", "-o", "remount,ro", small_disk], check=True)
    assert lacks(small_disk) == os.strerror(errno.EROFS)
    assert lacks(small_disk / "absent") == os.strerror(errno.ENOENT)


def raw(folder, name, age_s, content):
    path = folder / "raw" / name
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(content)
    os.utime(path, (NOW_S - age_s, NOW_S - age_s))
    return path


def test_raw_times_are_compressed_and_keep_their_hash_and_age(tmp_path):
    content = b"\1\0\0\0\0\0\0\0" * 1000
    path = raw(tmp_path, "a.i64", 100.0, content)
    tidy(tmp_path, NOW_S)
    assert not path.exists()
    packed = path.with_name("a.i64.gz")
    assert packed.stat().st_size < len(content) / 10
    assert packed.stat().st_mtime == NOW_S - 100.0
    assert hashlib.sha256(gzip.decompress(packed.read_bytes())).digest() == hashlib.sha256(content).digest()
    tidy(tmp_path, NOW_S)
    assert [entry.name for entry in (tmp_path / "raw").iterdir()] == ["a.i64.gz"]


def test_the_old_and_then_the_oldest_beyond_the_size_go(tmp_path):
    for name, age_s in (("d", 500.0), ("c", 300.0), ("b", 200.0), ("a", 100.0)):
        raw(tmp_path, name, age_s, os.urandom(1000))
    tidy(tmp_path, NOW_S, keep_s=400.0, keep_bytes=2500)
    assert sorted(entry.name for entry in (tmp_path / "raw").iterdir()) == ["a.gz", "b.gz"]


def test_a_file_that_cannot_be_compressed_keeps_no_other_one(tmp_path):
    for name, age_s in (("old", 500.0), ("bad", 200.0), ("good", 100.0)):
        raw(tmp_path, name, age_s, b"x" * 1000)
    tidy(tmp_path, NOW_S)
    raw(tmp_path, "bad", 200.0, b"x" * 1000)
    raw(tmp_path, "new", 100.0, b"x" * 1000)
    (tmp_path / "raw/bad.gz.part").mkdir()
    with pytest.raises(OSError, match=r"bad\.gz\.part"):
        tidy(tmp_path, NOW_S, keep_s=400.0)
    left = sorted(entry.name for entry in (tmp_path / "raw").iterdir())
    assert left == ["bad", "bad.gz", "bad.gz.part", "good.gz", "new.gz"]


def test_on_a_full_disk_the_oldest_still_go(small_disk):
    raw(small_disk, "old", 500.0, b"x")
    tidy(small_disk, NOW_S)
    raw(small_disk, "new", 100.0, os.urandom(100_000))
    eat(small_disk)
    with pytest.raises(OSError, match=NO_SPACE):
        tidy(small_disk, NOW_S, keep_s=400.0)
    assert [entry.name for entry in (small_disk / "raw").iterdir()] == ["new"]


def test_compressed_raw_times_survive_a_power_cut(tmp_path):
    disk = tmp_path / "disk"
    with ext4_without_power(tmp_path / "image", disk) as cut:
        raw(disk, "a", 100.0, b"x" * 100_000)
        os.sync()
        tidy(disk, NOW_S)
        # what any other write does seconds later: it commits names and sizes, not another file's content
        (disk / "other").touch()
        sync(disk / "other")
        cut()
        assert gzip.decompress((disk / "raw/a.gz").read_bytes()) == b"x" * 100_000


def test_what_was_written_before_the_clock_was_set_goes_by_size_only(tmp_path):
    for name, age_s in (("a", NOW_S - 50.0), ("b", 100.0)):
        raw(tmp_path, name, age_s, os.urandom(1000))
    tidy(tmp_path, NOW_S, keep_s=400.0)
    assert sorted(entry.name for entry in (tmp_path / "raw").iterdir()) == ["a.gz", "b.gz"]
    tidy(tmp_path, NOW_S, keep_s=400.0, keep_bytes=1500)
    assert [entry.name for entry in (tmp_path / "raw").iterdir()] == ["b.gz"]


@pytest.mark.parametrize(("jump_s", "left_in_the_end"), [(YEAR_S, 0), (-YEAR_S, 0), (-NOW_S, 2)])
def test_files_age_with_elapsed_time_but_not_with_clock_jumps(tmp_path, jump_s, left_in_the_end, monkeypatch):
    wall_s, up_s = NOW_S, 100.0
    monkeypatch.setattr(time, "time", lambda: wall_s)
    monkeypatch.setattr(time, "clock_gettime", lambda clock: up_s)
    booted_s = wall_s - up_s
    raw(tmp_path, "before", 0.0, b"x")
    wall_s += jump_s
    raw(tmp_path, "after", -jump_s, b"x")
    for passed_s, left in ((60.0, 2), (2 * YEAR_S, left_in_the_end)):
        wall_s, up_s = NOW_S + jump_s + passed_s, 100.0 + passed_s
        tidy(tmp_path / "raw", file_time_s(booted_s))
        assert len(list((tmp_path / "raw").iterdir())) == left
