"""A journal after every way a write can end."""

import errno
import gzip
import os
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchd.daemon.errors import Full, SchemaError, UsageError
from benchd.daemon.journal import Journal, explaining, read


def append(path, *records):
    with closing(Journal(path)) as journal:
        for record in records:
            journal.append(record)


def test_records_come_back_as_they_were(tmp_path):
    path = tmp_path / "made" / "here" / "records.jsonl"
    append(path, b'{"a":1}')
    append(path, b'{"b":"\xc3\xa4"}', b"x" * 300_000)
    assert list(read(path)) == [b'{"a":1}', b'{"b":"\xc3\xa4"}', b"x" * 300_000]


def test_a_torn_last_line_is_named_by_its_number(tmp_path):
    path = tmp_path / "records.jsonl"
    path.write_bytes(b'{"a":1}\n{"b":2}\n{"c":')
    lines = read(path)
    assert [next(lines), next(lines)] == [b'{"a":1}', b'{"b":2}']
    with pytest.raises(SchemaError, match=r"records\.jsonl line 3: truncated"):
        next(lines)


@given(st.lists(st.binary(max_size=20).filter(lambda record: b"\n" not in record), min_size=1), st.data())
def test_a_record_after_a_crash_has_a_line_of_its_own(tmp_path_factory, records, data):
    path = tmp_path_factory.mktemp("journal") / "records.jsonl"
    append(path, *records)
    whole = path.read_bytes()
    kept = data.draw(st.integers(0, len(whole)))
    os.truncate(path, kept)
    append(path, b"after")
    lines = list(read(path))
    complete = whole[:kept].count(b"\n")
    assert lines[:complete] == records[:complete]
    assert lines[-1] == b"after"
    assert len(lines) <= complete + 2


def test_what_was_announced_is_there_after_a_kill(tmp_path):
    path = tmp_path / "records.jsonl"
    code = (
        "import sys; from pathlib import Path; from benchd.daemon.journal import Journal\n"
        "journal = Journal(Path(sys.argv[1]))\n"
        "for number in range(10**6): journal.append(b'%d' % number); print(number, flush=True)"
    )
    with subprocess.Popen([sys.executable, "-c", code, str(path)], stdout=subprocess.PIPE) as child:
        announced = [int(child.stdout.readline()) for _ in range(100)]
        child.kill()
        announced += [int(line) for line in child.stdout if line.endswith(b"\n")]
    append(path, b"after")
    lines = list(read(path))
    assert [int(line) for line in lines[: len(announced)]] == announced
    assert lines[-1] == b"after"


LINES = b"".join(b"%d\n" % number for number in range(10_000))
ARCHIVE = gzip.compress(LINES)


@pytest.mark.parametrize(
    "damaged",
    [ARCHIVE[:-100], ARCHIVE[:5000] + b"\xff" * 5000 + ARCHIVE[10_000:], bytes(len(ARCHIVE)), LINES],
    ids=["truncated", "overwritten", "zeros", "not compressed"],
)
def test_a_damaged_archive_is_named_as_one(tmp_path, damaged):
    path = tmp_path / "records-1000.jsonl.gz"
    path.write_bytes(damaged)
    with pytest.raises(SchemaError, match=r"records-1000\.jsonl\.gz: a damaged archive .*; restore it from a copy"):
        list(read(path))


def test_a_full_disk_is_named_with_the_cause(tmp_path):
    with closing(Journal(tmp_path / "records.jsonl")) as journal, Path("/dev/full").open("r+b", buffering=0) as full:
        os.dup2(full.fileno(), journal._file.fileno())
        with pytest.raises(UsageError, match=r"records\.jsonl: No space left"):
            journal.append(b"{}")


@pytest.mark.parametrize("put_there", ["before", "meanwhile"])
@pytest.mark.parametrize("make", [os.mkfifo, lambda path: path.symlink_to("/dev/full")], ids=["pipe", "device"])
def test_a_pipe_or_a_device_is_no_journal(tmp_path, make, put_there):
    path = tmp_path / "records.jsonl"
    if put_there == "before":
        make(path)
        with pytest.raises(UsageError, match=r"records\.jsonl: not a regular file; move it away"):
            Journal(path)
        return
    with closing(Journal(path)) as journal:
        path.unlink()
        make(path)
        with pytest.raises(UsageError, match="not a regular file"):
            journal.append(b"{}")
        path.unlink()
        journal.append(b"{}")
    assert list(read(path)) == [b"{}"]


@pytest.mark.parametrize(
    ("number", "is_full"),
    [(errno.ENOSPC, True), (errno.EDQUOT, True), (errno.EIO, True), (errno.EROFS, True), (errno.EACCES, False)],
)
def test_a_disk_that_fails_is_told_from_a_path_that_is_wrong(number, is_full, tmp_path):
    """A service waits for the first, and gives up what it was to do for the second."""
    with pytest.raises(UsageError) as refused, explaining(tmp_path):
        raise OSError(number, os.strerror(number))
    assert isinstance(refused.value, Full) is is_full
