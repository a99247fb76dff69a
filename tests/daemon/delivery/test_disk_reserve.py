"""Room on the disk: a reserve on a disk that is really full, and old raw times that make room."""

import errno
import gzip
import hashlib
import os
import shutil
import subprocess
from contextlib import closing

import pytest
from disks import ext4_without_power, use_up_inodes
from records_made import made

from benchd.daemon.delivery.disk_reserve import BESIDE_BYTES, Clock, Reserve, tidy
from benchd.daemon.delivery.outbox import CLOCK_SET_S, Outbox, open_or_salvage
from benchd.daemon.delivery.sinks import JournalSink
from benchd.daemon.errors import Full
from benchd.daemon.journal import read
from benchd.daemon.machine.folders import sync

SIZE = 2**20
NO_SPACE = os.strerror(errno.ENOSPC)
NOW_S = CLOCK_SET_S + 1e8
YEAR_S = 365 * 86400.0


def fill(outbox):
    for number in range(100):
        outbox.add(str(number), "t", 1, b"x" * 100_000)


def test_a_full_disk_takes_one_more_result_once_the_reserve_is_let_go(small_disk):
    reserve = Reserve(small_disk / "reserve", SIZE)
    assert reserve.hold() is None
    assert (small_disk / "reserve").stat().st_blocks * 512 >= SIZE
    with Outbox(small_disk / "outbox.db") as outbox:
        with pytest.raises(Full, match="is full; free some space"):
            fill(outbox)
        taken = outbox.counts().pending
        assert taken > 3
        reserve.release()
        outbox.add("last", "t", 1, b"y" * 100_000)
        assert [row.key for row in outbox.pending(100)] == [*map(str, range(taken)), "last"]
        assert reserve.hold() == NO_SPACE
        assert not (small_disk / "reserve").exists()


def eat(folder, left=0):
    """Fill the disk but for so many bytes, and return the file that does."""
    filler = folder / "filler"
    with filler.open("wb") as file:
        os.posix_fallocate(file.fileno(), 0, shutil.disk_usage(folder).free - left)
    return filler


def test_beside_a_reserve_on_a_full_disk_there_is_no_room_for_a_case(small_disk):
    reserve = Reserve(small_disk / "reserve", SIZE)
    eat(small_disk, left=SIZE + BESIDE_BYTES - 4096)
    assert reserve.hold() == NO_SPACE
    assert not (small_disk / "reserve").exists()
    (small_disk / "filler").unlink()
    assert reserve.hold() is None
    eat(small_disk, left=BESIDE_BYTES - 4096)
    assert reserve.hold() == NO_SPACE
    assert (small_disk / "reserve").exists(), "let go before anyone needed it"


def test_an_outbox_on_a_full_disk_opens_in_the_place_of_the_reserve(small_disk):
    path, reserve = small_disk / "outbox.db", Reserve(small_disk / "reserve", SIZE)
    with Outbox(path) as outbox:
        outbox.add("a", "t", 1, b"x")
    assert reserve.hold() is None
    eat(small_disk)
    with pytest.raises(Full, match=r"outbox\.db: disk I/O error; free some space"):
        Outbox(path)
    outbox, told = reserve.write(lambda: open_or_salvage(path))
    with outbox:
        assert told is None
        assert outbox.counts().pending == 1


@pytest.fixture
def few_files(tmp_path):
    """A file system of 200 inodes."""
    folder = tmp_path / "few"
    folder.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "nr_inodes=200", "tmpfs", folder], check=False).returncode:
        pytest.skip("needs the right to mount a small tmpfs")
    yield folder
    subprocess.run(["umount", folder], check=True)


def test_a_disk_without_inodes_takes_no_case_and_opens_the_outbox_in_the_place_of_the_reserve(few_files):
    path, reserve = few_files / "outbox.db", Reserve(few_files / "reserve", SIZE)
    with Outbox(path) as outbox:
        outbox.add("a", "t", 1, b"x")
    assert reserve.hold() is None
    use_up_inodes(few_files)
    assert reserve.hold() == "too few free inodes; delete small files"
    with pytest.raises(Full, match=r"outbox\.db: unable to open database file; .* free inodes"):
        Outbox(path)
    outbox, told = reserve.write(lambda: open_or_salvage(path))
    with outbox:
        assert (told, outbox.counts().pending) == (None, 1)
        assert reserve.hold() == "too few free inodes; delete small files"
    for small in few_files.glob("small-*"):
        small.unlink()
    assert reserve.hold() is None


def test_a_journal_that_moved_on_a_disk_without_inodes_begins_anew_once_there_is_one(few_files):
    path, runs = few_files / "records.jsonl", few_files / "runs"
    runs.mkdir()
    with closing(JournalSink(path)) as sink:
        sink.publish(made(), b"x")
        use_up_inodes(few_files)
        with pytest.raises(Full, match=r"records\.jsonl: No space left"):
            sink.put_away(runs, 1000.0, from_bytes=1)
        sink.put_away(runs, 2000.0, from_bytes=100)
        (few_files / "small-1").unlink()
        sink.publish(made(), b"y")
    assert list(read(path)) == [b"y"]
    assert list(read(runs / "records-1000.jsonl")) == [b"x"]


def test_a_disk_that_became_read_only_takes_no_case(small_disk):
    reserve = Reserve(small_disk / "reserve", SIZE)
    assert reserve.hold() is None
    subprocess.run(["mount", "-o", "remount,ro", small_disk], check=True)
    assert reserve.hold() == os.strerror(errno.EROFS)


def test_a_salvage_that_finds_no_room_leaves_all_as_it_was_for_the_next_one(small_disk):
    path = small_disk / "outbox.db"
    with Outbox(path) as outbox:
        for number in range(10):
            outbox.add(str(number), "t", 1, b"x" * 100_000)
    with path.open("r+b") as file:
        file.seek(-4096, os.SEEK_END)
        file.write(b"\xff" * 4096)
    before, filler = path.read_bytes(), eat(small_disk, left=600_000)
    with pytest.raises(Full):
        open_or_salvage(path)
    assert sorted(file.name for file in small_disk.iterdir()) == ["filler", "outbox.db"]
    assert path.read_bytes() == before
    filler.unlink()
    outbox, told = open_or_salvage(path)
    with outbox:
        assert outbox.counts().pending >= 8
        assert "was damaged" in told


def test_a_journal_on_a_full_disk_takes_the_record_in_the_place_of_the_reserve_and_no_half_of_one(small_disk):
    reserve = Reserve(small_disk / "reserve", SIZE)
    assert reserve.hold() is None
    sink = JournalSink(small_disk / "records.jsonl", reserve)
    with closing(sink):
        sink.publish(made(), b"first")
        eat(small_disk, left=4096)
        sink.publish(made(), b"y" * 100_000)
        assert not (small_disk / "reserve").exists()
        with pytest.raises(Full, match=r"records\.jsonl: No space left on device; free some space"):
            sink.publish(made(), b"z" * 2 * SIZE)
        assert list(read(small_disk / "records.jsonl")) == [b"first", b"y" * 100_000]


def test_a_record_that_finds_no_room_is_owed_and_appended_before_the_next(small_disk):
    reserve = Reserve(small_disk / "reserve", SIZE)
    with closing(JournalSink(small_disk / "records.jsonl", reserve)) as sink:
        filler = eat(small_disk, left=4096)
        for body in (b"y" * 100_000, b"z"):
            with pytest.raises(Full):
                sink.publish(made(), body)
        with pytest.raises(Full):
            sink.settle()
        assert sink.owes
        filler.unlink()
        sink.settle()
        assert not sink.owes
        assert list(read(small_disk / "records.jsonl")) == [b"y" * 100_000, b"z"]


def test_a_reserve_that_is_held_stays(tmp_path):
    reserve = Reserve(tmp_path / "reserve", SIZE)
    assert reserve.hold() is None
    assert reserve.hold() is None
    assert (tmp_path / "reserve").stat().st_size == SIZE
    reserve.release()
    reserve.release()


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


def test_a_power_cut_takes_no_raw_times_that_were_compressed(tmp_path):
    disk = tmp_path / "disk"
    with ext4_without_power(tmp_path / "image", disk) as cut:
        raw(disk, "a", 100.0, b"x" * 100_000)
        os.sync()
        tidy(disk, NOW_S)
        # what any other write does seconds later: it commits names and sizes, not another file's content
        (disk / "outbox.db").touch()
        sync(disk / "outbox.db")
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
def test_a_clock_that_jumps_makes_nothing_old_and_time_that_passes_does(tmp_path, jump_s, left_in_the_end):
    wall_s, up_s = NOW_S, 100.0
    clock = Clock(lambda: wall_s, lambda: up_s)
    raw(tmp_path, "before", 0.0, b"x")
    wall_s += jump_s
    raw(tmp_path, "after", -jump_s, b"x")
    with filled(tmp_path / "outbox.db", NOW_S, wall_s) as outbox:
        for passed_s, left in ((60.0, 2), (2 * YEAR_S, left_in_the_end)):
            wall_s, up_s = NOW_S + jump_s + passed_s, 100.0 + passed_s
            tidy(tmp_path / "raw", clock.now_s())
            outbox.forget_sent(clock.now_s())
            assert len(list((tmp_path / "raw").iterdir())) == outbox.counts().sent == left


def filled(path, *sent_s):
    outbox = Outbox(path)
    for at_s in sent_s:
        outbox.add(str(at_s), "t", 1, b"x")
        outbox.mark_sent(outbox.pending(1)[0].seq, at_s=at_s)
    return outbox
